"""What can be wrong with a server's settings, found before anything large is loaded. No torch."""

from __future__ import annotations

import fcntl
import json
import os
import resource
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from gemserve.adapters.find_folder import find_folder
from gemserve.api.access.keys import KeyFile
from gemserve.config import EngineConfig, HostMemory, ModelConfig, ServerConfig
from gemserve.errors import AdapterError, ConfigError, shown

_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")
# of a CPU server besides weights and KV memory: libraries, tokenizer, bodies and replies
_PROCESS_BYTES = 1 << 30
_ADDRESS_BYTES = 2 << 30
_LEAST_KV_BYTES = 64 << 20

# far beyond any model; with more it would take hours to find that there are no weights for them
_MOST_OF_MODEL = {
    "num_hidden_layers": 10_000,
    "num_attention_heads": 100_000,
    "num_key_value_heads": 100_000,
    "num_experts": 100_000,
    "num_local_experts": 100_000,
    "hidden_size": 1_000_000,
    "intermediate_size": 10_000_000,
    "vocab_size": 100_000_000,
}


class Problems:
    """Collects all that is wrong, so that the operator need not find one thing at a time."""

    def __init__(self) -> None:
        self._found: list[str] = []

    def note(self, *problems: str) -> None:
        self._found += problems

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note a `ConfigError` of the block instead of raising it."""
        try:
            yield
        except ConfigError as error:
            self.note(*error.problems)

    def raise_any(self) -> None:
        """Raise one `ConfigError` with all problems, if there are any."""
        if self._found:
            raise ConfigError(*dict.fromkeys(self._found))


def check_settings(
    problems: Problems,
    model: ModelConfig,
    engine: EngineConfig,
    server: ServerConfig,
    num_engines: int = 1,
) -> None:
    """Note what this machine does not have: files, folders, the port, memory."""
    for file in (server.api_key_file, server.admin_key_file):
        if file is not None:
            with problems.noted():
                KeyFile(file)
    with problems.noted():
        check_adapters(server)
    with problems.noted():
        _check_model(model)
    if engine.reader is not None:
        with problems.noted():
            _check_model(ModelConfig(model=engine.reader), "reader")
    with problems.noted():
        _check_calibration(engine)
    with problems.noted():
        _check_effects(engine)
    with problems.noted():
        _check_cache_folder(engine)
    with problems.noted():
        _check_memory(model, engine, num_engines)
    with problems.noted():
        _check_ranks(model, engine, server.tensor_parallel)
    with problems.noted():
        _check_free(server)


def check_adapters(config: ServerConfig) -> None:
    """Raise `ConfigError` if the folders of adapters are missing."""
    if config.adapter_dir is None:
        return
    root = Path(config.adapter_dir)
    if not root.is_dir():
        raise ConfigError(f"adapter_dir={config.adapter_dir}: no such folder")
    found = []
    for name, path in config.adapters:
        try:
            find_folder(root, path)
        except AdapterError as error:
            found.append(f"adapter={name}={path}: {error}")
    if found:
        raise ConfigError(*found)


def total_memory() -> int:
    """Bytes of memory that this machine has, or that its container may have."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in _cgroup_limits():
        with suppress(OSError, ValueError):  # it is "max" where there is no limit
            limits.append(int(path.read_text()))
    return min(limits)


def address_space() -> int:
    """Bytes of addresses that a process may use. Libraries take more of them than of memory."""
    limits = (resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA))
    return min((soft for soft in limits if soft != resource.RLIM_INFINITY), default=sys.maxsize)


def _cgroup_limits() -> list[Path]:
    """The files with limits of memory for this process's control group and those around it.

    A container sees its own group as the outermost one; a service of systemd is some groups deep.
    In version 2 there is one tree of groups, in version 1 one for memory.
    """
    found = [_CGROUPS / "memory.max", _CGROUPS / "memory" / "memory.limit_in_bytes"]
    lines: list[str] = []
    with suppress(OSError):
        lines = _OWN_CGROUPS.read_text().splitlines()
    for line in lines:
        _, kinds, group = line.split(":", 2)
        if kinds and "memory" not in kinds.split(","):
            continue
        root, name = (_CGROUPS, "memory.max")
        if kinds:
            root, name = (_CGROUPS / "memory", "memory.limit_in_bytes")
        path = root / group.lstrip("/")
        inner = (path, *path.parents)
        found += [each / name for each in inner if each.is_relative_to(root) and each != root]
    return found


def fitting_engine(model: ModelConfig, engine: EngineConfig, num_engines: int = 1) -> EngineConfig:
    """The settings with a default of `kv_memory` that this machine has beside model and process.

    Without it requests would take ever more of the default's pages, until the system ended the
    server. Another value stays as it is. On a CPU the settings get their `host_memory`.
    """
    if _has_gpu(model):
        return engine
    default = EngineConfig().kv_memory_bytes
    is_default = engine.kv_memory_bytes == default
    share = total_memory() // num_engines
    usable = min(share - _PROCESS_BYTES, address_space() - _ADDRESS_BYTES)
    memory = HostMemory(min(share, address_space()), usable, is_kv_default=is_default)
    engine = replace(engine, host_memory=memory)
    left = usable - _weight_bytes(model, engine)
    if engine.reader is not None:
        left -= engine.reader_memory_bytes
    if not is_default or left >= default:
        return engine
    return replace(engine, kv_memory_bytes=max(_LEAST_KV_BYTES, left >> 20 << 20))


def _check_model(model: ModelConfig, field: str = "model") -> None:
    path = Path(model.model).expanduser()
    looks_like_path = model.model.startswith((".", "/", "~")) or path.suffix.lower() == ".gguf"
    if looks_like_path and not path.exists():
        raise ConfigError(f"{field}={model.model}: no such file or folder")
    _check_model_config(path / "config.json")


def _check_model_config(path: Path) -> None:
    """Refuse a checkpoint whose config would make a model that takes for ever to make.

    What is wrong with the config otherwise is told when the model is loaded.
    """
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return
    if not isinstance(config, dict):
        return
    for part in (config, config.get("text_config")):
        for name, most in _MOST_OF_MODEL.items():
            value = part.get(name) if isinstance(part, dict) else None
            if isinstance(value, int) and value > most:
                raise ConfigError(f"{path}: {name}={shown(value)}: the limit is {most}")


def _check_calibration(engine: EngineConfig) -> None:
    is_word = engine.calibrate in ("auto", "later", "off")
    if not is_word and not Path(engine.calibrate).is_file():
        raise ConfigError(
            f"calibrate={engine.calibrate}: must be auto, later, off, or a file that exists"
        )
    if engine.calibrate == "later" and engine.reader is not None:
        raise ConfigError(
            f"calibrate=later: not with reader={engine.reader}, which is calibrated before it reads"
        )


def _check_effects(engine: EngineConfig) -> None:
    """Refuse settings without effect, of a folder or a reader that there is not."""
    usual = EngineConfig()
    without = [
        f"{name}={getattr(engine, name)}: needs {needed}"
        for name, needed in (
            ("cache_disk_bytes", "cache_dir"),
            ("reader_device", "reader"),
            ("reader_memory_bytes", "reader"),
        )
        if getattr(engine, needed) is None and getattr(engine, name) != getattr(usual, name)
    ]
    if without:
        raise ConfigError(*without)


def _check_cache_folder(engine: EngineConfig) -> None:
    """Make the folder and write to it, as the server will. Some reasons show only so."""
    if engine.cache_dir is None:
        return
    given, path = f"cache_dir={engine.cache_dir}", Path(engine.cache_dir)
    if not engine.cache_memory:
        raise ConfigError(
            f"{given}: needs a cache_memory above 0, documents are written from there"
        )
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        tempfile.TemporaryFile(dir=path).close()
        with open(path / "lock", "ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ConfigError(f"{given}: another server uses it") from error
    except OSError as error:
        raise ConfigError(f"{given}: cannot be written: {error.strerror}") from error


def _check_memory(model: ModelConfig, engine: EngineConfig, num_engines: int) -> None:
    """Refuse a KV memory that cannot fit into the host's memory, where a CPU computes.

    The default is not refused but made smaller: see `fitting_engine`. On a GPU, memory is compared
    when the model is loaded.
    """
    is_default = engine.kv_memory_bytes == EngineConfig().kv_memory_bytes
    if _has_gpu(model) or is_default:
        return
    weights = _weight_bytes(model, engine)
    total = min(total_memory(), num_engines * address_space())
    if num_engines * (engine.kv_memory_bytes + weights) > total:
        times = "" if num_engines == 1 else f"{num_engines} times as much, "
        raise ConfigError(
            f"kv_memory={engine.kv_memory_bytes}: {times}with {weights} bytes of model files more "
            f"than the {total} bytes of memory that there are here; lower --kv-memory"
        )


def _has_gpu(model: ModelConfig) -> bool:
    """Is the KV memory on a GPU?"""
    is_any = any(Path("/dev").glob("nvidia[0-9]*"))
    return model.device.startswith("cuda") or (model.device == "auto" and is_any)


def _weight_bytes(model: ModelConfig, engine: EngineConfig) -> int:
    """Bytes of the model's weights on disk, and of the reader's."""
    paths = [model.model] if engine.reader is None else [model.model, engine.reader]
    return sum(_file_bytes(Path(path).expanduser()) for path in paths)


def _file_bytes(path: Path) -> int:
    """Bytes of a model's weights on disk. They may take more in memory. 0: it is no path."""
    files = [path] if path.is_file() else path.glob("*.safetensors") if path.is_dir() else []
    return sum(file.stat().st_size for file in files)


def _check_ranks(model: ModelConfig, engine: EngineConfig, num_ranks: int) -> None:
    """Refuse settings for whole weights, and for steps of one process."""
    if num_ranks == 1:
        return
    wrong = {
        "offload_layers": engine.offload_layers != 0,
        "filter_precision": engine.filter_precision != "model",
        "cuda_graphs": engine.cuda_graphs == "on",
        "cpu_step": engine.cpu_step == "on",
        "prompt_lookup": engine.prompt_lookup == "on",
        "cache_dir": engine.cache_dir is not None,
        "calibrate": engine.calibrate == "later",
    }
    found = [
        f"{name}={getattr(engine, name)}: not with tensor_parallel={num_ranks}"
        for name, is_wrong in wrong.items()
        if is_wrong
    ]
    if model.device not in ("auto", "cpu", "cuda"):
        found.append(f"device={model.device}: with ranks must be auto, cpu or cuda")
    if model.model.endswith(".gguf"):
        found.append(f"model={model.model}: GGUF files not with tensor_parallel={num_ranks}")
    if found:
        raise ConfigError(*found)


def _check_free(server: ServerConfig) -> None:
    family = socket.AF_INET6 if ":" in server.host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((server.host, server.port))
        except (OSError, OverflowError) as error:  # the latter for a port that cannot be
            raise ConfigError(
                f"--host={server.host} --port={server.port}: cannot listen there: {error}"
            ) from error
