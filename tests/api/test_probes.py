"""Routes beside the completions: models, probes, metrics, and those that do not exist."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from gemserve.contract.events import Filtered
from gemserve.contract.reports import FilterReport
from tests.fakes import CHAT, COMPLETIONS, FILTERED, Api, FakeCore, api_over, data_of

pytestmark = pytest.mark.anyio


async def test_models(api: Api) -> None:
    body = (await api.client.get("/v1/models")).json()
    assert body["object"] == "list"
    (card,) = body["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == ("fake", "model", 2000)
    assert (await api.client.get("/v1/models/fake")).json() == card
    missing = await api.client.get("/v1/models/org/other")
    assert (missing.status_code, missing.json()["error"]["param"]) == (404, "model")


async def test_probes(api: Api) -> None:
    for path in ("/health", "/ping", "/ready", "/version", "/metrics", "/openapi.json", "/load"):
        reply = await api.client.get(path)
        assert reply.status_code == 200, path
        assert reply.headers["x-request-id"]


async def test_what_runs_on_this_machine_is_told(api: Api) -> None:
    told = (await api.client.get("/version")).json()
    assert (told["attention_backend"], told["kernels"]) == ("aten-cpu", "torch")
    label = 'model_info{attention_backend="aten-cpu",kernels="torch",model="fake"}'
    assert (await api.metrics())[label] == 1


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nowhere", 404),
        ("POST", "/v1/nowhere", 404),
        ("GET", "/health/x", 404),
        ("GET", CHAT, 405),
    ],
)
async def test_what_does_not_exist_is_json_too(
    api: Api, method: str, path: str, status: int
) -> None:
    reply = await api.client.request(method, path)
    assert reply.status_code == status
    assert set(reply.json()["error"]) == {"message", "type", "param", "code"}
    assert reply.headers["x-request-id"]
    assert reply.headers.get("allow") == ("POST" if status == 405 else None)


async def test_metrics_of_a_finished_request(api: Api) -> None:
    before = await api.metrics()
    assert not sum(v for name, v in before.items() if name.startswith("request_success_total"))
    reply = await api.post(COMPLETIONS, prompt=list(range(10, 510)), filter={"keep": 32})
    protected = reply.json()["filter"]["protected_tokens"]
    data_of(await api.post(CHAT, stream=True))
    after = await api.metrics()
    short = len(api.core.requests[1].prompt_ids)
    assert after['request_success_total{finish_reason="stop"}'] == 2
    assert after["prompt_tokens_total"] == 500 + short
    assert after["kept_prompt_tokens_total"] == protected + 32 + short
    assert after["generation_tokens_total"] == 8
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time"):
        assert after[f"{name}_seconds_count"] == 2, name
    for name in ("request_prefill_time", "request_decode_time"):
        assert after[f"{name}_seconds_count"] == 2, name
    assert after["inter_token_latency_seconds_count"] == 6
    assert after["filter_time_seconds_count"] == 1
    assert (after["num_requests_running"], after["num_requests_waiting"]) == (0, 0)


async def test_metrics_of_filters(api: Api, core: FakeCore) -> None:
    """A fallback that reads everything must not look like a prompt that was too short to filter."""
    for keep in (32, {"method": "gemfilter", "keep": 32}, "none"):
        chosen = {"keep": keep} if isinstance(keep, int) else keep
        await api.post(COMPLETIONS, prompt=list(range(10, 510)), filter=chosen)
    await api.post(CHAT)
    for reason, coverage in ((None, 0.95), ("diffuse_attention", 0.21), ("widened", 0.25)):
        report = FilterReport(
            method="sieve",
            applied=reason != "diffuse_attention",
            reason=reason,
            layer=2,
            prompt_tokens=500,
            kept_tokens=500,
            cached_tokens=0,
            filter_ms=1.0,
            selection=None,
            coverage=coverage,
        )
        core.script = (Filtered(report=report, started_s=0.0, filtered_s=0.0), "a")
        await api.post(COMPLETIONS, prompt=list(range(10, 510)))
    after = await api.metrics()
    counted = {k: v for k, v in after.items() if k.startswith("filter_requests_total")}
    assert counted == {
        'filter_requests_total{method="sieve",outcome="applied"}': 2,
        'filter_requests_total{method="gemfilter",outcome="applied"}': 1,
        'filter_requests_total{method="none",outcome="disabled"}': 1,
        'filter_requests_total{method="sieve",outcome="short_prompt"}': 1,
        'filter_requests_total{method="sieve",outcome="diffuse_attention"}': 1,
        'filter_requests_total{method="sieve",outcome="widened"}': 1,
    }
    buckets = {k: v for k, v in after.items() if k.startswith("filter_coverage_bucket")}
    assert len(buckets) == 11  # 0.1 to 1.0, and infinity
    assert buckets['filter_coverage_bucket{le="0.2"}'] == 0
    assert buckets['filter_coverage_bucket{le="0.3"}'] == 2
    assert after["filter_coverage_count"] == 3


async def test_tasks_of_the_event_loop_are_counted(api: Api) -> None:
    """A task that is never ended shows, so a leak of tasks can be seen from outside."""
    before = (await api.metrics())["event_loop_tasks"]
    left = asyncio.create_task(asyncio.Event().wait())
    assert (await api.metrics())["event_loop_tasks"] == before + 1
    left.cancel()


async def test_metrics_of_a_failed_request(api: Api, core: FakeCore) -> None:
    core.script = (FILTERED, "a", ValueError("boom"))
    await api.post(CHAT)
    data_of(await api.post(CHAT, stream=True))
    after = await api.metrics()
    assert after['request_success_total{finish_reason="error"}'] == 2
    assert sum(v for k, v in after.items() if k.startswith("request_success_total")) == 2


async def test_metrics_of_rejected_requests(api: Api) -> None:
    await api.post(CHAT, model="other")
    await api.post(CHAT, temperature=9)
    await api.post(COMPLETIONS, prompt="")
    await api.post(COMPLETIONS, prompt=list(range(4000)))
    after = await api.metrics()
    assert after['admission_rejections_total{reason="unknown_model"}'] == 1
    assert after['admission_rejections_total{reason="invalid_request"}'] == 2
    assert after['admission_rejections_total{reason="prompt_too_long"}'] == 1
    assert not sum(v for name, v in after.items() if name.startswith("request_success_total"))


async def test_a_thousand_junk_names_leave_the_labels_bounded(api: Api) -> None:
    await api.post(CHAT, model="junk")
    await api.client.get("/v1/models/junk")
    before = set(await api.metrics())
    for i in range(500):
        body = json.dumps({"model": f"junk-{i}", "messages": []})
        await api.client.post(CHAT, content=body)
        await api.post(COMPLETIONS, model=f"junk-{i}", headers={"X-Request-Id": f"junk-{i}"})
    names = set(await api.metrics())
    assert len(names - before) <= 6  # a reason and two statuses, each with when it was first seen
    assert not [name for name in names if "junk" in name]


async def test_two_applications_share_no_metrics(tokenizer: Any, api: Api) -> None:
    await api.post(CHAT)
    async with api_over(FakeCore(), tokenizer) as other:
        assert (await other.metrics())["prompt_tokens_total"] == 0
