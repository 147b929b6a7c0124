"""`/v1/documents` of two keys, in any order of requests, beside a model of what it must hold."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import httpx
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

from tests.fakes import CHAT, FakeCore, live_server, serving_over
from tests.fuzz.cases import bounded, cases

PATH = "/v1/documents"
KEYS = ("sk-one", "sk-two")
LIMIT = 4  # documents of a key
BYTES, MEMORY = 400, 500
TEXTS = st.sampled_from(("The river runs. " * 4, "é🌍" * 10, "x" * 150, "x" * 399, "x" * 401, " "))
WHO = st.sampled_from(KEYS)


def memory_of(text: str) -> int:
    """What Python takes for a text of which it also has the UTF-8."""
    utf_8 = 0 if text.isascii() else len(text.encode()) + 1
    return sys.getsizeof("".join(list(text))) + utf_8


class Documents(RuleBasedStateMachine):
    """`held`: key → id → text, as it must be."""

    ids = Bundle("ids")
    tokenizer: Any = None

    def __init__(self) -> None:
        super().__init__()
        self._folder = tempfile.TemporaryDirectory()
        keys = Path(self._folder.name) / "keys"
        keys.write_text("\n".join(KEYS))
        serving = serving_over(
            FakeCore(), self.tokenizer, api_key_file=str(keys),
            max_documents=LIMIT, document_memory_bytes=MEMORY, max_document_bytes=BYTES,
        )  # fmt: skip
        self._server = live_server(serving)
        self._client = httpx.Client(base_url=self._server.__enter__(), trust_env=False, timeout=60)
        self.held: dict[str, dict[str, str]] = {key: {} for key in KEYS}

    def teardown(self) -> None:
        self._client.close()
        self._server.__exit__(None, None, None)
        self._folder.cleanup()

    def _send(self, who: str, method: str, path: str, body: Any = None) -> httpx.Response:
        with bounded("documents", cpu_s=20):
            return self._client.request(
                method, path, json=body, headers={"Authorization": f"Bearer {who}"}
            )

    @rule(target=ids, who=WHO, text=TEXTS, wait=st.booleans(), pin=st.booleans())
    def store(self, who: str, text: str, wait: bool, pin: bool) -> Any:
        held, size = self.held[who], len(text.encode())
        used = sum(map(memory_of, held.values()))
        reply = self._send(who, "POST", PATH, {"text": text, "wait": wait, "pin": pin})
        is_blank = not text.strip()
        is_full = len(held) >= LIMIT or size > BYTES or used + memory_of(text) > MEMORY
        if is_full or is_blank:
            assert reply.status_code == 400
            error = reply.json()["error"]
            is_about_room = str(error["code"]).startswith(("too_many_", "document_"))
            assert (is_full and is_about_room) or (is_blank and error["param"] == "text")
            return multiple()
        assert reply.status_code == 200, reply.text
        held[reply.json()["id"]] = text
        return reply.json()["id"]

    @rule(who=WHO, name=ids)
    def look(self, who: str, name: str) -> None:
        reply = self._send(who, "GET", f"{PATH}/{name}")
        assert reply.status_code == (200 if name in self.held[who] else 404)

    @rule(who=WHO, name=consumes(ids))
    def delete(self, who: str, name: str) -> None:
        """By another key, too; the owner's is then as it was."""
        reply = self._send(who, "DELETE", f"{PATH}/{name}")
        assert reply.status_code == (200 if name in self.held[who] else 404)
        self.held[who].pop(name, None)

    @rule(who=WHO, name=ids, is_streamed=st.booleans())
    def ask(self, who: str, name: str, is_streamed: bool) -> None:
        parts = [{"type": "file", "file": {"file_id": name}}, {"type": "text", "text": "Who?"}]
        body = {
            "model": "fake",
            "messages": [{"role": "user", "content": parts}],
            "stream": is_streamed,
        }
        reply = self._send(who, "POST", CHAT, body)
        if name in self.held[who]:
            assert reply.status_code == 200, reply.text
        else:
            assert reply.status_code == 404
            assert reply.json()["error"]["code"] == "document_not_found"

    @invariant()
    def lists_are_right(self) -> None:
        for who, held in self.held.items():
            listed = self._send(who, "GET", PATH).json()["data"]
            assert {each["id"]: each["bytes"] for each in listed} == {
                name: len(text.encode()) for name, text in held.items()
            }


def test_documents_of_two_keys(tokenizer: Any) -> None:
    Documents.tokenizer = tokenizer
    run_state_machine_as_test(Documents, settings=cases(2, many_times=0.1, stateful_step_count=15))
