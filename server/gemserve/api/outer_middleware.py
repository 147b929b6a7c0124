"""The middleware that sees a request first: error forms, request ids, hosts, CORS and keys.

A server with one engine has it around its routes. Where several replicas answer, it stands once, in
front of them, so that keys and quotas hold over all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from starlette.applications import Starlette
from starlette.middleware.cors import CORSMiddleware

from gemserve.api.access.gate import Gate
from gemserve.api.access.host_check import HostCheck, allowed_hosts
from gemserve.api.access.keys import open_keys
from gemserve.api.access.plain_paths import PlainPaths
from gemserve.api.access.quota import Quota
from gemserve.api.access.request_id import RequestId
from gemserve.api.replies.token_counts import (
    FILTER_HEADER,
    KEPT_TOKENS_HEADER,
    MAX_TOKENS_HEADER,
    PROMPT_TOKENS_HEADER,
)
from gemserve.config import ServerConfig
from gemserve.wings import wings

# the reply's headers that a page of another origin may read
EXPOSED_HEADERS = (
    "Retry-After",
    "X-Request-Id",
    PROMPT_TOKENS_HEADER,
    KEPT_TOKENS_HEADER,
    MAX_TOKENS_HEADER,
    FILTER_HEADER,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """What is called with the code of a refusal, a reply's status, and for an internal error."""

    refusal: Callable[[str], None]
    reply: Callable[[int], None]
    error: Callable[[], None]


def add_outer_middleware(app: Starlette, config: ServerConfig, counts: Counts) -> None:
    """The last one added sees a request first and its reply last.

    Raises `ConfigError` if key files are wrong.
    """
    keys = open_keys(config)
    if keys is not None:
        quota = Quota(
            requests_per_minute=config.requests_per_minute,
            concurrency_per_key=config.concurrency_per_key,
            tokens_per_minute=config.tokens_per_minute,
        )
        app.add_middleware(Gate, keys=keys, quota=quota, on_refusal=counts.refusal)
    if config.cors_origins:  # outside the gate: a browser's preflight carries no key
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.cors_origins,
            allow_methods=("GET", "HEAD", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=EXPOSED_HEADERS,
            allow_private_network=True,
        )
    hosts = allowed_hosts(config)
    if hosts is not None:
        app.add_middleware(HostCheck, names=hosts, on_refusal=counts.refusal)
    add_request_id(app, counts)
    for wing in wings():
        for form in wing.error_forms():
            app.add_middleware(form)
    app.add_middleware(PlainPaths)


def add_request_id(app: Starlette, counts: Counts) -> None:
    app.add_middleware(RequestId, on_reply=counts.reply, on_error=counts.error)
