"""Requests that name an adapter: models, limits, metrics, schemas."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from gemserve.adapters.adapter_store import AdapterStore
from gemserve.model.passes.causal_model import CausalModel
from tests.api.adapters.adapter_requests import (
    ADAPTERS,
    MIB,
    PREFIX,
    REQUESTS,
    RESPONSES,
    SELECTION,
    ask,
    check_error,
    load,
)
from tests.bad_adapters import BAD_NAMES
from tests.described import Described
from tests.fakes import (
    CHAT,
    COMPLETIONS,
    CONTEXT,
    Api,
    FakeCore,
    api_over,
)

pytestmark = pytest.mark.anyio


async def test_a_request_names_it_either_way(served: Api, path: str) -> None:
    await load(served)
    for fields in (
        {"adapter": "p"},
        {"model": "fake:p"},
        {"model": "fake:p", "adapter": "p"},
        {"model": "fake:p", "adapter": None},
    ):
        reply = await ask(served, path, **fields)
        assert reply.status_code == 200, reply.text
        adapter = served.core.requests[-1].adapter
        assert adapter is not None
        assert (adapter.name, adapter.num_positions) == ("p", PREFIX)
        if path != SELECTION:
            assert reply.json()["model"] == fields.get("model", "fake")
    for fields in ({}, {"adapter": None}):
        await ask(served, path, **fields)
        assert served.core.requests[-1].adapter is None


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_a_stream_echoes_the_model_as_it_was_named(served: Api, path: str) -> None:
    await load(served)
    reply = await ask(served, path, model="fake:p", stream=True)
    assert '"model": "fake:p"' in reply.text
    assert '"model": "fake"' not in reply.text


async def test_unknown_ones_are_a_404(served: Api, path: str) -> None:
    await load(served)
    for fields, param in (
        ({"adapter": "x"}, "adapter"),
        ({"model": "fake:x"}, "model"),
        ({"model": "fake:"}, "model"),
        ({"model": "fake:" + "é" * 100_000}, "model"),
        ({"adapter": "x", "model": "fake:x"}, "adapter"),
    ):
        said = check_error(await ask(served, path, **fields), 404, param, "adapter_not_found")
        assert "loaded are: 'p'" in said
    for name in ("other:p", "fake:p:p", ":p"):
        check_error(await ask(served, path, model=name), 404, "model", "model_not_found")
    said = check_error(
        await ask(served, path, model="fake:x", adapter="p"), 400, "adapter", "invalid_value"
    )
    assert "'p'" in said
    assert "'fake:x'" in said
    for name in (*BAD_NAMES, 3, ["p"], {"name": "p"}):
        check_error(await ask(served, path, adapter=name), 400, "adapter", "invalid_value")
    assert served.core.requests == []
    assert (await ask(served, path)).status_code == 200


async def test_a_base_may_have_colons_itself(
    tokenizer: Any, model: CausalModel, root: Path
) -> None:
    store = AdapterStore(model, root, MIB)
    store.load("p", "good")
    async with api_over(FakeCore(), tokenizer, adapters=store, model_name="org/a:b") as api:
        for name, adapter in (("org/a:b", None), ("org/a:b:p", "p")):
            reply = await ask(api, model=name)
            assert (reply.status_code, reply.json()["model"]) == (200, name)
            used = api.core.requests[-1].adapter
            assert (used.name if used else None) == adapter
            card = await api.client.get(f"/v1/models/{name}")
            assert (card.status_code, card.json()["id"]) == (200, name)
        for name, code in (("org/a", "model"), ("org/a:p", "model"), ("org/a:b:x", "adapter")):
            check_error(await ask(api, model=name), 404, "model", f"{code}_not_found")


async def test_models_list_the_base_with_each(served: Api) -> None:
    await load(served)
    await load(served, "n", "ntk")
    base, ntk, prefix = (await served.client.get("/v1/models")).json()["data"]
    assert [base["id"], ntk["id"], prefix["id"]] == ["fake", "fake:n", "fake:p"]
    assert [base["parent"], ntk["parent"], prefix["parent"]] == [None, "fake", "fake"]
    lengths = [card["max_model_len"] for card in (base, ntk, prefix)]
    assert lengths == [CONTEXT, CONTEXT, CONTEXT - PREFIX]
    for card in (base, ntk, prefix):
        assert (await served.client.get(f"/v1/models/{card['id']}")).json() == card
    gone = await served.client.get("/v1/models/fake:x")
    check_error(gone, 404, "model", "adapter_not_found")
    gone = await served.client.get("/v1/models/other:p")
    check_error(gone, 404, "model", "model_not_found")


async def test_the_tokenizer_takes_every_listed_model(served: Api) -> None:
    await load(served)
    for path, fields in (("/tokenize", {"prompt": "Hi"}), ("/detokenize", {"tokens": [50]})):
        reply = await served.client.post(path, json={"model": "fake:p", **fields})
        assert reply.status_code == 200
        reply = await served.client.post(path, json={"model": "fake:x", **fields})
        check_error(reply, 404, "model", "adapter_not_found")


# Loading


async def test_a_prefix_takes_its_room_in_the_context(
    tokenizer: Any, model: CausalModel, root: Path, path: str
) -> None:
    """As the model would otherwise be asked for positions that it has not."""
    context = 300
    store = AdapterStore(model, root, MIB)
    store.load("p", "good")
    store.load("n", "ntk")

    async def with_tokens(count: int, **fields: Any) -> httpx.Response:
        text = ["a"] * count
        while True:  # as many words as make `count` tokens, template included
            content = {
                COMPLETIONS: {"prompt": [50] * len(text)},
                SELECTION: {"prompt": [50] * len(text)},
                CHAT: {"messages": [{"role": "user", "content": " ".join(text)}]},
                RESPONSES: {"input": " ".join(text)},
            }[path]
            probe = await api.client.post(
                "/tokenize", json={"messages": [{"role": "user", "content": " ".join(text)}]}
            )
            excess = probe.json()["count"] - count
            if path in (COMPLETIONS, SELECTION) or excess <= 0:
                return await ask(api, path, **content, **fields)
            text = text[:-1]

    async with api_over(
        FakeCore(),
        tokenizer,
        adapters=store,
        context_tokens=context,
        max_prompt_tokens=context - 1,
        filter_min_tokens=1000,
    ) as api:
        for adapter, longest in (("p", context - PREFIX - 1), ("n", context - 1)):
            reply = await with_tokens(longest, adapter=adapter)
            assert reply.status_code == 200, reply.text
            request = api.core.requests[-1]
            assert len(request.prompt_ids) == longest
            assert request.sampling.max_tokens == 1
            field = next(iter(REQUESTS[path]))
            code = "context_length_exceeded"
            message = check_error(await with_tokens(longest + 1, adapter=adapter), 400, field, code)
            assert f"maximum context length is {longest + 1} tokens" in message
            assert message.endswith("One token has to be left for the answer.")
            assert f"prompt contains {longest + 1} input tokens" in message
            assert ("tokens with adapter 'p' (which takes 7). How" in message) == (adapter == "p")


async def test_what_a_prefix_takes_is_not_there_for_the_answer(
    tokenizer: Any, model: CausalModel, root: Path
) -> None:
    store = AdapterStore(model, root, MIB)
    store.load("p", "good")
    async with api_over(FakeCore(), tokenizer, adapters=store) as api:
        prompt = [50] * 500  # of which the filter keeps 64, and the question
        reply = await ask(api, prompt=prompt, adapter="p", max_tokens=1)
        report = reply.json()["filter"]
        kept = 64 + report["protected_tokens"]
        assert report["kept_tokens"] == kept > 64
        room = CONTEXT - kept - PREFIX
        reply = await ask(api, prompt=prompt, adapter="p", max_tokens=room)
        assert reply.status_code == 200
        reply = await ask(api, prompt=prompt, adapter="p", max_tokens=room + 1)
        message = check_error(reply, 400, "max_tokens", "context_length_exceeded")
        assert f"{CONTEXT - PREFIX} tokens with adapter 'p' (which takes 7)" in message
        assert f"leaves room for {room} after the {kept} of 500 prompt tokens" in message
        reply = await ask(api, prompt=prompt, max_tokens=room + PREFIX)
        assert reply.status_code == 200
        text = {"messages": [{"role": "user", "content": "a " * 600}], "filter": "none"}
        for adapter, taken in ((None, 0), ("p", PREFIX)):
            await ask(api, CHAT, **text, adapter=adapter)
            request = api.core.requests[-1]
            left = CONTEXT - taken - len(request.prompt_ids)
            assert request.sampling.max_tokens == left < 4096


async def test_a_shorter_limit_of_the_server_s_is_named_alone(
    tokenizer: Any, model: CausalModel, root: Path
) -> None:
    store = AdapterStore(model, root, MIB)
    store.load("p", "good")
    async with api_over(FakeCore(), tokenizer, adapters=store, max_prompt_tokens=50) as api:
        reply = await ask(api, prompt=[50] * 51, adapter="p")
        message = check_error(reply, 400, "prompt", "context_length_exceeded")
        assert "maximum context length is 50 tokens. However" in message


async def test_a_wrong_method_is_told_which_are_right(served: Api) -> None:
    for path, allowed in (
        (ADAPTERS, "GET, HEAD, POST"),
        (f"{ADAPTERS}/p", "DELETE"),
        ("/v1/models", "GET, HEAD"),
        (CHAT, "POST"),
    ):
        reply = await served.client.request("PUT", path)
        assert (reply.status_code, reply.headers["allow"]) == (405, allowed)


# Who may


async def test_junk_names_do_not_grow_the_metrics(served: Api) -> None:
    await load(served)
    for fields in ({"adapter": "junk"}, {"model": "fake:junk"}, {"adapter": "p"}):
        await ask(served, **fields)
    before = await served.metrics()
    for number in range(500):
        assert (await ask(served, adapter=f"junk-{number}")).status_code == 404
        assert (await ask(served, model=f"fake:junk-{number}")).status_code == 404
    after = await served.metrics()
    assert after.keys() == before.keys()
    assert not any("junk" in name for name in after)
    assert after['admission_rejections_total{reason="unknown_adapter"}'] == 1_002


async def test_replies_are_as_described(served: Api) -> None:
    document = Described((await served.client.get("/openapi.json")).json())
    for name, path in (("p", "good"), ("p", "nowhere"), ("-", "good")):
        reply = await load(served, name, path)
        document.check(reply)
        assert document.accepts(ADAPTERS, {"name": name, "path": path}) == (name == "p")
    document.check(await served.client.get(ADAPTERS))
    document.check(await served.client.get("/v1/models"))
    document.check(await served.client.get("/v1/models/fake:p"), "/v1/models/{name}")
    for name in ("p", "p"):
        gone = await served.client.delete(f"{ADAPTERS}/{name}")
        document.check(gone, f"{ADAPTERS}/{{name}}")


async def test_requests_that_name_one_are_as_described(served: Api, path: str) -> None:
    await load(served)
    document = Described((await served.client.get("/openapi.json")).json())
    for fields, is_good in (
        ({"adapter": "p"}, True),
        ({"model": "fake:p"}, True),
        ({"adapter": None}, True),
        ({"adapter": "a b"}, False),
        ({"adapter": "p" * 65}, False),
        ({"adapter": ""}, False),
    ):
        reply = await ask(served, path, **fields)
        document.check(reply)
        assert reply.status_code == (200 if is_good else 400)
        body = {"model": "fake", **REQUESTS[path], **fields}
        assert document.accepts(path, body) == is_good
    document.check(await ask(served, path, adapter="x"))
    for name in ("fake:a b", "fake:", "fakes", "fake:p:p"):
        assert not document.accepts(path, {**REQUESTS[path], "model": name})
