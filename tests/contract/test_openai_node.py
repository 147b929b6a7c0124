"""The `openai` package of npm, which `make test` installs where npm's registry can be reached."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.clients.environments import ROOT
from tests.fakes import FILTERED, FakeCore, kept_of, live_server, serving_over
from tests.guide import NODE, examples, run_example

TEXT = "Héllo 🌍!"
INSTALLED = ROOT / "node" / ".installed"
CODE = """
import assert from "node:assert";
import OpenAI from "openai";
const client = new OpenAI({
  baseURL: "http://127.0.0.1:8000/v1", apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "Hi" }];
const whole = await client.chat.completions.create({ model: "builtin", messages, filter: "none" });
assert.equal(whole.choices[0].message.content, TEXT);
assert.equal(whole.filter.reason, "disabled");
const text = await client.completions.create({ model: "builtin", prompt: "Hi" });
assert.equal(text.choices[0].text, TEXT);
await assert.rejects(
  client.completions.create({ model: "builtin", prompt: "Hi", filter: { keep: 3 } }),
  (error) => error instanceof OpenAI.BadRequestError && error.param === "filter.keep");
for await (const model of client.models.list()) assert.equal(model.id, "builtin");
"""
FAILING = """
import assert from "node:assert";
import OpenAI from "openai";
const client = new OpenAI({
  baseURL: "http://127.0.0.1:8000/v1", apiKey: "none", maxRetries: 0 });
const stream = await client.completions.create({ model: "builtin", prompt: "Hi", stream: true });
let said = "";
await assert.rejects(
  async () => { for await (const chunk of stream) said += chunk.choices[0].text; }, /boom/);
assert.equal(said, "a");
"""

pytestmark = [
    pytest.mark.skipif(not NODE.exists(), reason="node: `make setup` installs it"),
    pytest.mark.skipif(
        not INSTALLED.exists(),
        reason="openai of npm: `make test` installs it, if npm's registry can be reached",
    ),
]


@pytest.fixture
def url(core: FakeCore, tokenizer: Any) -> Iterator[str]:
    serving = serving_over(core, tokenizer, max_prompt_tokens=1900)
    with live_server(replace(serving, model_name="builtin")) as address:
        yield address


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "notes.txt").write_text("The river runs past the houses. " * 150, encoding="utf-8")
    (tmp_path / "node_modules").symlink_to(INSTALLED.with_name("node_modules"))
    return tmp_path


@pytest.mark.capability("openai, Node", "stream", "filter")
def test_the_guide(url: str, folder: Path, core: FakeCore) -> None:
    (code,) = examples("openai, Node", "js")
    printed = run_example(code, "js", url=url, folder=folder)
    kept = kept_of(core.requests[0])
    assert printed == f"{kept} tokens kept\n{TEXT}"
    [request] = core.requests
    assert (request.filter.method, request.filter.keep) == ("sieve", 512)


@pytest.mark.capability("openai, Node", "chat", "errors")
def test_what_else_it_can_do(url: str, folder: Path) -> None:
    code = f'const TEXT = "{TEXT}";\n{CODE}'
    run_example(code, "js", url=url, folder=folder)


def test_a_failure_in_a_stream_is_raised_where_it_happens(
    url: str, folder: Path, core: FakeCore
) -> None:
    core.script = (FILTERED, "a", ValueError("boom"))
    run_example(FAILING, "js", url=url, folder=folder)
