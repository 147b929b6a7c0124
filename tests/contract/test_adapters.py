"""Adapters over a socket, on a real model: the client, its command line, and what changes when."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from gemserve.api.serving import build_serving
from gemserve.config import EngineConfig, ModelConfig, ServerConfig
from gemserve.engine.build import build_core
from gemserve.engine.core import Core
from gemserve.errors import ConfigError
from gemserve_client import AsyncGemserveClient, GemserveClient
from gemserve_client.cli.main import main
from tests import adapters, models
from tests.fakes import live_server, parse_metrics, replace_file, wait_for, wait_for_async
from tests.model.test_adapters import generate, prompt

MODEL = "tiny"
ENGINE = EngineConfig(filter_min_tokens=64, filter_layer=2, kv_memory_bytes=1 << 24)
IDS = prompt(120)
GREEDY: Any = {"model": MODEL, "prompt": IDS, "temperature": 0, "max_tokens": 24, "filter": "none"}


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Core:
    checkpoint = models.save("llama", tmp_path_factory.mktemp("model"))
    return build_core(ModelConfig(model=str(checkpoint), device="cpu"), ENGINE)


@pytest.fixture(scope="module")
def root(core: Core, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    for index, name in enumerate(("a", "b", "c")):
        adapters.write(folder / name, "prefix", core.model, seed=index)
    adapters.write(folder / "ntk", "ntk", core.model)
    adapters.write_peft(folder / "peft", models.build("llama"), "prefix")
    adapters.write_peft(folder / "lora", models.build("llama"), "lora")
    return folder


@dataclass(frozen=True, slots=True)
class Served:
    url: str
    folder: Path


@pytest.fixture
def served(core: Core, root: Path, tmp_path: Path) -> Iterator[Served]:
    """With room for two prefixes and a half."""
    config = ServerConfig(
        adapter_dir=str(root),
        adapter_memory_bytes=18_000,
        api_key_file=replace_file(tmp_path / "keys", "sk-user"),
        admin_key_file=replace_file(tmp_path / "admins", "sk-admin"),
    )
    with live_server(build_serving(core, model_name=MODEL, config=config)) as url:
        yield Served(url, tmp_path)


@pytest.fixture
def client(served: Served) -> Iterator[GemserveClient]:
    with GemserveClient(base_url=served.url, api_key="sk-admin", max_retries=0) as opened:
        yield opened


def text_of(client: GemserveClient, **fields: Any) -> str:
    return client.completions.create(**{**GREEDY, **fields}).choices[0].text


def metrics_of(served: Served) -> dict[str, float]:
    return parse_metrics(httpx.get(f"{served.url}/metrics").text)


def test_the_client_loads_lists_uses_and_unloads(client: GemserveClient) -> None:
    loaded = client.adapters.load(name="support", path="a")
    assert (loaded.name, loaded.path, loaded.type) == ("support", "a", "prefix")
    assert (loaded.loaded, loaded.positions, loaded.parent) == (True, 7, MODEL)
    assert list(client.adapters.list()) == [loaded]
    assert [model.id for model in client.models.list()] == [MODEL, "tiny:support"]
    assert client.models.retrieve("tiny:support").id == "tiny:support"
    plain, adapted = text_of(client), text_of(client, adapter="support")
    assert plain != adapted == text_of(client, model="tiny:support")
    chat: Any = {"messages": [{"role": "user", "content": "Hi"}], "temperature": 0}
    chats = [
        client.chat.completions.create(model=MODEL, max_tokens=8, adapter=adapter, **chat)
        for adapter in (None, "support")
    ]
    assert chats[0].choices[0].message.content != chats[1].choices[0].message.content
    gems: Any = {"method": "gemfilter", "keep": 24}
    kept = [
        client.filter(model=MODEL, prompt=IDS, adapter=adapter, filter=gems).text
        for adapter in (None, "support")
    ]
    assert kept[0] != kept[1]
    client.adapters.unload("support")
    assert list(client.adapters.list()) == []
    with pytest.raises(openai.NotFoundError):
        text_of(client, adapter="support")


@pytest.mark.anyio
async def test_the_asynchronous_client_does_too(served: Served) -> None:
    async with AsyncGemserveClient(base_url=served.url, api_key="sk-admin") as client:
        loaded = await client.adapters.load(name="support", path="a")
        assert [each async for each in await client.adapters.list()] == [loaded]
        reply = await client.completions.create(**GREEDY, adapter="support")
        assert reply.model == MODEL
        reply = await client.completions.create(**{**GREEDY, "model": "tiny:support"})
        assert reply.model == "tiny:support"
        await client.adapters.unload("support")
        assert [each async for each in await client.adapters.list()] == []


def test_the_command_line_does_too(
    served: Served, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GEMSERVE_URL", served.url)
    monkeypatch.setenv("GEMSERVE_API_KEY", "sk-user")
    assert main(["adapters", "load", "support", "a"]) == 1
    assert "--admin-key-file" in capsys.readouterr().err
    monkeypatch.setenv("GEMSERVE_API_KEY", "sk-admin")
    assert main(["adapters", "load", "support", "a"]) == 0
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("support is loaded: prefix, version ")
    assert main(["adapters", "list"]) == 0
    assert capsys.readouterr().out == "support\n"
    notes = served.folder / "notes"
    notes.write_text("The river runs.")
    said = []
    for words in ([], ["--adapter", "support"], ["--model", "tiny:support"]):
        assert main(["ask", str(notes), "Who?", "--max-tokens", "8", *words]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] != said[1] == said[2]
    assert main(["ask", str(notes), "Who?", "--adapter", "x"]) == 1
    assert "'x' does not exist" in capsys.readouterr().err
    assert main(["adapters", "unload", "support"]) == 0
    assert main(["adapters", "unload", "support"]) == 1


@pytest.mark.parametrize("kind", ["prefix", "lora"])
def test_peft_s_own_checkpoints_answer_as_in_peft(
    core: Core, root: Path, tmp_path: Path, kind: str
) -> None:
    made = adapters.write_peft(tmp_path / "made", models.build("llama"), kind)
    expected = generate(made, IDS, 12)
    name = "peft" if kind == "prefix" else "lora"
    config = ServerConfig(adapter_dir=str(root), adapters=(("p", name),))
    with (
        live_server(build_serving(core, model_name=MODEL, config=config)) as url,
        GemserveClient(base_url=url) as client,
    ):
        text = text_of(client, adapter="p", max_tokens=12, extra_body={"ignore_eos": True})
    assert text == core.tokenizer.decode(expected, skip_special_tokens=True).rstrip("\ufffd")


def test_the_one_used_longest_ago_leaves_memory_and_comes_back(
    client: GemserveClient, served: Served
) -> None:
    for name in "abc":
        client.adapters.load(name=name, path=name)
    said = {name: text_of(client, adapter=name) for name in "abc"}
    assert len(set(said.values())) == 3
    assert {a.name: a.loaded for a in client.adapters.list()} == {"a": False, "b": True, "c": True}
    metrics = metrics_of(served)
    assert (metrics["adapters_loaded"], metrics["adapter_memory_bytes"]) == (2, 2 * 7168)
    assert {name: text_of(client, adapter=name) for name in "cab"} == said


@pytest.mark.anyio
async def test_a_stream_ends_with_the_version_it_began_with(
    served: Served, core: Core, root: Path
) -> None:
    """Though its name is loaded anew, and unloaded, while it runs; its memory counts until then."""
    folder = root / "changing"
    adapters.write(folder, "prefix", core.model, seed=10)
    long: Any = {**GREEDY, "max_tokens": 600, "extra_body": {"ignore_eos": True}}
    async with AsyncGemserveClient(base_url=served.url, api_key="sk-admin") as client:
        first = await client.adapters.load(name="x", path="changing")
        old = (await client.completions.create(**long, adapter="x")).choices[0].text
        stream = await client.completions.create(**long, adapter="x", stream=True)
        parts = [(await anext(stream)).choices[0].text for _ in range(5)]
        adapters.write(folder, "prefix", core.model, seed=11)
        second = await client.adapters.load(name="x", path="changing")
        assert second.version != first.version
        assert metrics_of(served)["num_requests_running"] == 1
        assert metrics_of(served)["adapter_memory_bytes"] == 2 * 7168
        new = (await client.completions.create(**GREEDY, adapter="x")).choices[0].text
        assert not old.startswith(new)
        await client.adapters.unload("x")
        assert metrics_of(served)["num_requests_running"] == 1
        assert metrics_of(served)["adapter_memory_bytes"] == 7168
        parts += [chunk.choices[0].text async for chunk in stream]
        assert "".join(parts) == old
        await wait_for_async(lambda: metrics_of(served)["adapter_memory_bytes"] == 0)


@pytest.mark.anyio
async def test_requests_with_different_adapters_run_side_by_side(core: Core, root: Path) -> None:
    names = ("a", "b", "ntk", "peft", "lora")
    config = ServerConfig(adapter_dir=str(root), adapters=tuple((n, n) for n in names))
    with live_server(build_serving(core, model_name=MODEL, config=config)) as url:
        async with AsyncGemserveClient(base_url=url, timeout=60) as client:

            async def ask(name: str | None) -> str:
                return (await client.completions.create(**GREEDY, adapter=name)).choices[0].text

            alone = [await ask(name) for name in (None, *names)]
            together = await asyncio.gather(*(ask(name) for name in (None, *names)))
            assert together == alone
            assert len(set(alone)) == len(alone)


def test_while_all_room_is_in_use_others_wait(client: GemserveClient, served: Served) -> None:
    """503 with Retry-After, which the SDK obeys, so a client with retries gets its answer."""
    for name in "abc":
        client.adapters.load(name=name, path=name)
    long: Any = {**GREEDY, "max_tokens": 2000, "extra_body": {"ignore_eos": True}}
    streams = [client.completions.create(**long, adapter=name, stream=True) for name in "bc"]
    for stream in streams:
        next(stream)
    with pytest.raises(openai.InternalServerError) as busy:
        text_of(client, adapter="a", max_tokens=1)
    assert busy.value.status_code == 503
    assert busy.value.code == "adapter_memory_full"
    assert 1 <= int(busy.value.response.headers["retry-after"]) <= 60  # an estimate
    streams[0].close()
    assert text_of(client.with_options(max_retries=5), adapter="a", max_tokens=1) is not None
    streams[1].close()
    wait_for(lambda: metrics_of(served)["num_requests_running"] == 0)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"adapters": (("x", "nowhere"),)}, "adapter 'x', path 'nowhere': no such folder"),
        ({"adapters": (("x", "../adapters"),)}, r"path '\.\./adapters': must be relative"),
        ({"adapters": (("x", "broken"),)}, "adapter 'x', path 'broken': must hold adapter.json"),
        ({"adapters": (("x", "a"),), "adapter_memory_bytes": 100}, "needs 7168 bytes"),
    ],
)
def test_a_bad_one_stops_the_start(
    core: Core, root: Path, given: dict[str, Any], said: str
) -> None:
    (root / "broken").mkdir(exist_ok=True)
    config = ServerConfig(**{"adapter_dir": str(root), **given})
    with pytest.raises(ConfigError, match=said):
        build_serving(core, model_name=MODEL, config=config)


def test_more_than_fit_may_be_named_at_the_start(core: Core, root: Path) -> None:
    given = tuple((name, name) for name in "abc")
    config = ServerConfig(adapter_dir=str(root), adapters=given, adapter_memory_bytes=18_000)
    serving = build_serving(core, model_name=MODEL, config=config)
    serving.engine.stop()
    assert [a.is_loaded for a in serving.adapters.list()] == [False, True, True]
