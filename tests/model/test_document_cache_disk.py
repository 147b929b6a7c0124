"""The document cache on the disk: restarts, damage, full disks and deletion, over a real model."""

from __future__ import annotations

import gc
import logging
import os
import resource
import shutil
import threading
import time
import weakref
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from gemserve.config import EngineConfig
from gemserve.contract.requests import Request
from gemserve.engine.cache.files import FileWriter, read_info
from gemserve.engine.core import Core
from gemserve.engine.reuse import disk as cache_disk
from gemserve.engine.reuse import disk_threads as cache_threads
from gemserve.model.passes.causal_model import CausalModel
from tests import models
from tests.cores import core_over
from tests.model.test_document_cache import (
    UNIT,
    answer_of,
    cached_tokens,
    core_of,
    made,
    random_ids,
    request,
)
from tests.model.test_selection import NoText

RNG = Random(11)
DOCUMENT = random_ids(RNG, 1000)
QUESTIONS = [random_ids(RNG, 20) for _ in range(4)]


@pytest.fixture(autouse=True)
def _always_worth_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_disk, "_OVERHEAD_S", -1e9)


def disk_core(
    folder: Path, tokens: int = 60_000, limit: int = 1 << 30, name: str = "llama"
) -> Core:
    return core_over(
        CausalModel(models.build(name)),
        NoText(),
        EngineConfig(
            filter_layer=2,
            filter_min_tokens=0,
            kv_memory_bytes=tokens * UNIT,
            cache_dir=str(folder),
            cache_disk_bytes=limit,
            min_chunk_tokens=64,
            max_chunk_tokens=200,
        ),
        frozenset(),
    )


def settle(core: Core) -> None:
    """Let everything be written."""
    stop_s = time.monotonic() + 60
    while not core.is_idle:
        assert time.monotonic() < stop_s, "writing does not end"
        core.step()


def files(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.name.startswith("kv-")]


def asked(question: int = 0, document: list[int] = DOCUMENT, **changes: object) -> Request:
    return replace(request(document + QUESTIONS[question]), **changes)  # type: ignore[arg-type]


def cold_answer(asked_for: Request) -> object:
    return answer_of(list(core_of("llama", tokens=60_000, cache_memory=0).run_alone(asked_for)))


def ask_after_restart(folder: Path, asked_for: Request) -> int:
    """Tokens found on the disk; the answer is that of a cold server."""
    core = disk_core(folder)
    try:
        events = list(core.run_alone(asked_for))
        core.check_integrity()
        assert answer_of(events) == cold_answer(asked_for)
        return cached_tokens(events)
    finally:
        core.close()


def write_document(folder: Path, asked_for: Request | None = None) -> Path:
    core = disk_core(folder)
    list(core.run_alone(asked_for or asked()))
    settle(core)
    core.close()
    (path,) = files(folder)
    return path


def test_a_restarted_server_finds_its_documents(tmp_path: Path) -> None:
    write_document(tmp_path)
    assert ask_after_restart(tmp_path, asked(1)) == 768  # whole links of 256 tokens


def test_a_document_is_written_once(tmp_path: Path) -> None:
    core = disk_core(tmp_path)
    for question in range(4):
        list(core.run_alone(asked(question)))
        settle(core)
    assert core._disk is not None
    assert core._disk.counts.writes == 1
    core.close()


def test_what_memory_has_lost_is_read_from_the_disk(tmp_path: Path) -> None:
    core = disk_core(tmp_path)
    list(core.run_alone(asked()))
    settle(core)
    core._scheduler.cache.make_room(core.num_units)
    events = list(core.run_alone(asked(1)))
    assert cached_tokens(events) == 768
    assert answer_of(events) == cold_answer(asked(1))
    core.check_integrity()
    core.close()


def test_a_document_in_several_places_is_one_file(tmp_path: Path) -> None:
    """A block that begins in one place and ends in another one was written wrong."""
    core = disk_core(tmp_path)
    for question, length in enumerate((400, 1000)):
        list(core.run_alone(asked(question, DOCUMENT[:length])))
    assert [len(one.shares) for one in core._scheduler.cache.documents] == [2]
    settle(core)
    core.close()
    assert ask_after_restart(tmp_path, asked(2)) == 768


def test_memory_and_disk_together(tmp_path: Path) -> None:
    """Memory has the first 300 tokens of what is on the disk."""
    core = disk_core(tmp_path)
    list(core.run_alone(asked()))
    settle(core)
    core._scheduler.cache.make_room(core.num_units)
    list(core.run_alone(asked(2, DOCUMENT[:300] + random_ids(Random(4), 300))))
    events = list(core.run_alone(asked(1)))
    assert cached_tokens(events) == 768
    assert answer_of(events) == cold_answer(asked(1))
    core.close()


@pytest.mark.parametrize("other", ["tenant", "adapter", "layer", "tokens", "model", "salt"])
def test_nothing_is_found_across(other: str, tmp_path: Path) -> None:
    write_document(tmp_path, asked(tenant=b"a"))
    core = disk_core(tmp_path, name="llama")
    ask = asked(1, tenant=b"a")
    if other == "tenant":
        ask = replace(ask, tenant=b"b")
    elif other == "adapter":
        ask = replace(ask, adapter=made(core.model, 1))
    elif other == "layer":
        ask = replace(ask, filter=replace(ask.filter, layer=1))
    elif other == "tokens":
        ask = replace(ask, prompt_ids=[DOCUMENT[0] ^ 1, *ask.prompt_ids[1:]])
    elif other == "model":
        core.close()
        core = disk_core(tmp_path, name="mistral")
    elif other == "salt":
        core.close()
        (tmp_path / "salt").unlink()
        core = disk_core(tmp_path)
    assert cached_tokens(list(core.run_alone(ask))) == 0
    core.close()


def test_one_altered_weight_is_another_model(tmp_path: Path) -> None:
    model = CausalModel(models.build("llama"))
    config = disk_core(tmp_path).config
    from gemserve.engine.reuse.disk_setup import identity_of

    before = identity_of(model, config)
    assert identity_of(CausalModel(models.build("llama")), config) == before
    weight = model.hf.model.layers[0].self_attn.k_proj.weight
    weight.data.view(-1)[5] += 1e-3
    assert identity_of(model, config) != before


def test_damage_in_a_block_costs_what_follows_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_document(tmp_path)
    data = bytearray(path.read_bytes())
    core = disk_core(tmp_path)
    assert core._disk is not None
    info = read_info(path, core._disk.folder.key)
    core.close()
    data[info.data_start + 300 * info.token_bytes] ^= 4
    path.write_bytes(data)
    with caplog.at_level(logging.WARNING):
        assert ask_after_restart(tmp_path, asked(1)) == 256
    assert len(caplog.records) == 1
    assert not path.exists() or path.read_bytes() != data, "it may have been written anew"


def test_a_truncated_file_is_ignored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_document(tmp_path)
    os.truncate(path, path.stat().st_size // 2)
    with caplog.at_level(logging.WARNING):
        assert ask_after_restart(tmp_path, asked(1)) == 0
    assert len(caplog.records) == 1


def test_a_file_that_vanishes_is_no_error(tmp_path: Path) -> None:
    path = write_document(tmp_path)
    core = disk_core(tmp_path)
    path.unlink()
    events = list(core.run_alone(asked(1)))
    assert cached_tokens(events) == 0
    assert answer_of(events) == cold_answer(asked(1))
    core.close()


@pytest.mark.parametrize("method", ["__init__", "add", "finish", "publish"])
def test_a_full_disk_is_one_warning(
    method: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(FileWriter, method, fail)
    core = disk_core(tmp_path)
    with caplog.at_level(logging.WARNING):
        for question in range(2):
            document = random_ids(Random(question), 600)
            events = list(core.run_alone(asked(question, document)))
            assert answer_of(events) == cold_answer(asked(question, document))
            settle(core)
    assert len(caplog.records) == 1
    assert "No space left" in caplog.text
    assert not files(tmp_path)
    core.close()


@pytest.mark.parametrize("method", ["__init__", "publish"])
def test_a_disk_that_hangs_stops_no_step(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deleting a document, and the end of the server, waited for it, and with them all streams."""
    is_waiting, goes_on = threading.Event(), threading.Event()
    original = getattr(FileWriter, method)

    def hang(*given: object) -> object:
        is_waiting.set()
        assert goes_on.wait(30)
        return original(*given)

    monkeypatch.setattr(FileWriter, method, hang)
    core = disk_core(tmp_path)
    list(core.run_alone(replace(asked(), documents=("gone",))))
    while not is_waiting.is_set():
        core.step()
    core.forget_documents(["gone"])
    while not core.is_idle:
        core.step()
    assert is_waiting.is_set()
    goes_on.set()
    core.close()
    assert not files(tmp_path)
    assert not list(tmp_path.glob("*.tmp"))


def test_a_disk_with_room_again_is_written_to_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One full minute of a disk was the end of writing until the server was restarted."""
    monkeypatch.setattr(cache_disk, "_PAUSE_S", 0.5)
    core = disk_core(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
    try:
        list(core.run_alone(asked()))
        settle(core)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "File too large" in caplog.text
    assert not files(tmp_path)
    assert not list(tmp_path.glob("*.tmp"))
    time.sleep(0.6)
    list(core.run_alone(asked(0, random_ids(Random(5), 600))))
    settle(core)
    assert len(files(tmp_path)) == 1
    core.close()


def test_a_folder_that_was_deleted_is_left_to_its_next_owner(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Both servers wrote to the new folder, and each counted its own files only."""
    folder = tmp_path / "cache"
    first = disk_core(folder)
    list(first.run_alone(asked()))
    settle(first)
    assert len(files(folder)) == 1
    shutil.rmtree(folder)
    second = disk_core(folder)
    for number in range(2):
        document = random_ids(Random(number), 600)
        events = list(first.run_alone(asked(0, document)))
        assert answer_of(events) == cold_answer(asked(0, document))
        settle(first)
    assert not files(folder)
    assert [record.getMessage() for record in caplog.records] == [
        f"document cache: the disk is not used as long as {folder} is moved or deleted"
    ]
    list(second.run_alone(asked(1)))
    settle(second)
    first.close()
    assert len(files(folder)) == 1
    second.close()


def test_a_folder_that_comes_back_is_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing was written until the next start, and what was asked for meanwhile was forgotten."""
    monkeypatch.setattr(cache_disk, "_PAUSE_S", 0.5)
    folder, away = tmp_path / "cache", tmp_path / "away"
    core = disk_core(folder)
    list(core.run_alone(asked()))
    settle(core)
    core._scheduler.cache.make_room(core.num_units)
    folder.rename(away)
    events = list(core.run_alone(asked(1)))
    assert cached_tokens(events) == 0
    assert answer_of(events) == cold_answer(asked(1))
    settle(core)
    away.rename(folder)
    time.sleep(0.6)
    core._scheduler.cache.make_room(core.num_units)
    assert cached_tokens(list(core.run_alone(asked(2)))) == 768
    list(core.run_alone(asked(0, random_ids(Random(5), 600))))
    settle(core)
    assert len(files(folder)) == 2
    assert len(caplog.records) == 1
    core.close()


def test_what_is_computed_while_the_disk_is_not_used_is_written_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It counted as written, although nothing is worth it then, and was lost at the next start."""
    write_document(tmp_path)
    goes_on, read = threading.Event(), cache_threads.read_block

    def hang(*given: Any) -> bytearray:
        assert goes_on.wait(60)
        return read(*given)

    monkeypatch.setattr(cache_threads, "read_block", hang)
    monkeypatch.setattr(cache_disk, "_STALL_S", 0.3)
    monkeypatch.setattr(cache_disk, "_FORGET_S", 1.0)
    core = disk_core(tmp_path)
    assert cached_tokens(list(core.run_alone(asked(1)))) == 0
    goes_on.set()
    list(core.run_alone(asked(0, random_ids(Random(5), 600))))
    settle(core)
    time.sleep(1.1)
    settle(core)
    assert len(files(tmp_path)) == 2
    core.close()


def test_a_pipe_in_a_file_s_place_is_not_waited_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The thread that reads waited for somebody to write, and the disk counted as broken."""
    path = write_document(tmp_path)
    core = disk_core(tmp_path)
    path.unlink()
    os.mkfifo(path)
    events = list(core.run_alone(asked(1)))
    assert answer_of(events) == cold_answer(asked(1))
    assert "it is not a file" in caplog.text
    core.close()


def test_the_files_stay_within_their_limit(tmp_path: Path) -> None:
    limit = 3 << 20
    core = disk_core(tmp_path, limit=limit)
    for seed in range(6):
        list(core.run_alone(asked(0, random_ids(Random(seed), 1100))))
        settle(core)
        assert sum(path.stat().st_size for path in files(tmp_path)) <= limit
    assert files(tmp_path)
    core.close()


def test_a_deleted_document_is_nowhere(tmp_path: Path) -> None:
    """Neither the pool nor a file holds any key that was computed of it."""
    core = disk_core(tmp_path)
    memory = core._runner.memory
    memory.rows.zero_()  # an earlier test's engine may have had the same memory
    list(core.run_alone(asked(documents=("a",))))
    settle(core)
    list(core.run_alone(asked(1, documents=("a",))))
    (document,) = core._scheduler.cache.documents
    start = document.spans[0].start * UNIT
    whole = memory._flat.view(-1).numpy().tobytes()
    key = whole[start + 40 * 32 : start + 40 * 32 + 32]
    assert any(key)
    assert whole.count(key) >= 1
    (path,) = files(tmp_path)
    assert key in path.read_bytes()
    core.forget_documents(["a"])
    assert key not in memory._flat.numpy().tobytes()
    assert not files(tmp_path)
    assert cached_tokens(list(core.run_alone(asked(2, documents=("a",))))) == 0
    settle(core)
    assert key not in memory._flat.numpy().tobytes()
    assert not files(tmp_path)
    core.close()


def test_a_document_that_is_deleted_while_it_is_written_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine waited for the writer, up to 5 s, in which nobody's answer went on."""
    add, writes, gate = FileWriter.add, threading.Event(), threading.Event()

    def slow(writer: FileWriter, data: memoryview) -> None:
        writes.set()
        assert gate.wait(60)
        add(writer, data)

    monkeypatch.setattr(FileWriter, "add", slow)
    core = disk_core(tmp_path)
    list(core.run_alone(asked(documents=("a",))))
    for _ in range(3):
        core.step()
    assert core._disk is not None
    assert core._disk.has_work
    assert writes.wait(60)
    core.forget_documents(["a"])  # returns, though the writer hangs
    assert not files(tmp_path)
    gate.set()
    settle(core)
    assert not files(tmp_path)
    core.close()


def test_a_document_that_is_stored_and_deleted_while_its_text_is_written_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file, which had begun without its id, was kept, also for the next process."""
    finish, is_whole, gate = FileWriter.finish, threading.Event(), threading.Event()

    def slow(writer: FileWriter) -> None:
        is_whole.set()
        assert gate.wait(60)
        finish(writer)

    monkeypatch.setattr(FileWriter, "finish", slow)
    core = disk_core(tmp_path)
    list(core.run_alone(asked()))
    while not is_whole.is_set():
        core.step()
    list(core.run_alone(asked(1, documents=("a",))))
    core.forget_documents(["a"])
    gate.set()
    settle(core)
    assert not files(tmp_path)
    core.close()


def test_a_document_that_is_stored_later_is_deleted_with_its_file(tmp_path: Path) -> None:
    """The file was written before the document had an id."""
    core = disk_core(tmp_path)
    list(core.run_alone(asked()))
    settle(core)
    list(core.run_alone(asked(1, documents=("a",))))
    settle(core)
    (path,) = files(tmp_path)
    core.forget_documents(["a"])
    assert not path.exists()
    core.close()


def test_a_request_that_is_cancelled_while_it_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_document(tmp_path)
    from gemserve.engine.reuse import disk_threads as cache_threads

    read = cache_threads.read_block

    def slow(*arguments: object) -> bytearray:
        time.sleep(0.1)
        return read(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(cache_threads, "read_block", slow)
    core = disk_core(tmp_path)
    job = core.add(asked(1))
    core.step()
    assert job.sequence.is_loading
    core.cancel(job)
    core.check_integrity()
    assert core.kv_bytes_used == 0
    events = list(core.run_alone(asked(2)))
    assert answer_of(events) == cold_answer(asked(2))
    core.close()


def test_a_request_that_has_ended_is_not_held(tmp_path: Path) -> None:
    """Its adapter counted as in use until another file was read, so that no other had room."""
    core = disk_core(tmp_path)
    adapter = made(core.model, 1)
    list(core.run_alone(asked(adapter=adapter)))
    settle(core)
    core._scheduler.cache.make_room(core.num_units)
    assert cached_tokens(list(core.run_alone(asked(1, adapter=adapter)))) == 768
    held = weakref.ref(adapter)
    del adapter
    stop_s = time.monotonic() + 20
    while held() is not None:
        assert time.monotonic() < stop_s, "the thread that reads files holds it"
        time.sleep(0.01)
        gc.collect()
    core.close()


def test_loading_that_would_take_longer_is_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_document(tmp_path)
    core = disk_core(tmp_path)
    monkeypatch.setattr(cache_disk, "_OVERHEAD_S", 0.0)
    assert core._disk is not None
    core._disk._bytes_per_s = 1000.0
    assert cached_tokens(list(core.run_alone(asked(1)))) == 0
    core.close()


def test_a_file_that_gives_way_before_it_is_read_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It was counted, and named in the log, as if the disk had failed."""
    write_document(tmp_path)
    core = disk_core(tmp_path)
    assert core._disk is not None
    gate, opened = threading.Event(), cache_threads.open_plain

    def late(*arguments: Any) -> int:
        gate.wait(20)
        return opened(*arguments)

    monkeypatch.setattr(cache_threads, "open_plain", late)
    job = core.add(asked(1))
    core.step()
    assert job.sequence.is_loading
    core._disk.folder.make_room(core._disk.folder._limit)
    gate.set()
    while not core.is_idle:
        core.step()
    assert core._disk.counts.errors == 0
    assert "is removed" not in caplog.text
    core.close()


def test_what_other_code_has_computed_is_not_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a mend of how keys are computed, those from before were used."""
    write_document(tmp_path)
    monkeypatch.setattr("gemserve.engine.reuse.disk_setup._hash_of_code", lambda: "other")
    core = disk_core(tmp_path)
    assert cached_tokens(list(core.run_alone(asked(1)))) == 0
    core.close()
