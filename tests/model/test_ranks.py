"""A model whose heads two processes share gives the answers of one process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import pytest
import torch
from torch.distributed import distributed_c10d

from gemserve.adapters.kinds import load_adapter
from gemserve.calibration.search.calibrated_core import build_ranked_core
from gemserve.config import EngineConfig, ModelConfig
from gemserve.contract.events import Event, Filtered, Finished, TextDelta
from gemserve.contract.filter_options import FilterMethod, FilterParams
from gemserve.contract.prompt_parts import Priority, ProtectedRange
from gemserve.contract.reports import FilterReport
from gemserve.contract.requests import Request
from gemserve.contract.sampling import SamplingParams
from gemserve.engine.build import build_core
from gemserve.engine.core import Core
from gemserve.engine.ranks.group import leave_group
from gemserve.engine.ranks.ranks import Ranks
from gemserve.errors import AdapterError, ConfigError, RequestError
from gemserve.model.adapter import Adapter
from gemserve.model.base_model import base_of
from gemserve.model.loading.loader import check_ranks
from tests import adapters, models

LAYER, SEGMENT = 2, 256
ENGINE = EngineConfig(
    filter_layer=LAYER,
    filter_min_tokens=0,
    kv_memory_bytes=16 << 20,
    min_chunk_tokens=64,
    max_chunk_tokens=128,
    calibrate="off",
)
HEADS = ((1, 0), (1, 3), (2, 2))  # of both ranks


@dataclass(frozen=True)
class Cores:
    """The same model and settings in one process, and in two."""

    one: Core
    two: Core
    ranks: Ranks


@pytest.fixture(scope="module")
def cores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cores]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    folder = models.save("llama", tmp_path_factory.mktemp("model"))
    model = ModelConfig(model=str(folder), device="cpu", dtype="float32")
    ranks = Ranks(model, 2)
    try:
        yield Cores(build_core(model, ENGINE), build_ranked_core(ENGINE, ranks), ranks)
    finally:
        ranks.stop()
        leave_group()
        torch.set_num_threads(before)


def ids_of(seed: int, count: int) -> list[int]:
    rng = Random(seed)
    return [rng.randrange(3, models.VOCAB) for _ in range(count)]


def request(
    method: FilterMethod = "none",
    ids: list[int] | None = None,
    adapter: Adapter | None = None,
    max_tokens: int = 12,
    **params: object,
) -> Request:
    ids = ids_of(0, 900) if ids is None else ids
    question = len(ids) - 6, len(ids)
    return Request(
        request_id=method,
        prompt_ids=ids,
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True, logprobs=2),
        filter=replace(
            FilterParams(method=method, keep=64, window="off", return_selection=True),
            **params,  # type: ignore[arg-type]
        ),
        protected=(ProtectedRange(*question, Priority.QUESTION),),
        question=(question,),
        anchor=(1, 9, 8),
        adapter=adapter,
    )


@dataclass(frozen=True)
class Answer:
    """`logprobs`: of the drawn tokens."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    report: FilterReport | None


def answer_of(events: list[Event]) -> Answer:
    last = events[-1]
    assert isinstance(last, Finished)
    assert last.reason == "length", last.error
    deltas = [event for event in events if isinstance(event, TextDelta)]
    reports = [event.report for event in events if isinstance(event, Filtered)]
    return Answer(
        tokens=tuple(token for delta in deltas for token in delta.token_ids),
        logprobs=tuple(one.logprob for delta in deltas for one in delta.logprobs or ()),
        report=reports[0] if reports else None,
    )


def answers(core: Core, *requests: Request) -> list[Answer]:
    """The answers to requests that run together."""
    jobs = [core.add(request) for request in requests]
    events: dict[object, list[Event]] = {id(job): [] for job in jobs}
    while not core.is_idle:
        for job, event in core.step():
            events[id(job)].append(event)
        core.check_integrity()
    return [answer_of(events[id(job)]) for job in jobs]


def compare(cores: Cores, *requests: Request) -> list[Answer]:
    expected, actual = answers(cores.one, *requests), answers(cores.two, *requests)
    for ours, theirs in zip(expected, actual, strict=True):
        assert theirs.tokens == ours.tokens
        assert theirs.logprobs == pytest.approx(ours.logprobs, abs=1e-4)
        assert (theirs.report is None) == (ours.report is None)
        if ours.report is not None and theirs.report is not None:
            assert theirs.report.selection == ours.report.selection
            assert theirs.report.cached_tokens == ours.report.cached_tokens
    return actual


def test_each_rank_has_half_of_the_heads(cores: Cores) -> None:
    """Costs and limits are those of the whole model; a rank's memory is that of its heads."""
    one, two = cores.one.model, cores.two.model
    assert two.shape == one.shape
    assert two.shard is not None
    assert (two.shard.num_heads, two.shard.num_kv_heads) == (2, 1)
    assert cores.two.num_units == cores.one.num_units
    assert 2 * two.new_memory(8).num_bytes == one.new_memory(8).num_bytes
    assert base_of(two) == base_of(one)


@pytest.mark.parametrize(
    ("method", "params"),
    [
        ("none", {}),
        ("gemfilter", {}),
        ("sieve", {}),
        ("sieve", {"heads": HEADS}),
        ("sieve", {"heads": HEADS, "window": SEGMENT}),
        ("sieve", {"window": SEGMENT}),
        ("sieve", {"keep": "auto", "return_scores": "exact"}),
        ("snapkv", {}),
        ("position", {}),
    ],
)
def test_answers_are_those_of_one_process(
    cores: Cores, method: FilterMethod, params: dict[str, object]
) -> None:
    (answer,) = compare(cores, request(method, ids_of(len(method), 900), **params))
    assert len(answer.tokens) == 12
    if method != "none":
        assert answer.report is not None
        assert answer.report.kept_tokens < 900


def test_requests_of_every_kind_run_together(cores: Cores) -> None:
    kinds: list[FilterMethod] = ["none", "gemfilter", "sieve", "snapkv"]
    compare(cores, *[request(kind, ids_of(20 + i, 700)) for i, kind in enumerate(kinds)])


@pytest.mark.parametrize("window", ["off", SEGMENT])
def test_a_cached_document_is_taken_over(cores: Cores, window: int | str) -> None:
    document = ids_of(31 + (window == "off"), 800)
    first = request("sieve", [*document, *ids_of(2, 20)], window=window)
    second = request("sieve", [*document, *ids_of(3, 20)], window=window)
    compare(cores, first)
    (again,) = compare(cores, second)
    assert again.report is not None
    assert again.report.cached_tokens > 0


def test_a_prompt_is_scored(cores: Cores) -> None:
    compare(cores, replace(request("none", ids_of(35, 200)), prompt_logprobs=1))


@pytest.mark.parametrize("kind", ["ntk", "prefix", "activation"])
def test_adapters(cores: Cores, kind: str, tmp_path: Path) -> None:
    """A rank takes its own heads' part of an adapter. It changes the answers."""
    folder = adapters.write(tmp_path / kind, kind, cores.one.model)
    model = cores.two.model
    adapter = load_adapter(kind, folder, model, base_of(model), 1 << 30)
    plain = compare(cores, request("none", ids_of(41, 300)))
    adapted = compare(
        cores,
        request("none", ids_of(41, 300), adapter=adapter),
        request("sieve", ids_of(42, 600), adapter=adapter),
        request("none", ids_of(41, 300)),
    )
    assert adapted[0].tokens != plain[0].tokens
    assert adapted[2].tokens == plain[0].tokens


def test_a_cancelled_request_leaves_the_others_in_step(cores: Cores) -> None:
    """All ranks have paused at the same place, and abandon the pass there."""
    core = cores.two
    job = core.add(request("sieve", ids_of(51, 4000)))
    core._pace.slice_s = lambda crowd: 0.0  # type: ignore[method-assign]  # one piece a step
    for _ in range(5):
        core.step()
    assert [type(event) for _, event in core.cancel(job)] == [Finished]
    core.check_integrity()
    compare(cores, request("sieve", ids_of(52, 600)), request("none", ids_of(53, 300)))
    del core._pace.slice_s  # type: ignore[attr-defined]


def test_a_failed_choice_ends_one_request(cores: Cores, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 chooses for all, and the others hear why it could not."""

    def fail(*_: object) -> None:
        raise ValueError("no choice")

    with monkeypatch.context() as patch:
        patch.setattr("gemserve.engine.running.runner.choose_positions", fail)
        job = cores.two.add(request("sieve", ids_of(61, 500)))
        events = [event for _ in range(200) for of, event in cores.two.step() if of is job]
    assert isinstance(events[-1], Finished)
    assert events[-1].error == "ValueError: no choice"
    compare(cores, request("sieve", ids_of(62, 500)))


def test_all_groups_have_one_worker_thread(cores: Cores) -> None:
    """Of two, one may write the name of the last collective to memory that the other has freed."""
    assert cores.two.model.shard is not None
    groups = list(distributed_c10d._world.pg_map)
    backends = [group._get_backend(torch.device("cpu")) for group in groups]
    assert backends
    assert {backend.options._threads for backend in backends} == {1}  # type: ignore[attr-defined]


def test_what_ranks_do_not_have_is_refused(cores: Cores, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"return_attention.*2 ranks"):
        cores.two.add(request("sieve", return_attention=True))
    adapters.write_lora(tmp_path / "lora", models.build("llama"), target_modules=["q_proj"])
    model = cores.two.model
    with pytest.raises(AdapterError, match="tensor_parallel=2"):
        load_adapter("l", tmp_path / "lora", model, base_of(model), 1 << 30)


def test_heads_must_be_shared_equally(tmp_path: Path) -> None:
    llama = ModelConfig(model=str(models.save("llama", tmp_path / "llama")))
    check_ranks(llama, 2)
    with pytest.raises(ConfigError, match=r"the model's 2 key heads .* by 4 ranks"):
        check_ranks(llama, 4)
    opt = ModelConfig(model=str(models.save("opt", tmp_path / "opt")))
    with pytest.raises(ConfigError, match="models of type opt"):
        check_ranks(opt, 2)
