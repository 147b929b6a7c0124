"""A server that cannot start says everything that is wrong, each with option, value and limit."""

from __future__ import annotations

import argparse
import fcntl
import json
import socket
import struct
import threading
import time
import urllib.error
import urllib.request
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from gemserve.cli import startup_checks
from gemserve.cli.main import main
from gemserve.cli.options import SERVER_OPTIONS, Option, number, read_good_options
from gemserve.cli.startup_checks import Problems, check_settings
from gemserve.config import EngineConfig, HostMemory, ModelConfig, ServerConfig
from gemserve.errors import ConfigError
from gemserve.http_server.loading_probe import LoadingProbe


def found(
    engine: EngineConfig | None = None,
    server: ServerConfig | None = None,
    model: ModelConfig | None = None,
) -> list[str]:
    """What the checks find, beside a port that is free."""
    problems = Problems()
    given = server or ServerConfig(port=0)
    check_settings(problems, model or ModelConfig(), engine or EngineConfig(), given)
    try:
        problems.raise_any()
    except ConfigError as error:
        return list(error.problems)
    return []


@pytest.mark.parametrize(
    ("name", "value", "needed"),
    [
        ("cache_disk_bytes", 1 << 30, "cache_dir"),
        ("reader_device", "cuda:1", "reader"),
        ("reader_memory_bytes", 8 << 30, "reader"),
    ],
)
def test_settings_without_effect_are_refused(name: str, value: object, needed: str) -> None:
    engine = EngineConfig(**{name: value})  # type: ignore[arg-type]
    assert found(engine) == [f"{name}={value}: needs {needed}"]


def test_all_problems_are_told_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each start found one problem, so that six wrong settings took six starts."""
    file = tmp_path / "file"
    file.write_text("")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        flags = [
            f"--port={port}",
            "--device=cpu",
            "--max-queue=0",
            "--filter=best",
            "--model=/nowhere/model",
            "--calibrate=/nowhere/calibration.json",
            f"--cache-dir={file}/cache",
            "--adapter-dir=/nowhere/adapters",
            "--api-key-file=/nowhere/keys",
            f"--admin-key-file={file}",
            "--kv-memory=9999TiB",
        ]
        status = main(["serve", *flags])
    said = capsys.readouterr().err.splitlines()
    assert status == 2
    assert said[0] == "gemserve: 10 settings are wrong:"
    for part in (
        "--max-queue=0: must be a whole number, at least 1",
        "--filter=best: must be one of none, ",
        "/nowhere/keys: cannot be read",
        f"{file}: has no key",
        "adapter_dir=/nowhere/adapters: no such folder",
        "model=/nowhere/model: no such file or folder",
        "calibrate=/nowhere/calibration.json: must be auto, later, off, or a file that exists",
        f"cache_dir={file}/cache: cannot be written: Not a directory",
        f"kv_memory={9999 << 40}: with ",
        f"--port={port}: cannot listen there",
    ):
        assert len([line for line in said if part in line]) == 1, (part, said)
    assert len(said) == 11


def test_good_settings_have_no_problems(tmp_path: Path) -> None:
    adapters = tmp_path / "adapters"
    (adapters / "a").mkdir(parents=True)
    engine = EngineConfig(cache_dir=str(tmp_path / "new" / "cache"), kv_memory_bytes=1 << 20)
    server = ServerConfig(port=0, adapter_dir=str(adapters), adapters=(("a", "a"),))
    assert found(engine, server) == []


def test_every_adapter_that_is_missing_is_named(tmp_path: Path) -> None:
    wrong = (("a", "no"), ("b", "../out"))
    said = found(server=ServerConfig(port=0, adapter_dir=str(tmp_path), adapters=wrong))
    assert said == [
        "adapter=a=no: no such folder",
        "adapter=b=../out: must be relative to the server's adapter folder, without ..",
    ]


def test_a_cache_folder_in_use_is_found_before_the_model_is_loaded(tmp_path: Path) -> None:
    with open(tmp_path / "lock", "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        said = found(EngineConfig(cache_dir=str(tmp_path)))
    assert said == [f"cache_dir={tmp_path}: another server uses it"]
    assert found(EngineConfig(cache_dir=str(tmp_path))) == []


def test_memory_counts_the_model_s_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(600))
    model = ModelConfig(model=str(tmp_path), device="cpu")
    for total, count in ((1100, 0), (1099, 1)):
        monkeypatch.setattr(startup_checks, "total_memory", lambda total=total: total)
        assert len(found(EngineConfig(kv_memory_bytes=500), model=model)) == count
        assert found(EngineConfig(), model=model) == []  # the default is used lazily


OWN_GROUPS = "9:name=systemd:/\n4:memory:/service/inner\n1:cpu:/\n0::/user/unit\n"


@pytest.mark.parametrize(
    "file",
    [
        "memory.max",
        "user/memory.max",
        "user/unit/memory.max",
        "memory/memory.limit_in_bytes",
        "memory/service/memory.limit_in_bytes",
        "memory/service/inner/memory.limit_in_bytes",
    ],
)
def test_the_limits_of_all_control_groups_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    """Only the outermost group's was read, which a service of systemd has not."""
    (tmp_path / "own").write_text(OWN_GROUPS)
    monkeypatch.setattr(startup_checks, "_OWN_CGROUPS", tmp_path / "own")
    monkeypatch.setattr(startup_checks, "_CGROUPS", tmp_path / "groups")
    machine = startup_checks.total_memory()
    (tmp_path / "groups" / "user" / "unit").mkdir(parents=True)
    (tmp_path / "groups" / "user" / "unit" / "memory.max").write_text("max\n")
    assert startup_checks.total_memory() == machine
    path = tmp_path / "groups" / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("1000000\n")
    assert startup_checks.total_memory() == 1_000_000


def test_the_default_memory_is_what_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests took ever more pages of it, until the system ended the server."""
    (tmp_path / "model.safetensors").write_bytes(bytes(3 << 20))
    model, default = ModelConfig(model=str(tmp_path), device="cpu"), EngineConfig()
    for total, expected in (
        (default.kv_memory_bytes + (1 << 30) + (3 << 20), default.kv_memory_bytes),
        ((3 << 30) + (3 << 20), 2 << 30),
        (1 << 30, 64 << 20),
    ):
        monkeypatch.setattr(startup_checks, "total_memory", lambda total=total: total)
        fitting = startup_checks.fitting_engine(model, default)
        assert fitting.kv_memory_bytes == expected
    monkeypatch.setattr(startup_checks, "total_memory", lambda: 1 << 40)
    monkeypatch.setattr(startup_checks, "address_space", lambda: (5 << 30) + (3 << 20))
    assert startup_checks.fitting_engine(model, default).kv_memory_bytes == 3 << 30
    chosen = EngineConfig(kv_memory_bytes=500 << 20)
    fitting = startup_checks.fitting_engine(model, chosen)
    assert replace(fitting, host_memory=None) == chosen
    total, room = (5 << 30) + (3 << 20), (3 << 30) + (3 << 20)
    assert fitting.host_memory == HostMemory(total, room, is_kv_default=False)


def test_the_default_memory_leaves_room_for_a_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "small.gguf").write_bytes(bytes(5 << 20))
    model = ModelConfig(model="builtin", device="cpu")
    engine = EngineConfig(reader=str(tmp_path / "small.gguf"), reader_memory_bytes=256 << 20)
    monkeypatch.setattr(startup_checks, "total_memory", lambda: 3 << 30)
    fitting = startup_checks.fitting_engine(model, engine)
    assert fitting.kv_memory_bytes == (2 << 30) - (256 << 20) - (5 << 20)


def test_a_reader_that_is_not_there_is_named() -> None:
    problems = startup_checks.Problems()
    engine = EngineConfig(reader="/nowhere/small.gguf")
    startup_checks.check_settings(problems, ModelConfig(), engine, ServerConfig(port=0))
    with pytest.raises(ConfigError) as caught:
        problems.raise_any()
    assert caught.value.problems == ("reader=/nowhere/small.gguf: no such file or folder",)


def test_a_reader_is_not_calibrated_later() -> None:
    problems = startup_checks.Problems()
    engine = EngineConfig(reader="builtin", calibrate="later")
    startup_checks.check_settings(problems, ModelConfig(), engine, ServerConfig(port=0))
    with pytest.raises(ConfigError, match=r"^calibrate=later: not with reader=builtin"):
        problems.raise_any()


def test_a_value_that_cannot_be_read_causes_no_further_problems() -> None:
    """A default in its place would look as if it contradicted another setting."""

    @dataclass(frozen=True, kw_only=True)
    class Stay(ServerConfig):
        usual_s: int = 100
        longest_s: int = 200

        def __post_init__(self) -> None:
            problems = [*self._adapter_problems()]
            if self.usual_s > self.longest_s:
                problems.append(f"usual_s={self.usual_s}: must be at most longest_s")
            if problems:
                raise ConfigError(*problems)

    table = (
        *SERVER_OPTIONS,
        Option("--usual", "usual_s", number(1), "seconds"),
        Option("--longest", "longest_s", number(1), "seconds"),
    )
    values = {"usual_s": "soon", "longest_s": "10", "adapters": ["a=b"]}
    config, problems = read_good_options(argparse.Namespace(**values), table, Stay, {})
    assert [problem.partition(":")[0] for problem in problems] == ["--usual=soon", "adapters='a=b'"]
    assert config.adapters == ()


@pytest.mark.parametrize("phase", ["loading", "calibrating"])
def test_the_port_answers_while_the_model_loads(phase: str) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with LoadingProbe("127.0.0.1", port) as probe:
        probe.phase = phase  # type: ignore[assignment]
        for path, expected in (("/ready", phase), ("/health", phase), ("/v1/models", None)):
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10)
            with refused.value as reply:
                content = json.loads(reply.read())
                assert (reply.code, reply.headers["retry-after"]) == (503, "5")
            assert content.get("status") == expected
            assert expected or content["error"]["message"] == f"The server is {phase} its model."
        asked = urllib.request.Request(f"http://127.0.0.1:{port}/ping", method="HEAD")
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(asked, timeout=10)
        with refused.value as reply:
            assert (reply.code, reply.read()) == (503, b"")
        with pytest.raises(ConfigError, match="cannot listen there"):
            LoadingProbe("127.0.0.1", port).__enter__()
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(("127.0.0.1", port))  # it is free for the server


def test_a_client_that_leaves_prints_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with LoadingProbe("127.0.0.1", port):
        for _ in range(3):
            with socket.create_connection(("127.0.0.1", port)) as leaves:
                leaves.sendall(b"GET /ready HTTP/1.1\r\n\r\n")
                leaves.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=30)
        refused.value.close()
    assert "Traceback" not in capsys.readouterr().err


def test_a_silent_client_does_not_keep_others_from_the_probe() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with LoadingProbe("127.0.0.1", port), socket.create_connection(("127.0.0.1", port)):
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=30)
        refused.value.close()


def test_a_client_that_sends_byte_by_byte_does_not_keep_the_server_from_its_port() -> None:
    """Each byte had a second, so that the start waited for as long as they came."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def send() -> None:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port)) as slow:
            for _ in range(100):
                slow.sendall(b"G")
                time.sleep(0.1)

    sending = threading.Thread(target=send)
    with LoadingProbe("127.0.0.1", port):
        sending.start()
        time.sleep(0.5)
        began_s = time.monotonic()
    assert time.monotonic() - began_s < 5
    sending.join()


def test_calibrating_later_is_for_one_engine() -> None:
    later = EngineConfig(calibrate="later")
    assert found(later) == []
    ranks = ServerConfig(port=0, tensor_parallel=2)
    assert found(later, ranks) == ["calibrate=later: not with tensor_parallel=2"]
