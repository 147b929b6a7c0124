"""The requests of a mixed load: every route, good and bad clients, documents, libraries, agents.

All of it is drawn from a seed. Answers are facts of the text, which the built-in model finds with a
clear margin, or texts of adapters, schemas and tools that only have to be the same each time.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

from benchmarks.agents.request_shapes import SHAPES, make_chat
from benchmarks.robustness.answers import CHAT, COMPLETIONS, MESSAGES, RESPONSES, SELECTION
from benchmarks.robustness.load_server import ADAPTERS, TENANTS, TURNING
from benchmarks.robustness.mixed_client import Call, reloading
from gemserve.synthetic.facts import Needle, draw_needles
from gemserve.synthetic.prose import stdlib_sentences

WEIGHTS = {
    "chat": 18.0,
    "completion": 8.0,
    "choices": 3.0,
    "document": 10.0,
    "long": 0.5,
    "stored": 2.0,
    "window": 1.0,
    "library": 4.0,
    "shelf": 0.5,
    "agent": 4.0,
    "schema": 5.0,
    "tool": 4.0,
    "filter": 4.0,
    "responses": 7.0,
    "messages": 7.0,
    "adapter": 7.0,
    "turning": 3.0,
    "reload": 0.5,
    "cancel": 6.0,
    "half": 3.0,
    "slow": 2.0,
    "error": 8.0,
    "count": 2.0,
}
LONG_TOKENS, DOCUMENT_TOKENS, STORED_TOKENS, SHORT_TOKENS = 32000, 6000, 3000, 300
SEGMENTED_TOKENS, SEGMENT, MOST_AGENT_TOKENS = 12000, 2048, 16000
LIBRARY, LIBRARY_FILES = "shared", 4
_SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["lamp", "kettle", "bridge"]},
        "known": {"type": "boolean"},
        "digit": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["kind", "known", "digit"],
}
_TOOL = {"name": "look_up", "description": "Look up a code.", "parameters": _SCHEMA}


@dataclass(frozen=True, slots=True)
class Facts:
    """A text with several facts in it."""

    text: str
    needles: list[Needle]

    def asked(self, index: int) -> str:
        return f"{self.text}\n\n{self.needles[index].question}"


class Mix:
    """All calls of a run, by kind. `tokenizer` counts the tokens of texts."""

    def __init__(
        self,
        model: str,
        tokenizer: Any,
        seed: int,
        kinds: Iterable[str] = tuple(WEIGHTS),
        *,
        scale: float = 1.0,
    ) -> None:
        """`scale`: of all texts' lengths, for models that take too long to read them."""
        self._model, self._scale = model, scale
        self._tokenizer = tokenizer
        self._rng = Random(f"mix {seed}")
        self.calls: dict[str, list[Call]] = {}
        self.files = {f"notes-{i}.txt": self.facts(STORED_TOKENS) for i in range(LIBRARY_FILES)}
        makers = (
            *(self._plain, self._documents, self._segments, self._libraries, self._agents),
            *(self._structured, self._other_routes),
            *(self._with_adapters, self._bad_clients, self._mistakes),
        )
        for make in makers:
            for call in make():
                if call.kind in kinds:
                    self.calls.setdefault(call.kind, []).append(call)

    def draw(self, rng: Random) -> Call:
        kinds = [kind for kind in WEIGHTS if kind in self.calls]
        (kind,) = rng.choices(kinds, [WEIGHTS[kind] for kind in kinds])
        return rng.choice(self.calls[kind])

    def facts(self, num_tokens: int, count: int = 2) -> Facts:
        """Prose of about `num_tokens` tokens, scaled, with `count` facts at random places."""
        sentences = stdlib_sentences()
        at = self._rng.randrange(len(sentences))
        left = min(num_tokens, max(SHORT_TOKENS, round(num_tokens * self._scale)))
        needles = draw_needles(self._rng, count)
        pieces = [needle.statement for needle in needles]
        left -= sum(len(self._tokenizer.encode(piece)) for piece in pieces)
        chosen: list[str] = []
        while True:
            sentence = sentences[(at + len(chosen)) % len(sentences)]
            left -= len(self._tokenizer.encode(sentence)) + 1
            if left < 0:
                break
            chosen.append(sentence)
        for piece in pieces:
            chosen.insert(self._rng.randrange(len(chosen) + 1), piece)
        return Facts(" ".join(chosen), needles)

    def chat(self, content: str, **fields: Any) -> dict[str, Any]:
        body = {"model": self._model, "messages": [{"role": "user", "content": content}]}
        return {**body, "max_tokens": 24, "temperature": 0, **fields}

    def streamed_chat(self, content: str, **fields: Any) -> dict[str, Any]:
        return self.chat(content, stream=True, stream_options={"include_usage": True}, **fields)

    def call(self, name: str, path: str, body: Any, manner: str, **more: Any) -> Call:
        return Call(
            name=name, path=path, body=body, tenant=self._tenant(name), manner=manner, **more
        )

    def _tenant(self, name: str) -> str:
        return TENANTS[int(name.split("/")[1]) % len(TENANTS)]

    def _plain(self) -> Iterator[Call]:
        for i in range(8):
            facts = self.facts(SHORT_TOKENS)
            manner, make = ("stream", self.streamed_chat) if i % 4 else ("whole", self.chat)
            yield self.call(f"chat/{i}", CHAT, make(facts.asked(0)), manner)
            fields = {"model": self._model, "max_tokens": 16, "temperature": 0.7, "seed": i}
            prompt = f"{facts.asked(1)}\nAnswer:"
            yield self.call(f"completion/{i}", COMPLETIONS, {**fields, "prompt": prompt}, "whole")
            if i < 4:
                body = {**fields, "prompt": prompt, "n": 3, "logprobs": 2}
                yield self.call(f"choices/{i}", COMPLETIONS, body, "whole")

    def _documents(self) -> Iterator[Call]:
        for i in range(4):
            facts = self.facts(DOCUMENT_TOKENS, 6)
            for j in range(6):
                name = f"document/{i + 4 * j}"
                yield self.call(name, CHAT, self.streamed_chat(facts.asked(j)), "stream")
        for i in range(8):
            body = self.streamed_chat(self.facts(LONG_TOKENS).asked(0))
            yield self.call(f"long/{i}", CHAT, body, "stream", bound_s=300.0)
        for i in range(4):
            facts = self.facts(STORED_TOKENS)
            parts = {
                "document": {"text": facts.text, "wait": i % 2 == 0},
                "question": facts.needles[0].question,
                "fields": {"model": self._model, "max_tokens": 24, "temperature": 0},
            }
            yield self.call(f"stored/{i}", CHAT, parts, "stored")
        for i in range(4):
            body = {"model": self._model, "prompt": self.facts(DOCUMENT_TOKENS // 2).asked(0)}
            body["filter"] = {"method": "sieve", "keep": 256, "return_selection": True}
            yield self.call(f"filter/{i}", SELECTION, body, "whole")

    def _segments(self) -> Iterator[Call]:
        for i in range(4):
            settings = {"method": "sieve", "window": SEGMENT, "keep": 256}
            body = self.streamed_chat(self.facts(SEGMENTED_TOKENS).asked(0), filter=settings)
            yield self.call(f"window/{i}", CHAT, body, "stream", bound_s=300.0)

    def _libraries(self) -> Iterator[Call]:
        """Questions of the library that each tenant has, and libraries that come and go."""
        settings = {"library": LIBRARY, "candidates": 4}
        for i, facts in enumerate(self.files.values()):
            for j, needle in enumerate(facts.needles):
                manner, make = ("whole", self.chat) if j else ("stream", self.streamed_chat)
                body = make(needle.question, filter=settings)
                yield self.call(f"library/{i + LIBRARY_FILES * j}", CHAT, body, manner)
        for i in range(2):
            facts = self.facts(STORED_TOKENS)
            parts = {
                "file": {"path": "notes.txt", "text": facts.text},
                "question": self.chat(facts.needles[0].question),
            }
            yield self.call(f"shelf/{i}", CHAT, parts, "shelf")

    def _agents(self) -> Iterator[Call]:
        """Long instructions, tools, calls and their results, as coding agents send them."""
        for i, name in enumerate(SHAPES):
            chat = make_chat(name, i)
            fields: dict[str, Any] = {
                "messages": chat.messages,
                "tools": chat.tools,
                "max_tokens": 16,
            }
            if len(self._tokenizer.encode(json.dumps(fields))) > MOST_AGENT_TOKENS * self._scale:
                continue
            make, manner = (self.streamed_chat, "stream") if i % 2 else (self.chat, "whole")
            if chat.tools:
                fields["tool_choice"] = "none"
            else:
                del fields["tools"]
            yield self.call(f"agent/{i}", CHAT, {**make(""), **fields}, manner)

    def _structured(self) -> Iterator[Call]:
        named = {"name": "found", "schema": _SCHEMA, "strict": True}
        for i in range(4):
            question = self.facts(SHORT_TOKENS).asked(0)
            as_json = {"response_format": {"type": "json_schema", "json_schema": named}}
            manner, make = ("stream", self.streamed_chat) if i % 2 else ("whole", self.chat)
            body = make(question, **as_json, max_tokens=48)
            yield self.call(f"schema/{i}", CHAT, body, manner)
            tools = {"tools": [{"type": "function", "function": _TOOL}], "tool_choice": "required"}
            body = make(question, **tools, max_tokens=64)
            yield self.call(f"tool/{i}", CHAT, body, manner)

    def _other_routes(self) -> Iterator[Call]:
        for i in range(6):
            manner = "stream" if i % 2 else "whole"
            facts = self.facts(SHORT_TOKENS)
            common = {"model": self._model, "temperature": 0, "stream": manner == "stream"}
            body = {**common, "input": facts.asked(0), "max_output_tokens": 24}
            yield self.call(f"responses/{i}", RESPONSES, body, manner)
            messages = [{"role": "user", "content": facts.asked(1)}]
            body = {**common, "messages": messages, "max_tokens": 24}
            if i >= 4:
                tool = {"name": "look_up", "input_schema": _SCHEMA}
                body |= {"tools": [tool], "tool_choice": {"type": "any"}, "max_tokens": 64}
            yield self.call(f"messages/{i}", MESSAGES, body, manner)
            body = {"model": self._model, "messages": messages}
            if i < 2:
                yield self.call(f"count/{i}", f"{MESSAGES}/count_tokens", body, "whole")
            elif i < 4:
                yield self.call(f"count/{i}", "/tokenize", body, "whole")

    def _with_adapters(self) -> Iterator[Call]:
        for i, adapter in enumerate([*ADAPTERS] * 2):
            body = self.streamed_chat(self.facts(SHORT_TOKENS).asked(0), adapter=adapter)
            yield self.call(f"adapter/{i}", CHAT, body, "stream")
        for i in range(2):
            body = self.chat(self.facts(SHORT_TOKENS).asked(0), adapter=TURNING)
            yield self.call(f"turning/{i}", CHAT, body, "whole")
        yield reloading("turn-a")  # the sender chooses the folder

    def _bad_clients(self) -> Iterator[Call]:
        going_on = {"max_tokens": 300, "ignore_eos": True}
        for i in range(4):
            body = self.streamed_chat(self.facts(SHORT_TOKENS).asked(0), **going_on)
            yield self.call(f"cancel/{i}", CHAT, body, "cancel")
            body = self.streamed_chat(self.facts(SHORT_TOKENS).asked(0), **going_on)
            yield self.call(f"slow/{i}", CHAT, body, "slow", bound_s=300.0)
            body = self.chat(self.facts(DOCUMENT_TOKENS).asked(0))
            yield self.call(f"half/{i}", CHAT, body, "half")

    def _mistakes(self) -> Iterator[Call]:
        chat = self.chat("Hello")
        broken = {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"type": "wrong"}},
            }
        }
        whole = {"filter": {"method": "none"}}  # a filter would read it in segments
        bodies: list[tuple[str, Any, int]] = [
            (CHAT, b'{"model": "builtin", "messages": [', 400),
            (CHAT, b"\xff\xfe", 400),
            (CHAT, {**chat, "unknown_field": 1}, 400),
            (CHAT, {**chat, "temperature": "hot"}, 400),
            (CHAT, {**chat, "max_tokens": 10_000_000}, 400),
            (CHAT, {**chat, "model": "other"}, 404),
            (CHAT, {**chat, "adapter": "missing"}, 404),
            (CHAT, {**chat, "stop": ["x"] * 17}, 400),
            (CHAT, {**chat, **broken}, 400),
            (COMPLETIONS, {"model": self._model, "prompt": "word " * 60_000, **whole}, 400),
            (RESPONSES, {"model": self._model, "input": "Hi", "background": True}, 400),
            (MESSAGES, {"model": self._model, "messages": []}, 400),
            ("/v1/embeddings", {"model": self._model, "input": "Hi"}, 404),
        ]
        for i, (path, body, status) in enumerate(bodies):
            yield self.call(f"error/{i}", path, body, "whole", status=status)
        yield Call(
            name="error/99", path=CHAT, body=chat, tenant="nobody", manner="whole", status=401
        )
