"""Keys, tokens and texts that a server is given appear nowhere but where they belong.

A whole process serves, with every level of every logger switched on. Its clients and its
environment plant secrets wherever one can be put; then all that it gives out is searched.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.shared.server_process import free_port
from gemserve.cli.main import main
from tests.fakes import CHAT, COMPLETIONS, wait_for
from tests.served import PATIENCE_S

# `seed` 666 fails where all of a request is known
PROGRAM = """
import logging, sys
logging.Logger.isEnabledFor = lambda self, level: True
from gemserve.api.routes import submission
from gemserve.cli.main import main
cache_salt = submission._cache_salt

def failing(body):
    if getattr(body, "seed", None) == 666:
        raise RuntimeError("planted")
    return cache_salt(body)

submission._cache_salt = failing
logging.basicConfig(level=1)
sys.exit(main())
"""


class Planted:
    """Distinctive secrets, and where each was put."""

    def __init__(self) -> None:
        self._where: dict[str, str] = {}

    def __call__(self, where: str) -> str:
        secret = f"sk-{secrets.token_hex(12)}"
        self._where[secret] = where
        return secret

    def found_in(self, text: str) -> list[str]:
        """Where the secrets that `text` shows were put."""
        return [where for secret, where in self._where.items() if secret in text]


@contextmanager
def collector() -> Iterator[tuple[int, list[bytes]]]:
    """The port of an OpenTelemetry collector, and the spans that it gets. It refuses once."""
    bodies: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200 if bodies else 503)
            self.send_header("Content-Length", "0")
            self.end_headers()
            bodies.append(body)

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server.server_port, bodies
        server.shutdown()


@contextmanager
def process(words: list[str], environment: dict[str, str], log: Path) -> Iterator[str]:
    """The address of a server that is ready. It ends in order, so that its spans are sent."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-c", PROGRAM, "serve", "--port", str(port), *words]
    with log.open("wb") as output:
        served = subprocess.Popen(command, stdout=output, stderr=output, env=environment)

    def is_ready() -> bool:
        assert served.poll() is None, log.read_text()
        try:
            return httpx.get(f"{url}/ready", timeout=10).status_code == 200
        except httpx.TransportError:
            return False

    try:
        wait_for(is_ready, 2 * PATIENCE_S)
        yield url
        served.send_signal(signal.SIGTERM)
        served.wait(60)
    finally:
        served.kill()
        served.wait()


def command_lines() -> str:
    """The arguments of all processes, among them those that the server has started."""
    found = ""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found += path.read_bytes().decode(errors="replace")
        except OSError:
            continue
    return found


def refused(url: str, planted: Planted, good: str, text: str) -> Iterator[httpx.Response]:
    """Replies to requests that fail, in every way that an error is made."""
    chat = {"model": "builtin", "messages": [{"role": "user", "content": text}], "max_tokens": 4}
    for path in ("/v1/models", "/v1/chat/completions", "/v1/messages", "/api/tags", "/nowhere"):
        for header, value in (
            ("Authorization", f"Bearer {planted(f'a wrong key for {path}')}"),
            ("Authorization", f"Basic {planted(f'another scheme for {path}')}"),
            ("Authorization", planted(f"a key without its scheme for {path}")),
            ("x-api-key", planted(f"a wrong key of Anthropic's for {path}")),
            ("api-key", planted(f"a header of Azure's for {path}")),
            ("Cookie", f"session={planted(f'a cookie for {path}')}"),
        ):
            yield httpx.get(url + path, headers={header: value})
        query = {"api_key": planted(f"the query of {path}"), "key": planted("the query, twice")}
        yield httpx.get(url + path, params=query)
        yield httpx.get(url + path, params=query, headers={"Authorization": f"Bearer {good}"})
    as_user = {"Authorization": f"Bearer {good}"}
    for fields in ({"temperature": 9}, {"seed": 666}, {"model": "nobody"}, {"n": 10_000}):
        for path in (CHAT, "/v1/messages", "/v1/filter"):
            yield httpx.post(url + path, json=chat | fields, headers=as_user, timeout=PATIENCE_S)
        yield httpx.post(
            url + COMPLETIONS,
            json={"model": "builtin", "prompt": text, "max_tokens": 4} | fields,
            headers=as_user,
            timeout=PATIENCE_S,
        )
    yield httpx.post(url + CHAT, content=json.dumps(chat)[:-1], headers=as_user)
    yield httpx.post(url + "/v1/models", json=chat, headers=as_user)
    yield httpx.post(url + "/v1/adapters", json={"name": "x", "path": "y"}, headers=as_user)


def answered(url: str, good: str, text: str) -> Iterator[httpx.Response]:
    """Replies to requests of texts that are answered."""
    with httpx.Client(headers={"Authorization": f"Bearer {good}"}, timeout=PATIENCE_S) as client:
        long = f"{text} " + "The river runs past the houses. " * 120
        stored = client.post(f"{url}/v1/documents", json={"text": long})
        yield stored
        chat = {
            "model": "builtin",
            "messages": [{"role": "user", "content": f"{long}\n\nWhat is written?"}],
            "max_tokens": 4,
        }
        for stream in (False, True):
            yield client.post(url + CHAT, json=chat | {"stream": stream})
        yield client.post(f"{url}/v1/messages", json=chat)
        del chat["max_tokens"]
        yield client.post(f"{url}/api/chat", json=chat | {"options": {"num_predict": 4}})
        yield client.post(f"{url}/tokenize", json={"model": "builtin", "prompt": text})
        asked = {"model": "builtin", "prompt": "What?", "document": stored.json()["id"]}
        yield client.post(url + COMPLETIONS, json=asked | {"max_tokens": 4})


@pytest.mark.timeout(900)  # a start takes minutes on a machine that is very busy
@pytest.mark.parametrize("log_format", ["text", pytest.param("json", marks=pytest.mark.slow)])
def test_no_key_and_no_text_is_given_out(log_format: str, tmp_path: Path) -> None:
    planted, texts = Planted(), Planted()
    good, admin = planted("--api-key-file"), planted("--admin-key-file")
    text = f"The {texts('a prompt')} is under the bridge."
    (tmp_path / "keys").write_text(f"# {planted('a comment in the key file')}\n{good}\n")
    (tmp_path / "admins").write_text(f"{admin}\n")
    log, cache = tmp_path / "log", tmp_path / "cache"
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("GEMSERVE_", "OTEL_"))}
    with collector() as (port, spans):
        environment |= {
            "XDG_CACHE_HOME": str(cache),
            "HF_HOME": str(cache / "huggingface"),
            "HF_TOKEN": planted("HF_TOKEN"),
            "OPENAI_API_KEY": planted("OPENAI_API_KEY"),
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": (
                f"http://me:{planted('the address of traces')}@127.0.0.1:{port}/v1/traces"
                f"?key={planted('the query of traces')}"
            ),
            # the second one is no header, and OpenTelemetry warns of it
            "OTEL_EXPORTER_OTLP_HEADERS": (
                f"x-token={planted('OTEL headers')},Authorization: Bearer {planted('OTEL mistake')}"
            ),
        }
        words = [
            *("--device", "cpu", "--cpu-step", "off", "--kv-memory", "64MiB"),
            *("--filter-min-tokens", "256"),
            *("--api-key-file", str(tmp_path / "keys")),
            *("--admin-key-file", str(tmp_path / "admins")),
            *("--cache-dir", str(cache / "documents"), "--log-format", log_format),
        ]
        with process(words, environment, log) as url:
            replies = list(answered(url, good, text))
            assert [r.text for r in replies if r.status_code != 200] == []
            assert planted.found_in("".join(reply.text for reply in replies)) == []
            errors = list(refused(url, planted, good, text))
            assert {400, 401, 403, 404, 405, 500} <= {reply.status_code for reply in errors}
            for reply in errors:
                assert planted.found_in(reply.text + str(reply.headers)) == [], reply.url
                if reply.status_code in (401, 500):
                    assert texts.found_in(reply.text) == [], reply.url
            pages = ("/metrics", "/health", "/ready", "/load", "/version", "/v1/models", "/")
            as_admin = {"Authorization": f"Bearer {admin}"}
            shown = "".join(httpx.get(url + p, headers=as_admin).text for p in pages)
            shown += command_lines()
    said = log.read_text(errors="replace")
    names = [str(path) for path in cache.rglob("*")]
    assert any("documents/kv-" in name for name in names)
    sent = b"".join(spans).decode(errors="replace")
    assert "gemserve.request_id" in sent
    assert "planted" in said
    assert "DEBUG" in said.upper()
    for place, content in (
        ("the log", said),
        ("a page", shown),
        ("spans", sent),
        ("names of files", "\n".join(names)),
    ):
        assert planted.found_in(content) == [], place
        assert texts.found_in(content) == [], place
    for path in cache.rglob("*"):
        if path.is_file():
            content = path.read_bytes().decode(errors="replace")
            assert planted.found_in(content) + texts.found_in(content) == [], path


@pytest.mark.parametrize(
    ("words", "environment"),
    [
        (["--api-key", "sk-secret"], {}),
        (["--api-key=sk-secret"], {}),
        (["--hf-token", "sk-secret", "--port", "1"], {}),
        (["--api-key-file", "sk-secret"], {}),
        ([], {"GEMSERVE_API_KEY": "sk-secret"}),
        ([], {"GEMSERVE_API_KEYS": "sk-secret"}),
        ([], {"GEMSERVE_API_KEY_FILE": "sk-secret"}),
    ],
)
def test_a_key_in_the_wrong_place_is_not_shown(
    words: list[str],
    environment: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """vLLM has --api-key. What is printed at a start is in the logs of a cluster."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("signal.signal", lambda *_: None)  # serve would change it for all tests
    try:
        status = main(["serve", *words])
    except SystemExit as stopped:
        status = stopped.code
    said = capsys.readouterr()
    assert status == 2
    assert "sk-secret" not in said.out + said.err
    assert "KEY" in said.err.upper() or "TOKEN" in said.err.upper()
