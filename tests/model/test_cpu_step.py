"""The compiled decode step against the layers that it stands for."""

from __future__ import annotations

import logging
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from gemserve.config import EngineConfig, ModelConfig
from gemserve.engine.build import assemble
from gemserve.errors import ConfigError
from gemserve.model.cpu.cpu_step import with_cpu_step
from gemserve.model.loading.loader import load
from gemserve.model.passes.causal_model import CausalModel
from gemserve_kernels import cpu_step, native_library
from tests import models
from tests.compiled_step import compiled_step, needs_compiler
from tests.fakes import wait_for
from tests.step_prompts import Prompts, half_model, needs_bfloat16


@pytest.fixture
def compiler() -> Iterator[None]:
    """GCC, or what CXX names: with `-mno-avx512f` the step uses shorter vectors."""
    with compiled_step():
        yield


@needs_compiler
@pytest.mark.parametrize("name", ["llama", "mistral", "mistral-window", "qwen2-window", "qwen3"])
def test_the_step_is_the_layers(name: str, compiler: None) -> None:
    """Windows, biases, norms of queries and keys, and sequences longer than one task's keys."""
    model = CausalModel(models.build(name))
    stepping = with_cpu_step(model, "on")
    prompts = Prompts(model, [1, 99, 130, 511, 1100])
    expected = prompts.decode(model)
    stored = prompts.written(0)
    actual = prompts.decode(stepping)
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
    torch.testing.assert_close(actual, expected, atol=5e-4, rtol=2e-4)
    torch.testing.assert_close(prompts.written(0), stored, atol=1e-4, rtol=1e-4)


@needs_compiler
@needs_bfloat16
def test_packed_bfloat16_weights_are_read_where_they_are(compiler: None) -> None:
    model = half_model()
    stepping = with_cpu_step(model, "on")
    prompts = Prompts(model, [3, 40, 700])
    expected = prompts.decode(model)
    error = (prompts.decode(stepping) - expected).abs().max() / expected.abs().max()
    assert float(error) < 0.03


@needs_compiler
@pytest.mark.parametrize("is_half", [False, pytest.param(True, marks=needs_bfloat16)])
def test_a_batch_gives_each_sequence_what_it_gets_alone(is_half: bool, compiler: None) -> None:
    """Bit for bit: the order of a row's sums depends on no other row."""
    model = half_model() if is_half else CausalModel(models.build("llama"))
    stepping = with_cpu_step(model, "on")
    prompts = Prompts(model, [5, 64, 17, 600, 33, 8, 120, 2, 90, 41, 7, 13, 77])
    together = prompts.decode(stepping)
    for index in range(len(prompts.lengths)):
        alone = prompts.decode(stepping, [index])
        assert torch.equal(alone[0], together[index])


@needs_compiler
@pytest.mark.parametrize("is_half", [False, pytest.param(True, marks=needs_bfloat16)])
@pytest.mark.parametrize("length", [1, 510, 512, 600])
def test_tokens_of_one_sequence_in_one_step_are_those_of_several(
    length: int, is_half: bool, compiler: None
) -> None:
    """Bit for bit: each sees those before it, also where a task's keys end."""
    model = half_model() if is_half else CausalModel(models.build("qwen2"))
    stepping = with_cpu_step(model, "on")
    tokens = [7, 8, 9, 10, 11]
    prompts = Prompts(model, [length])
    alone = []
    for token in tokens:
        alone.append(prompts.decode(stepping, [0], [token]))
        prompts.lengths = [prompts.lengths[0] + 1]
    prompts.lengths = [length]
    together = prompts.decode_ahead(stepping, 0, tokens)
    assert torch.equal(together, torch.cat(alone))


@needs_compiler
@pytest.mark.parametrize("is_half", [False, pytest.param(True, marks=needs_bfloat16)])
def test_the_number_of_threads_changes_nothing(is_half: bool, compiler: None) -> None:
    """With several threads a matrix is cut into smaller units."""
    model = half_model() if is_half else CausalModel(models.build("qwen2"))
    stepping = with_cpu_step(model, "on")
    prompts = Prompts(model, [5, 64, 600, 33, 8, 1, 120])
    before = torch.get_num_threads()
    found: list[torch.Tensor] = []
    try:
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            found.append(prompts.decode(stepping))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(found[0], other) for other in found[1:])


@needs_compiler
def test_what_one_sequence_has_not_computed_reaches_no_other(compiler: None) -> None:
    model = CausalModel(models.build("llama"))
    stepping = with_cpu_step(model, "on")
    prompts = Prompts(model, [20, 30, 40])
    expected = prompts.decode(stepping)
    prompts.kv(1).read(0, 10)[0].fill_(math.nan)
    found = prompts.decode(stepping)
    assert found[1].isnan().all()
    assert torch.equal(found[::2], expected[::2])


@needs_compiler
def test_another_tree_of_modules_has_no_step(compiler: None) -> None:
    """A LoRA's tree has other weights than those that the step reads."""
    model = CausalModel(models.build("llama"))
    other = CausalModel(models.build("llama", seed=1))
    variant = with_cpu_step(model, "on").variant(other.hf)
    prompts = Prompts(other, [20, 30])
    assert torch.equal(prompts.decode(variant), prompts.decode(other))


@needs_compiler
def test_other_models_run_through_their_layers(compiler: None) -> None:
    model = CausalModel(models.build("opt"))
    assert with_cpu_step(model, "auto") is model
    with pytest.raises(ConfigError, match="cpu_step=on: "):
        with_cpu_step(model, "on")


@needs_compiler
def test_a_model_that_computes_something_else_is_noticed(compiler: None) -> None:
    """A checkpoint's own code may be called a Llama and scale its residuals."""
    hf = models.build("llama")
    hf.model.layers[1].mlp.register_forward_hook(lambda module, given, out: out * 1.5)
    with pytest.raises(ConfigError, match="its logits differ"):
        with_cpu_step(CausalModel(hf), "on")


def test_without_a_compiler_the_server_starts_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    native_library.forget_libraries()
    loaded = load(ModelConfig(model=str(models.save("llama", tmp_path)), device="cpu"))
    with caplog.at_level(logging.INFO, logger="gemserve.model"):
        assemble(loaded, EngineConfig(calibrate="off", kv_memory_bytes=1 << 22))
    assert "the compiler no-such-compiler is not installed" in caplog.text
    with pytest.raises(ConfigError, match="cpu_step=on: the compiler no-such-compiler is not"):
        assemble(loaded, EngineConfig(calibrate="off", kv_memory_bytes=1 << 22, cpu_step="on"))


def test_a_compiler_that_fails_does_not_end_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "false")
    native_library.forget_libraries()
    model = CausalModel(models.build("llama"))
    assert with_cpu_step(model, "auto") is model
    assert not list(tmp_path.rglob("*.so"))


@pytest.fixture
def fake_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Makes this shell script the compiler; gives the folder for compiled files."""

    def make(script: str) -> Path:
        program = tmp_path / "compiler"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o700)
        monkeypatch.setenv("CXX", str(program))
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        native_library.forget_libraries()
        return tmp_path / "gemserve" / "compiled"

    return make


def test_a_compiler_that_is_killed_does_not_end_the_start(
    fake_compiler: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    """The message was empty: a process that is killed, as for want of memory, says nothing."""
    folder = fake_compiler('echo "half a library" > "$TMPDIR/part.o"; kill -9 $$')
    model = CausalModel(models.build("llama"))
    with caplog.at_level(logging.INFO, logger="gemserve.model"):
        assert with_cpu_step(model, "auto") is model
    assert "compiler was ended by signal 9" in caplog.text
    assert not list(folder.iterdir())


def test_a_compiler_that_hangs_is_ended_with_what_it_has_started(
    fake_compiler: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the program itself was killed; the compiler proper, which it starts, went on."""
    monkeypatch.setattr(native_library, "_TIMEOUT_S", 1)
    fake_compiler(f"sleep 300 & echo $! > {tmp_path}/pid; wait")
    with pytest.raises(native_library.CannotCompile, match="timed out after 1 seconds"):
        native_library.open_library(cpu_step.SOURCE)
    pid = int((tmp_path / "pid").read_text())
    wait_for(lambda: not _is_running(pid))


def test_a_compiler_ends_with_the_server(tmp_path: Path) -> None:
    """It went on to its end, with a processor to itself."""
    compiler = f"sleep 300 & echo $! > {tmp_path}/new; mv {tmp_path}/new {tmp_path}/pid; wait"
    script = (
        "import os, threading\n"
        "from gemserve_kernels.native_library import _call\n"
        f"command = ['/bin/sh', '-c', {compiler!r}]\n"
        f"threading.Thread(target=_call, args=(command, {str(tmp_path)!r}), daemon=True).start()\n"
        "input()\n"
        "os._exit(1)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE) as process:
        wait_for((tmp_path / "pid").exists, 60)
        pid = int((tmp_path / "pid").read_text())
        assert _is_running(pid)
        process.communicate(b"\n")
    wait_for(lambda: not _is_running(pid))


def _is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"  # nobody may have asked how it ended


@needs_compiler
def test_a_damaged_library_is_compiled_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiler: None
) -> None:
    """After a crash of the machine the decode steps would have been slow for ever."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = tmp_path / "one.cpp"
    source.write_text('extern "C" int one() { return 1; }')
    folder = native_library._folder()
    folder.mkdir(mode=0o700, parents=True)
    key = native_library._key(source, native_library._find_compiler(os.environ["CXX"]))
    library = folder / f"one-{key}.so"
    library.write_bytes(b"")
    library.chmod(0o700)
    assert native_library.open_library(source).one() == 1
    assert library.stat().st_size > 0


@needs_compiler
def test_processes_that_compile_at_once_have_one_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each replaces the other's file, which the other may have opened by then."""
    compiler, source = tmp_path / "slow", tmp_path / "one.cpp"
    # none ends before all have begun
    compiler.write_text(
        f"#!/bin/sh\necho >> {tmp_path}/begun\n"
        f'until [ "$(wc -l < {tmp_path}/begun)" -ge 3 ]; do sleep 0.05; done\nexec g++ "$@"\n'
    )
    compiler.chmod(0o700)
    source.write_text('extern "C" int one() { return 1; }')
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    script = (
        "import pathlib, torch\n"
        "from gemserve_kernels.native_library import open_library\n"
        f"print(open_library(pathlib.Path({str(source)!r})).one())\n"
    )
    command = [sys.executable, "-c", script]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(3)]
    assert [process.communicate(timeout=120)[0] for process in processes] == [b"1\n"] * 3
    (library,) = (tmp_path / "gemserve" / "compiled").iterdir()
    assert library.suffix == ".so"


def test_a_cache_from_which_nothing_may_be_run_is_named(
    fake_compiler: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step was compiled at each start, for most of a minute, and could not be loaded."""
    folder = fake_compiler(f"touch {tmp_path}/called")
    flags = os.statvfs(tmp_path).f_flag | os.ST_NOEXEC
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_flag=flags))
    with pytest.raises(native_library.CannotCompile, match=rf"^{folder} is on .*XDG_CACHE_HOME"):
        native_library.open_library(cpu_step.SOURCE)
    assert not (tmp_path / "called").exists()


@pytest.mark.skipif(shutil.which("clang++") is None, reason="there is no clang++")
def test_clang_compiles_the_step_or_says_why_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Not every clang has OpenMP. Then decode steps run layer by layer, as without a compiler."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "clang++")
    native_library.forget_libraries()
    model = CausalModel(models.build("llama"))
    with caplog.at_level(logging.INFO, logger="gemserve.model"):
        is_compiled = with_cpu_step(model, "auto") is not model
    assert is_compiled != ("clang++ fails: " in caplog.text)


def clang_has_openmp() -> bool:
    options = ["-fopenmp", "-include", "omp.h", "-E", "-x", "c++", os.devnull]
    clang = shutil.which("clang++")
    return (
        clang is not None and not subprocess.run([clang, *options], capture_output=True).returncode
    )


@pytest.mark.skipif(not clang_has_openmp(), reason="no clang++ with OpenMP (libomp-dev)")
@pytest.mark.parametrize(
    "source", sorted(cpu_step.SOURCE.parent.glob("*.cpp")), ids=lambda source: source.stem
)
def test_clang_compiles_all_that_gcc_does(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "clang++")
    native_library.forget_libraries()
    native_library.open_library(source)
    native_library.forget_libraries()


@needs_compiler
def test_what_killed_processes_have_left_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiler: None
) -> None:
    """Each start that was killed while it compiled left a folder for ever."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "gemserve" / "compiled"
    old, new = folder / "unfinished-old", folder / "unfinished-new"
    for each in (old, new):
        each.mkdir(parents=True)
        folder.chmod(0o700)
    os.utime(old, (0, 0))
    source = tmp_path / "two.cpp"
    source.write_text('extern "C" int two() { return 2; }')
    assert native_library.open_library(source).two() == 2
    assert not old.exists()
    assert new.exists()  # another process may be compiling there


@needs_compiler
def test_a_library_that_others_could_have_written_is_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiler: None
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = tmp_path / "empty.cpp"
    source.write_text('extern "C" int one() { return 1; }')
    assert native_library.open_library(source).one() == 1
    native_library.forget_libraries()
    (tmp_path / "gemserve" / "compiled").chmod(0o777)
    for _ in range(2):  # a second trial is none
        with pytest.raises(native_library.CannotCompile, match="another user may have written it"):
            native_library.open_library(source)


def test_a_library_is_used_again_whatever_the_user_s_mask_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiler: None
) -> None:
    """With a mask of 002, which many systems have, each library was refused for ever."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = tmp_path / "empty.cpp"
    source.write_text('extern "C" int one() { return 1; }')
    old = os.umask(0o002)
    try:
        assert native_library.open_library(source).one() == 1
    finally:
        os.umask(old)
    (made,) = tmp_path.rglob("*.so")
    written_ns = made.stat().st_mtime_ns
    native_library.forget_libraries()
    assert native_library.open_library(source).one() == 1
    assert made.stat().st_mtime_ns == written_ns
    made.chmod(0o775)  # as it was left before
    native_library.forget_libraries()
    assert native_library.open_library(source).one() == 1
    assert made.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo x >> $0.calls; exit 1", "compiler fails"),
        ("echo '__builtin_shufflevector was not declared' >&2; exit 1", "is too old, GCC 12"),
    ],
)
def test_a_compiler_that_fails_is_called_once(
    fake_compiler: Callable[[str], Path], tmp_path: Path, script: str, message: str
) -> None:
    fake_compiler(script)
    source = tmp_path / "empty.cpp"
    source.write_text('extern "C" int one() { return 1; }')
    for _ in range(3):
        with pytest.raises(native_library.CannotCompile, match=message):
            native_library.open_library(source)
    calls = tmp_path / "compiler.calls"
    assert not calls.exists() or calls.read_text() == "x\n"


@pytest.mark.parametrize(("command", "message"), [(" ", None), ("g++ '", "CXX=g")])
def test_an_empty_or_broken_cxx_does_not_end_the_start(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    compiler: None,
    command: str,
    message: str | None,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", command)
    native_library.forget_libraries()
    source = tmp_path / "empty.cpp"
    source.write_text('extern "C" int one() { return 1; }')
    if message is None:
        assert native_library.open_library(source).one() == 1
    else:
        with pytest.raises(native_library.CannotCompile, match=message):
            native_library.open_library(source)
