"""A model's checks are not repeated at each start, unless anything has changed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from gemserve.calibration.files import find_calibration
from gemserve.config import ModelConfig
from gemserve.errors import ModelError
from gemserve.model.loading import loader, remembered_checks
from gemserve.model.loading.remembered_checks import check_once
from gemserve_kernels import native_library
from gemserve_kernels.cpu_step import SOURCE
from tests import models


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "gemserve" / "checked"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"weights")
    return path


class Check:
    """Counts how often it was called."""

    def __init__(self, error: Exception | None = None) -> None:
        self.count, self._error = 0, error

    def __call__(self) -> None:
        self.count += 1
        if self._error is not None:
            raise self._error


def test_what_has_passed_is_not_checked_again(cache: Path, file: Path) -> None:
    check = Check()
    for _ in range(3):
        check_once(check, str(file), ("bfloat16",))
    assert check.count == 1


def test_what_has_failed_is_checked_again(cache: Path, file: Path) -> None:
    check = Check(ModelError("damaged"))
    for _ in range(2):
        with pytest.raises(ModelError, match="damaged"):
            check_once(check, str(file), ())
    assert check.count == 2


def test_other_settings_and_other_bytes_are_checked(cache: Path, file: Path) -> None:
    check = Check()
    check_once(check, str(file), ("bfloat16",))
    check_once(check, str(file), ("float32",))
    assert check.count == 2
    file.write_bytes(b"other weights")
    check_once(check, str(file), ("float32",))
    assert check.count == 3
    status = file.stat()
    file.write_bytes(b"equal lengths")
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    check_once(check, str(file), ("float32",))
    assert check.count == 4


def test_another_processor_is_checked(
    cache: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A home folder may be shared by several machines."""
    check = Check()
    check_once(check, str(file), ())
    monkeypatch.setattr(remembered_checks, "_processor", lambda: ["another"])
    check_once(check, str(file), ())
    assert check.count == 2


def test_what_others_could_have_written_does_not_count(cache: Path, file: Path) -> None:
    check = Check()
    check_once(check, str(file), ())
    cache.chmod(0o777)
    check_once(check, str(file), ())
    assert check.count == 2


def test_a_cache_that_cannot_be_written_costs_time_only(
    tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "blocked").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "blocked"))
    check = Check()
    for _ in range(2):
        check_once(check, str(file), ())
    assert check.count == 2


def test_a_cache_that_may_not_be_looked_into_costs_time_only(
    tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The start of a server ended there."""
    base = tmp_path / "closed"
    monkeypatch.setenv("XDG_CACHE_HOME", str(base))
    stat = Path.stat

    def refuse(path: Path, **options: Any) -> os.stat_result:
        if path.is_relative_to(base):
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, **options)

    monkeypatch.setattr(Path, "stat", refuse)
    check = Check()
    check_once(check, str(file), ())
    assert check.count == 1
    assert find_calibration("nowhere", model="nobody", weights="none") is None
    monkeypatch.setenv("CXX", "sh")  # any program: it is not run
    native_library.forget_libraries()
    with pytest.raises(native_library.CannotCompile, match=r"denied: .*/closed/gemserve/compiled"):
        native_library.open_library(SOURCE)
    native_library.forget_libraries()


def test_a_user_without_a_home_has_no_cache(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as one of a container's that is only a number."""
    for name in ("XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name)
    monkeypatch.setattr("os.getuid", lambda: 4_000_000)
    check = Check()
    check_once(check, str(file), ())
    assert check.count == 1
    assert find_calibration("nowhere", model="nobody", weights="none") is None


def test_names_that_are_no_path_are_always_checked(cache: Path) -> None:
    check = Check()
    for _ in range(2):
        check_once(check, "somebody/model", ())
    assert check.count == 2


def test_the_oldest_are_forgotten(cache: Path, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remembered_checks, "_MOST_REMEMBERED", 3)
    for number in range(6):
        check_once(Check(), str(file), number)
    assert len(list(cache.iterdir())) == 3


def test_a_model_loads_without_its_checks(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link to nowhere, such as to a file that was not fetched, once ended the start."""
    folder = models.save("llama", tmp_path / "model")
    (folder / "pytorch_model.bin").symlink_to("/nonexistent")
    check = Check()
    monkeypatch.setattr(loader, "check_servable", lambda model: check())
    for _ in range(2):
        loader.load(ModelConfig(model=str(folder)))
    assert check.count == 1
    weights = folder / "model.safetensors"
    os.utime(weights, ns=(0, 0))
    loader.load(ModelConfig(model=str(folder)))
    assert check.count == 2
