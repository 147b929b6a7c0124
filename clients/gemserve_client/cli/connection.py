"""Connects a command to its server, and turns each failure into one line."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from gemserve_client.address import DEFAULT_URL, has_key, redact, server_key, server_url
from gemserve_client.cli.errors import Failed, Misused

if TYPE_CHECKING:
    from gemserve_client.client import GemserveClient


def add_server_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument("--url", help=f"default: GEMSERVE_URL, or {DEFAULT_URL}")
    group.add_argument("--api-key", help="default: GEMSERVE_API_KEY, which no process list shows")


@contextmanager
def connected(arguments: argparse.Namespace) -> Iterator[GemserveClient]:
    """A client whose errors are raised as `Failed`, or as `Misused` for a bad address."""
    url, key = server_url(arguments.url), server_key(arguments.api_key)
    if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
        raise Misused(f"url={redact(url)}: must look like {DEFAULT_URL}")
    if not (key.isascii() and key.isprintable()):
        # the message does not show the key, which is secret
        raise Misused("api key: must be printable ASCII")
    try:
        import openai

        from gemserve_client.client import GemserveClient
    except ModuleNotFoundError as error:
        raise Failed(f"needs {error.name}: pip install 'gemserve[client]'") from error
    try:
        with GemserveClient(base_url=url, api_key=key) as client:
            yield client
    except openai.AuthenticationError as error:
        hint = "" if has_key(arguments.api_key) else ": give --api-key or GEMSERVE_API_KEY"
        raise Failed(f"{_said(error)} (status {error.status_code}{hint})") from error
    except openai.APIStatusError as error:
        asked = f"{error.request.method} {redact(str(error.request.url))}"
        raise Failed(f"{_said(error)} (status {error.status_code}, {asked})") from error
    except openai.APIConnectionError as error:
        raise Failed(f"no answer from {redact(url)}: {error.__cause__ or error}") from error
    except openai.APIError as error:
        raise Failed(_said(error)) from error


def first_model(client: GemserveClient) -> str:
    """The first model that the server lists."""
    for model in client.models.list():
        return model.id
    raise Failed(f"{redact(str(client.base_url))} lists no model: --model NAME")


def _said(error: Any) -> str:
    """What the server said, without the SDK's words around it, on one line."""
    body = error.body
    text = body.get("message") if isinstance(body, dict) else None
    return " ".join(str(text or error.message).split())
