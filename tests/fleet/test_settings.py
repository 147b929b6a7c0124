"""`gemserve serve --replicas`: what is refused before anything is started."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from gemserve.cli.main import main
from gemserve.cli.startup_checks import total_memory
from gemserve.config import EngineConfig, ModelConfig, ServerConfig
from gemserve.errors import ConfigError
from gemserve_fleet.replicas.cluster import check_ray_is_installed, prepare_environment
from gemserve_fleet.serve_command import problems_with_replicas


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["serve", *words]) == 2
    return capsys.readouterr().err


@pytest.mark.parametrize("count", ["0", "-1", "two", "1.5", "1000"])
def test_a_bad_number_is_named(capsys: pytest.CaptureFixture[str], count: str) -> None:
    said = refused(capsys, f"--replicas={count}")
    assert f"--replicas={count}: must be a whole number, from 1 to 64" in said


def test_options_that_make_no_sense_are_named_together(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["--replicas=2", "--port=0", "--device=cuda:1"]
    said = refused(capsys, *words, "--tensor-parallel=2", f"--cache-dir={tmp_path}")
    named = ("port=0", "device=cuda:1", "tensor_parallel=2")
    for name in (*named, f"cache_dir={tmp_path}"):
        assert f"gemserve: {name}: " in said


def test_the_environment_sets_it_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GEMSERVE_REPLICAS", "2")
    assert "port=0" in refused(capsys, "--port=0")


def test_each_replica_has_a_kv_memory(capsys: pytest.CaptureFixture[str]) -> None:
    share = total_memory() // 3
    words = ["--replicas=4", "--device=cpu", f"--kv-memory={share}", "--port=0"]
    assert f"kv_memory={share}: 4 times as much, with " in refused(capsys, *words)


def test_each_replica_may_have_a_reader() -> None:
    engine, server = EngineConfig(reader="builtin"), ServerConfig(port=8000)
    assert not list(problems_with_replicas(2, ModelConfig(), engine, server))
    engine = EngineConfig(reader="builtin", reader_device="cuda:0")
    (problem,) = problems_with_replicas(2, ModelConfig(), engine, server)
    assert problem.startswith("reader_device=cuda:0: names one GPU, and each of 2 replicas")


def test_calibrating_later_is_for_one_engine() -> None:
    later, server = EngineConfig(calibrate="later"), ServerConfig(port=8000)
    (problem,) = problems_with_replicas(2, ModelConfig(), later, server)
    assert problem.startswith("calibrate=later: one engine has it; use auto with")


def test_a_missing_ray_is_told_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec

    def find_no_ray(name: str, *more: Any) -> Any:
        return None if name == "ray" else found(name, *more)

    monkeypatch.setattr(importlib.util, "find_spec", find_no_ray)
    with pytest.raises(ConfigError, match=r"needs the package ray: pip install 'gemserve\[ray\]'"):
        check_ray_is_installed()


def test_the_operator_may_set_what_ray_reads_except_for_the_token() -> None:
    environment = {"RAY_AUTH_TOKEN": "known", "RAY_SERVE_ENABLE_HA_PROXY": "1"}
    prepare_environment(environment)
    assert environment["RAY_SERVE_ENABLE_HA_PROXY"] == "1"
    assert environment["RAY_USAGE_STATS_ENABLED"] == "0"
    assert len(environment["RAY_AUTH_TOKEN"]) == 64
