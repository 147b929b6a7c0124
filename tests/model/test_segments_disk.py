"""Segments on the disk: found by their names after a restart, wherever they stand in a prompt."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from gemserve.config import EngineConfig
from gemserve.contract import filter_plan
from gemserve.contract.events import Event, Finished
from gemserve.contract.reports import FilterReport
from gemserve.contract.requests import Request
from gemserve.engine.cache.files import read_info
from gemserve.engine.core import Core
from gemserve.engine.reuse import disk as cache_disk
from gemserve.engine.reuse import disk_threads as cache_threads
from gemserve.model.passes.causal_model import CausalModel
from tests import models
from tests.cores import core_over
from tests.model.test_segments import LAYER, UNIT, answer, core_of, ids_of, request
from tests.model.test_selection import NoText

DOCUMENT, OTHER = ids_of(1, 3000), ids_of(2, 1000)
TOKENS = 200_000  # of the KV memory: units of one token's keys in one layer


@pytest.fixture(autouse=True)
def _always_worth_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_disk, "_OVERHEAD_S", -1e9)
    monkeypatch.setattr(filter_plan, "GROUP_TOKENS", 800)  # so that a pass has several groups


def disk_core(folder: Path, tokens: int = TOKENS, cache_memory: float = 0.5) -> Core:
    core = core_over(
        CausalModel(models.build("llama")),
        NoText(),
        EngineConfig(
            filter_layer=LAYER,
            filter_min_tokens=0,
            kv_memory_bytes=tokens * UNIT,
            cache_memory=cache_memory,
            cache_dir=str(folder),
        ),
        frozenset(),
    )
    core._runner.memory.rows.zero_()  # it may be what an earlier test has left
    return core


def asked(document: list[int] = DOCUMENT, question: int = 0, **changes: object) -> Request:
    ids = [*document, *ids_of(50 + question, 6)]
    return replace(request(ids), **changes)  # type: ignore[arg-type]


def settle(core: Core) -> None:
    """Let everything be written."""
    stop_s = time.monotonic() + 60
    while not core.is_idle:
        assert time.monotonic() < stop_s, "writing does not end"
        core.step()


def files(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.name.startswith("kv-")]


def write_segments(folder: Path, ask: Request | None = None) -> int:
    """How many segments of a document are on the disk now."""
    core = disk_core(folder)
    report, _ = answer(core, ask or asked())
    settle(core)
    core.close()
    assert report.windows is not None
    assert report.windows > 10
    assert len(files(folder)) == report.windows
    return report.windows


def like_cold(core: Core, ask: Request) -> FilterReport:
    """The report of a pass that chooses and answers as a cold one does."""
    cold, cold_drawn = answer(core_of(tokens=TOKENS, cache_memory=0.0), ask)
    report, drawn = answer(core, ask)
    assert (report.selection, drawn) == (cold.selection, cold_drawn)
    assert report.scores is not None
    assert cold.scores is not None
    assert report.scores.tokens == cold.scores.tokens
    return report


def cached_windows(core: Core, ask: Request) -> int:
    report = like_cold(core, ask)
    assert report.cached_windows is not None
    return report.cached_windows


def test_a_restarted_server_finds_its_segments(tmp_path: Path) -> None:
    count = write_segments(tmp_path)
    core = disk_core(tmp_path)
    assert cached_windows(core, asked(question=1)) == count
    counts = core.cache_state.disk
    assert (counts.hits, counts.errors) == (1, 0)
    assert counts.hit_tokens > len(DOCUMENT)
    settle(core)
    assert core.cache_state.disk.writes == 0, "what was just loaded is written again"
    core.close()


def test_a_document_that_moved_is_found_after_a_restart(tmp_path: Path) -> None:
    """Another document comes first, and some lines in front."""
    count = write_segments(tmp_path)
    core = disk_core(tmp_path)
    moved = [*OTHER, *ids_of(9, 30), *DOCUMENT]
    assert count - 2 <= cached_windows(core, asked(moved)) <= count
    core.close()


def test_what_memory_has_lost_is_read_from_the_disk(tmp_path: Path) -> None:
    core = disk_core(tmp_path)
    answer(core, asked())
    settle(core)
    core._scheduler.cache.make_room(core.num_units)
    report = like_cold(core, asked(question=1))
    assert report.cached_windows == report.windows
    core.close()


def test_a_cache_that_holds_less_than_the_document_loads_what_fits(tmp_path: Path) -> None:
    count = write_segments(tmp_path)
    core = disk_core(tmp_path, tokens=20_000)
    assert 0 < cached_windows(core, asked(question=1)) < count
    core.close()


@pytest.mark.parametrize("other", ["tenant", "layer", "salt"])
def test_nothing_is_found_across(other: str, tmp_path: Path) -> None:
    write_segments(tmp_path, asked(tenant=b"a"))
    ask = asked(question=1, tenant=b"a")
    if other == "tenant":
        ask = replace(ask, tenant=b"b")
    elif other == "layer":
        ask = replace(ask, filter=replace(ask.filter, layer=1))
    else:
        (tmp_path / "salt").unlink()
    core = disk_core(tmp_path)
    assert cached_windows(core, ask) == 0
    core.close()


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-100] ^= 4
    path.write_bytes(data)


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize("harm", [_flip, _cut, Path.unlink])
@pytest.mark.parametrize("is_early", [True, False])
def test_a_damaged_file_costs_its_segment(
    harm: Callable[[Path], None],
    is_early: bool,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Before the server has read the header, and after that."""
    count = write_segments(tmp_path)
    path = files(tmp_path)[3]
    if is_early:
        harm(path)
    core = disk_core(tmp_path)
    if not is_early:
        harm(path)
    with caplog.at_level(logging.WARNING):
        assert cached_windows(core, asked(question=1)) == count - 1
    assert len(caplog.records) <= 1
    settle(core)
    assert len(files(tmp_path)) == count, "it was not written anew"
    assert core._disk is not None
    assert read_info(path, core._disk.folder.key).num_bytes == path.stat().st_size
    core.close()


def test_forgotten_segments_are_nowhere(tmp_path: Path) -> None:
    core = disk_core(tmp_path)
    memory = core._runner.memory
    memory.rows.zero_()
    for question in range(2):
        answer(core, asked(question=question, documents=("a",)))
        settle(core)
        assert files(tmp_path)
        core._scheduler.cache.make_room(core.num_units)
    report = like_cold(core, asked(question=2, documents=("a",)))
    assert report.cached_windows == report.windows
    core.forget_documents(["a"])
    assert not files(tmp_path)
    assert not memory.rows.any()
    assert cached_windows(core, asked(question=3, documents=("a",))) == 0
    settle(core)
    assert not files(tmp_path)
    assert not memory.rows.any()
    core.close()


def test_a_document_that_is_stored_later_is_deleted_with_its_files(tmp_path: Path) -> None:
    write_segments(tmp_path)
    core = disk_core(tmp_path)
    answer(core, asked(question=1, documents=("a",)))
    settle(core)
    core.forget_documents(["a"])
    assert not files(tmp_path)
    core.close()


@pytest.fixture
def slow_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    read = cache_threads.read_block

    def slow(*arguments: object) -> bytearray:
        time.sleep(0.05)
        return read(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(cache_threads, "read_block", slow)


@pytest.mark.usefixtures("slow_reading")
def test_a_request_that_is_cancelled_while_it_loads(tmp_path: Path) -> None:
    count = write_segments(tmp_path)
    core = disk_core(tmp_path)
    job = core.add(asked(question=1))
    for _ in range(4):
        core.step()
        core.check_integrity()
    assert job.sequence.is_loading
    core.cancel(job)
    core.check_integrity()
    assert core.kv_bytes_used == 0
    settle(core)
    core.check_integrity()
    assert cached_windows(core, asked(question=2)) == count
    core.close()


@pytest.mark.usefixtures("slow_reading")
def test_a_document_that_is_forgotten_while_it_loads(tmp_path: Path) -> None:
    core = disk_core(tmp_path)
    answer(core, asked(documents=("a",)))
    settle(core)
    core._scheduler.cache.make_room(core.num_units)
    core._runner.change_memory(core._pool.take_changes())
    job = core.add(asked(question=1, documents=("a",)))
    for _ in range(4):
        core.step()
    assert job.sequence.is_loading
    core.forget_documents(["a"])
    events = [event for event in run(core) if isinstance(event, Finished)]
    assert [event.reason for event in events] == ["length"]
    assert not files(tmp_path)
    assert not core._runner.memory.rows.any()
    core.close()


@pytest.mark.usefixtures("slow_reading")
def test_two_questions_load_each_segment_once_and_others_go_on(tmp_path: Path) -> None:
    count = write_segments(tmp_path)
    core = disk_core(tmp_path)
    jobs = [core.add(asked(question=q)) for q in (1, 2)]
    short = core.add(asked(OTHER, question=3))
    ended, reports = [], {}
    while not core.is_idle:
        for job, event in core.step():
            if isinstance(event, Finished):
                ended.append(job)
            if hasattr(event, "report"):
                reports[job] = event.report
        core.check_integrity()
    assert ended[0] is short
    assert [reports[job].cached_windows for job in jobs] == [count, count]
    assert core._disk is not None
    assert core._disk.counts.hit_tokens < 2 * len(DOCUMENT)
    core.close()


def test_a_disk_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    count = write_segments(tmp_path)
    is_over = False
    read = cache_threads.read_block

    def hang(*arguments: object) -> bytearray:
        while not is_over:
            time.sleep(0.01)
        return read(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(cache_threads, "read_block", hang)
    monkeypatch.setattr(cache_disk, "_STALL_S", 0.3)
    core = disk_core(tmp_path)
    assert cached_windows(core, asked(question=1)) == 0
    assert cached_windows(core, asked(question=2)) == count, "what was computed is in memory"
    is_over = True
    core.close()


def test_loading_that_would_take_longer_is_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_segments(tmp_path)
    core = disk_core(tmp_path)
    monkeypatch.setattr(cache_disk, "_OVERHEAD_S", 0.0)
    assert core._disk is not None
    core._disk._bytes_per_s = 1000.0
    assert cached_windows(core, asked(question=1)) == 0
    core.close()


def test_what_was_cancelled_is_not_held(tmp_path: Path) -> None:
    """Its adapter stayed in memory until the next request came."""
    write_segments(tmp_path)
    core = disk_core(tmp_path)
    job = core.add(asked(OTHER))
    core.step()
    core.cancel(job)
    run(core)
    assert core._disk is not None
    assert not core._disk._readers
    core.close()


def run(core: Core) -> list[Event]:
    """All events until nothing is left to do."""
    events: list[Event] = []
    while not core.is_idle:
        events += [event for _, event in core.step()]
        core.check_integrity()
    return events
