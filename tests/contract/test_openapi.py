"""The OpenAPI document and a real model's replies; and Schemathesis, which looks for requests that
are not answered as the document says.

`GEMSERVE_TEST_CASES=200` runs the full size: cases of every operation, and the phase that tries
each bound of each field. The default keeps the suite quick.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from gemserve.api.serving import build_serving
from gemserve.calibration.files import Calibration
from gemserve.config import EngineConfig, ServerConfig
from gemserve.model.passes.causal_model import CausalModel
from tests import adapters, models
from tests.contract.schemathesis_checks import ADAPTER, FILE, FOLDER, LIBRARY, MODEL
from tests.cores import core_over
from tests.described import Described
from tests.fakes import CHAT, COMPLETIONS, live_server

CASES = os.environ.get("GEMSERVE_TEST_CASES")
SEED = 1
KEY = "sk-described"
RESPONSES, SELECTION = "/v1/responses", "/v1/filter"
RERANK, SCORE = "/v1/rerank", "/v1/score"
MESSAGED, COUNTED = "/v1/messages", "/v1/messages/count_tokens"
OLLAMA_CHAT, OLLAMA_GENERATE = "/api/chat", "/api/generate"
DOCUMENTS, LIBRARIES = "/v1/documents", "/v1/libraries"
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def url(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A random model with so short a context that no request takes long, and with a library."""
    model = models.build("llama")
    model.config.max_position_embeddings = 96
    config = EngineConfig(
        kv_memory_bytes=64 << 20,
        filter_layer=1,
        filter_keep=16,
        filter_min_tokens=24,
        max_prompt_tokens=80,
        max_queue=1000,
    )
    core = core_over(
        model=CausalModel(model),
        tokenizer=tokenizer,
        config=config,
        eos_ids=frozenset({2}),
        calibration=Calibration(layer=1, heads=((1, 0),)),
    )
    folder = tmp_path_factory.mktemp("server")
    keys = folder / "keys"
    keys.write_text(KEY)
    adapters.write(folder / "adapters" / FOLDER, "prefix", core.model)
    server = ServerConfig(
        api_key_file=str(keys),
        admin_key_file=str(keys),
        adapter_dir=str(folder / "adapters"),
        adapters=((ADAPTER, FOLDER),),
        max_documents=100_000,
        max_pinned_documents=100_000,
        document_memory_bytes=1 << 30,
        library_dir=str(folder / "libraries"),
        max_libraries=10_000,
    )
    with live_server(build_serving(core, model_name=MODEL, config=server)) as address:
        headers = {"Authorization": f"Bearer {KEY}"}
        with httpx.Client(base_url=address, headers=headers, timeout=60) as opened:
            opened.post(LIBRARIES, json={"name": LIBRARY}).raise_for_status()
            body = {"path": FILE, "text": "The river runs."}
            added = opened.post(f"{LIBRARIES}/{LIBRARY}/files?wait=true", json=body)
            assert added.json()["status"] == "ready", added.text
        yield address


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[httpx.Client]:
    headers = {"Authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=url, headers=headers, timeout=60) as opened:
        yield opened


@pytest.fixture(scope="module")
def document_id(client: httpx.Client) -> str:
    """A stored document that stays."""
    stored = client.post(DOCUMENTS, json={"text": "The river runs.", "ttl": 86400}).json()
    return str(stored["id"])


@pytest.fixture(scope="module")
def described(client: httpx.Client) -> Described:
    return Described(client.get("/openapi.json").json())


MESSAGES = [{"role": "user", "content": "Where is it?"}]
CALLED = {
    "messages": MESSAGES,
    "tools": [{"type": "function", "function": {"name": "find"}}],
    "tool_choice": "required",
}
FINDER = [{"name": "find", "input_schema": {"type": "object"}}]
AGENT_TOOLS = [
    {
        "type": "custom",
        "name": "t",
        "format": {"type": "grammar", "syntax": "regex", "definition": "[a-c]{1,3}"},
    }
]
FROM_LIBRARY = {"library": LIBRARY, "candidates": 1}
ASKED: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"prompt": "Hi"}),
    (COMPLETIONS, {"prompt": ["Hi", "Ho"], "n": 2, "seed": 1}),
    (COMPLETIONS, {"prompt": [50, 60, 70], "logprobs": 2, "echo": True}),
    (COMPLETIONS, {"prompt": "one two " * 14, "filter": {"keep": 16, "return_selection": True}}),
    (CHAT, {"messages": MESSAGES, "filter": "none", "max_tokens": 3}),
    (CHAT, {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2, "n": 2, "max_tokens": 3}),
    (CHAT, CALLED),
    (CHAT, {"messages": MESSAGES, "response_format": {"type": "json_object"}}),
    (RESPONSES, {"input": "Where?", "user": "me", "metadata": {"a": "1"}, "instructions": "Be."}),
    (RESPONSES, {"input": [{"role": "user", "content": "Where?"}], "max_output_tokens": 3}),
    (RESPONSES, {"input": "Where?", "tools": [{"type": "function", "name": "find"}]}),
    (
        RESPONSES,
        {
            "input": "Where?",
            "tools": [{"type": "function", "name": "find"}],
            "tool_choice": "required",
            "max_output_tokens": 30,
        },
    ),
    (
        RESPONSES,
        {
            "input": "Where?",
            "text": {"format": {"type": "json_object"}},
            "include": ["message.output_text.logprobs"],
            "top_logprobs": 2,
            "max_output_tokens": 5,
        },
    ),
    (RESPONSES + "/input_tokens", {"input": "Where?", "tools": AGENT_TOOLS}),
    (CHAT, {"messages": MESSAGES, "max_tokens": 9000, "truncate_max_tokens": True}),
    (
        MESSAGED,
        {
            "messages": MESSAGES,
            "max_tokens": 32000,
            "context_management": {"edits": [{"type": "clear_thinking_20251015"}]},
            "thinking": {"type": "enabled", "budget_tokens": 31999},
            "mcp_servers": [],
        },
    ),
    (
        MESSAGED,
        {"messages": MESSAGES, "max_tokens": 3, "system": [{"type": "text", "text": "Be."}]},
    ),
    (MESSAGED, {"messages": MESSAGES, "max_tokens": 20, "tools": FINDER, "filter": "none"}),
    (
        MESSAGED,
        {"messages": MESSAGES, "max_tokens": 20, "tools": FINDER, "tool_choice": {"type": "any"}},
    ),
    (COUNTED, {"messages": MESSAGES, "tools": FINDER}),
    (SELECTION, {"prompt": "one two " * 14, "filter": {"return_selection": True}}),
    (SELECTION, {"messages": MESSAGES}),
    (CHAT, {"messages": MESSAGES, "max_tokens": 3, "filter": FROM_LIBRARY}),
    (COMPLETIONS, {"prompt": "Where?", "max_tokens": 3, "filter": FROM_LIBRARY}),
    (RESPONSES, {"input": "Where?", "max_output_tokens": 3, "filter": FROM_LIBRARY}),
    (MESSAGED, {"messages": MESSAGES, "max_tokens": 3, "filter": FROM_LIBRARY}),
    (OLLAMA_CHAT, {"messages": MESSAGES, "filter": FROM_LIBRARY}),
    (OLLAMA_GENERATE, {"prompt": "Where?", "filter": FROM_LIBRARY}),
    (SELECTION, {"messages": MESSAGES, "filter": FROM_LIBRARY}),
    (RERANK, {"query": "Where?", "documents": ["one two", {"text": "here"}], "top_n": 1}),
    ("/v2/rerank", {"query": "Where?", "documents": ["one", ""], "max_tokens_per_doc": 1}),
    ("/rerank", {"query": "Where?", "documents": ["one"], "adapter": ADAPTER, "lexical": "off"}),
    (SCORE, {"text_1": "Where?", "text_2": ["one two", "here"]}),
    ("/score", {"queries": ["Where?", "When?"], "documents": ["here", "now"]}),
    (COMPLETIONS, {"prompt": "Hi", "adapter": ADAPTER}),
    (CHAT, {"messages": MESSAGES, "model": f"{MODEL}:{ADAPTER}", "max_tokens": 3}),
    (RESPONSES, {"input": "Where?", "adapter": ADAPTER, "model": f"{MODEL}:{ADAPTER}"}),
    (MESSAGED, {"messages": MESSAGES, "max_tokens": 3, "adapter": ADAPTER}),
    (COUNTED, {"messages": MESSAGES, "model": f"{MODEL}:{ADAPTER}"}),
    (SELECTION, {"prompt": "one two " * 14, "adapter": ADAPTER}),
    (DOCUMENTS, {"text": "Hi", "name": "a", "wait": True, "adapter": ADAPTER}),
    (DOCUMENTS, {"text": "one two " * 12, "wait": True, "ttl": 5, "pin": True}),
    ("/tokenize", {"prompt": "Hi", "return_token_strs": True}),
    ("/tokenize", {"messages": MESSAGES}),
    ("/detokenize", {"tokens": [50, 60]}),
    (COMPLETIONS, {"prompt": ["Hi", "Ho"], "n": 2, "return_token_ids": True}),
    (CHAT, {"messages": MESSAGES, "return_token_ids": True, "guided_regex": "[ab]{3}"}),
    (CHAT, {**CALLED, "return_token_ids": True}),
    (CHAT, {"messages": MESSAGES, "structured_outputs": {"choice": ["yes", "no"]}}),
    (COMPLETIONS, {"prompt": "Hi", "guided_grammar": 'root ::= "a" | "b"'}),
    (OLLAMA_CHAT, {"messages": MESSAGES, "options": {"num_predict": 3}}),
    (
        OLLAMA_CHAT,
        {"messages": MESSAGES, "tools": CALLED["tools"], "format": "json", "adapter": ADAPTER},
    ),
    (OLLAMA_GENERATE, {"prompt": "one two " * 14, "filter": {"keep": 16}, "system": "Be."}),
    (OLLAMA_GENERATE, {"prompt": "Hi", "format": {"const": "a"}}),
    ("/api/show", {"model": f"{MODEL}:{ADAPTER}"}),
]


@pytest.mark.parametrize(("path", "body"), ASKED, ids=lambda value: str(value)[:50])
def test_replies_are_as_described(
    client: httpx.Client, described: Described, path: str, body: dict[str, Any]
) -> None:
    whole = {"model": MODEL, **body}
    assert described.accepts(path, whole)
    reply = client.post(path, json=whole)
    assert reply.status_code == 200, reply.text
    described.check(reply)
    if path in (OLLAMA_CHAT, OLLAMA_GENERATE):
        assert reply.headers["content-type"].startswith("application/x-ndjson")
        unstreamed = client.post(path, json={**whole, "stream": False})
        assert unstreamed.headers["content-type"] == "application/json"
        described.check(unstreamed)
    if path not in (COMPLETIONS, CHAT, RESPONSES, MESSAGED):
        return
    options = {} if path in (RESPONSES, MESSAGED) else {"stream_options": {"include_usage": True}}
    streamed = client.post(path, json={**whole, "stream": True, **options})
    assert streamed.headers["content-type"].startswith("text/event-stream")
    described.check(streamed)


def test_replies_to_administrators_are_as_described(
    client: httpx.Client, described: Described
) -> None:
    path = "/v1/adapters"
    body = {"name": "again", "path": FOLDER}
    assert described.accepts(path, body)
    reply = client.post(path, json=body)
    assert reply.status_code == 200
    described.check(reply)
    for status in (200, 404):
        gone = client.delete(f"{path}/again")
        assert gone.status_code == status
        described.check(gone, f"{path}/{{name}}")


def test_replies_about_documents_are_as_described(
    client: httpx.Client, described: Described
) -> None:
    form = client.post(DOCUMENTS, files={"file": ("a.txt", b"Hi")}, data={"wait": "true"})
    assert form.status_code == 200
    described.check(form)
    described.check(client.get(DOCUMENTS))
    for status in (200, 404):
        gone = client.delete(f"{DOCUMENTS}/{form.json()['id']}")
        assert gone.status_code == status
        described.check(gone, f"{DOCUMENTS}/{{document_id}}")


def test_replies_about_libraries_are_as_described(
    client: httpx.Client, described: Described
) -> None:
    one, files = f"{LIBRARIES}/{{library}}", f"{LIBRARIES}/{{library}}/files"
    made = client.post(LIBRARIES, json={"name": "other"})
    assert made.status_code == 200
    described.check(made)
    described.check(client.post(LIBRARIES, json={"name": "other"}))  # 400
    path = f"{LIBRARIES}/other/files?wait=true"
    for sent in (
        client.post(path, json={"path": "a/b.md", "text": "The river runs."}),
        client.post(path, files={"file": ("c.txt", b"It runs.")}, data={"path": "c.txt"}),
        client.post(path, files={"file": ("no.txt", b"\0")}),  # fails
        client.post(path.removesuffix("?wait=true"), json={"path": "d", "text": "It rests."}),
    ):
        assert sent.status_code == 200, sent.text
        described.check(sent, files)
    assert sent.json()["status"] == "reading"
    listed = client.get(f"{LIBRARIES}/other/files")
    assert {file["id"] for file in listed.json()["data"]} >= {"a/b.md", "c.txt", "no.txt"}
    described.check(listed, files)
    for status in (200, 404):
        gone = client.delete(f"{LIBRARIES}/other/files/a/b.md")
        assert gone.status_code == status
        described.check(gone, f"{files}/{{path}}")
    for status in (200, 404):
        gone = client.delete(f"{LIBRARIES}/other")
        assert gone.status_code == status
        described.check(gone, one)


def test_replies_to_get_are_as_described(
    client: httpx.Client, described: Described, document_id: str
) -> None:
    paths = [
        path for path, operations in described.document["paths"].items() if "get" in operations
    ]
    for path in paths:
        names = {"name": MODEL, "document_id": document_id, "library": LIBRARY, "path": FILE}
        reply = client.get(path.format(**names))
        assert reply.status_code == 200
        described.check(reply, path)


@pytest.mark.timeout(1200)
def test_schemathesis_finds_nothing(url: str, tmp_path: Path, document_id: str) -> None:
    phases = "examples,fuzzing,stateful" if CASES is None else "examples,coverage,fuzzing,stateful"
    run = subprocess.run(
        [
            *(sys.executable, "-m", "schemathesis.cli"),
            *("--config-file", str(HERE / "schemathesis.toml")),
            *("run", f"{url}/openapi.json"),
            *("--phases", phases, "--max-examples", CASES or "10", "--seed", str(SEED)),
            "--no-color",
        ],
        env={
            **os.environ,
            "GEMSERVE_TEST_KEY": KEY,
            "GEMSERVE_TEST_DOCUMENT": document_id,
            "SCHEMATHESIS_HOOKS": "tests.contract.schemathesis_checks",
            "PYTHONPATH": os.pathsep.join(p for p in (str(HERE.parents[1]), *sys.path) if p),
        },
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-20_000:] + run.stderr[-2000:]
    counted = re.search(r"(\d+) generated, (\d+) passed", run.stdout)
    assert counted is not None
    assert counted[1] == counted[2]
    if CASES is not None:
        assert int(counted[1]) >= 2000
        assert "mostly rejected" not in run.stdout  # what fits the document is tried in earnest
    print(run.stdout[run.stdout.index("Test Phases:") :])
