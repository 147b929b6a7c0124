"""Flags and `GEMSERVE_…` variables of the commands, from one table."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gemserve.config import ATTENTION_BACKENDS, EngineConfig, ModelConfig, ServerConfig
from gemserve.errors import ConfigError, RequestError
from gemserve.types import FILTER_METHODS, Keep, parse_keep


@dataclass(frozen=True, slots=True)
class Option:
    """One setting: its flag, the config field it fills, and how its text is read."""

    flag: str
    field: str
    read: Callable[[str], Any]
    help: str
    unset: str = "auto"  # what the help calls a default of nothing
    repeats: bool = False  # given several times, the texts are joined by commas

    @property
    def variable(self) -> str:
        return "GEMSERVE_" + self.flag.removeprefix("--").replace("-", "_").upper()


def _choice(*allowed: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in allowed:
            raise ValueError(f"must be one of {', '.join(allowed)}")
        return text

    return read


class BadNumber(ValueError, argparse.ArgumentTypeError):
    """Says what a number must be, to argparse too."""


def number(low: float, high: float = float("inf"), kind: type = int) -> Callable[[str], Any]:
    """A reader of finite numbers from `low` to `high`."""

    def read(text: str) -> Any:
        limits = f"at least {low:g}" if high == float("inf") else f"from {low:g} to {high:g}"
        wanted = f"must be a {'whole number' if kind is int else 'number'}, {limits}"
        try:
            value = kind(text)
        except ValueError:
            raise BadNumber(wanted) from None
        if not low <= value <= high or value == float("inf"):
            raise BadNumber(wanted)
        return value

    return read


def _layer(text: str) -> int | None:
    return None if text == "auto" else int(number(0)(text))


def _offload(text: str) -> int | str:
    return text if text == "auto" else int(number(0)(text))


def make_folder(name: str, path: Path) -> None:
    """Before there is anything to lose. Raises `ConfigError` naming the option."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{name}={path}: cannot be a folder ({error.strerror})") from error


def read_value(name: str, text: str, read: Callable[[str], Any]) -> Any:
    """An option that is in no table. Raises `ConfigError` naming it, what was given and why not."""
    try:
        return read(text)
    except ValueError as error:
        raise ConfigError(f"{name}={text}: {error}") from error


def read_keep(text: str) -> Keep:
    """A `keep` from the command line: "512", "0.05" or "auto"."""
    try:
        return parse_keep(text if text == "auto" else float(text))
    except RequestError as error:
        raise ValueError(str(error).partition(": ")[2]) from error


def read_bytes(text: str) -> int:
    """A size such as "4GiB", "512MiB", "8GB" or a plain number of bytes."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(|[KMGT]i?B)", text.strip())
    if match is None:
        raise ValueError("must be a size such as 4GiB, 512MiB or 8GB")
    amount, unit = match.groups()
    base = 1024 if "i" in unit else 1000
    size = int(float(amount) * base ** ("KMGT".index(unit[0]) + 1 if unit else 0))
    if size < 1:
        raise ValueError("must be at least 1 byte")
    return size


_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[a-z0-9._:\[\]-]+")


def _origins(text: str) -> tuple[str, ...]:
    origins = tuple(origin.strip() for origin in text.split(","))
    if origins != ("*",) and not all(map(_ORIGIN.fullmatch, origins)):
        raise ValueError("must be * alone, or origins such as https://example.org, without a path")
    return origins


def _adapters(text: str) -> tuple[tuple[str, str], ...]:
    given = [part.strip().partition("=") for part in text.split(",")]
    if not all(name and equals and path for name, equals, path in given):
        raise ValueError("must be NAME=PATH")
    return tuple((name, path) for name, _, path in given)


def _switch(text: str) -> bool:
    if text not in ("0", "1", "true", "false"):
        raise ValueError("must be true or false")
    return text in ("1", "true")


MODEL_OPTIONS: tuple[Option, ...] = (
    Option("--model", "model", str, "builtin, smollm2, a GGUF file, a directory, or a hub id"),
    Option("--device", "device", str, "auto, cpu, cuda or cuda:N"),
    Option(
        "--dtype",
        "dtype",
        _choice("auto", "float32", "bfloat16", "float16"),
        "auto: the checkpoint's own; on a CPU without AMX float32",
    ),
    Option("--revision", "revision", str, "revision of a hub id"),
    Option(
        "--trust-remote-code",
        "trust_remote_code",
        _switch,
        "true runs code that comes with the model; false by default",
    ),
    Option(
        "--attention-backend",
        "attention_backend",
        _choice(*ATTENTION_BACKENDS),
        f"one of {', '.join(ATTENTION_BACKENDS)}",
    ),
)
ENGINE_OPTIONS: tuple[Option, ...] = (
    Option("--filter", "filter_method", _choice(*FILTER_METHODS), "default filter method"),
    Option("--filter-layer", "filter_layer", _layer, "0-based filter layer, or auto"),
    Option(
        "--filter-keep",
        "filter_keep",
        read_keep,
        "tokens to keep, a fraction in (0, 1), or auto",
        "1024, or auto where the filter layer is a guess",
    ),
    Option(
        "--calibrate",
        "calibrate",
        str,
        "auto: use the calibration of the model's weights, and make one if there is none; "
        "off: guess the filter layer; or a calibration file",
    ),
    Option("--filter-min-tokens", "filter_min_tokens", number(0), "longest prompt read whole"),
    Option(
        "--filter-on-error",
        "filter_on_error",
        _choice("reject", "full"),
        "if a filter fails: reject ends the request, full reads the whole prompt",
    ),
    Option("--kv-memory", "kv_memory_bytes", read_bytes, "memory for all keys and values"),
    Option("--min-chunk-tokens", "min_chunk_tokens", number(1), "smallest chunk of a prompt"),
    Option("--max-chunk-tokens", "max_chunk_tokens", number(1), "largest chunk of a prompt"),
    Option("--max-running", "max_running", number(1), "requests in progress at once"),
    Option(
        "--step-target",
        "step_target_s",
        number(0.001, 60, float),
        "seconds that a step of reading prompts should last",
    ),
    Option("--max-queue", "max_queue", number(1), "requests that may wait"),
    Option("--max-prompt-tokens", "max_prompt_tokens", number(1), "longest prompt accepted"),
    Option(
        "--filter-precision",
        "filter_precision",
        _choice("model", "fp8"),
        "precision of the filter pass's matrix products; fp8 needs compute capability 9.0",
    ),
    Option(
        "--offload-layers",
        "offload_layers",
        _offload,
        "number of upper layers held in the host's memory; auto: all above the filter layer",
    ),
    Option(
        "--cuda-graphs",
        "cuda_graphs",
        _choice("auto", "on", "off"),
        "record and replay decode steps; auto: on CUDA, if the model allows it",
    ),
)
# What commands that run requests one at a time take of these.
MEMORY_OPTIONS = tuple(option for option in ENGINE_OPTIONS if option.flag == "--kv-memory")
# What decides where weights are.
WEIGHT_OPTIONS = tuple(
    option for option in ENGINE_OPTIONS if option.flag in ("--filter-precision", "--offload-layers")
)
SERVER_OPTIONS: tuple[Option, ...] = (
    Option("--host", "host", str, "address to listen on"),
    Option("--port", "port", number(0, 65535), "port to listen on"),
    Option("--served-model-name", "served_model_name", str, "model name; auto: that of --model"),
    Option("--keep-alive", "keep_alive_s", number(0.01, 3600, float), "seconds of silence allowed"),
    Option("--max-body-bytes", "max_body_bytes", number(1), "largest request body accepted"),
    Option("--api-key-file", "api_key_file", str, "file of keys; clients need one", "none"),
    Option("--admin-key-file", "admin_key_file", str, "file of administrators' keys", "none"),
    Option(
        "--requests-per-minute",
        "requests_per_minute",
        number(1, 1_000_000),
        "requests that one key may send in a minute",
        "no limit",
    ),
    Option(
        "--concurrency-per-key",
        "concurrency_per_key",
        number(1),
        "requests of one key that may run at once",
        "no limit",
    ),
    Option(
        "--cors-origin",
        "cors_origins",
        _origins,
        "web origin whose pages may call the server, or * for all; commas separate several",
        "none",
        repeats=True,
    ),
    Option("--adapter-dir", "adapter_dir", str, "folder that adapters may be loaded from", "none"),
    Option("--adapter-memory", "adapter_memory_bytes", read_bytes, "memory of loaded adapters"),
    Option(
        "--adapter",
        "adapters",
        _adapters,
        "NAME=PATH, loaded at start; PATH is relative to the adapter folder; several by commas",
        "none",
        repeats=True,
    ),
)


_TABLE_FIELDS = frozenset(o.field for o in (*MODEL_OPTIONS, *ENGINE_OPTIONS, *SERVER_OPTIONS))


def add_options(parser: argparse.ArgumentParser, *tables: tuple[Option, ...]) -> None:
    defaults = {**vars_of(ModelConfig()), **vars_of(EngineConfig()), **vars_of(ServerConfig())}
    for option in (o for table in tables for o in table):
        default = defaults[option.field]
        shown = option.unset if default in (None, ()) else default
        parser.add_argument(
            option.flag,
            action="append" if option.repeats else "store",
            dest=option.field,
            metavar=option.flag.removeprefix("--").upper().replace("-", "_"),
            help=f"{option.help} (default: {shown}; {option.variable})",
        )


def refuse_unknown_variables(environment: Mapping[str, str] = os.environ) -> None:
    """Raise `ConfigError` for a `GEMSERVE_…` variable that no setting of the server reads."""
    tables = (*MODEL_OPTIONS, *ENGINE_OPTIONS, *SERVER_OPTIONS)
    known = {option.variable for option in tables}
    # The client's, which a shell may hold too. Not its GEMSERVE_API_KEY: whoever gives that to a
    # server expects to be asked for it.
    known.add("GEMSERVE_URL")
    if "GEMSERVE_API_KEY" in environment:
        raise ConfigError(
            "GEMSERVE_API_KEY: this is the client's; a server's keys are in --api-key-file"
        )
    for name in environment:
        if name.startswith("GEMSERVE_") and name not in known:
            raise ConfigError(f"{name}: no such setting; `gemserve serve --help` lists them all")


def apply_environment(
    parser: argparse.ArgumentParser, environment: Mapping[str, str] = os.environ
) -> None:
    """Let `GEMSERVE_…` set the flags of a command that are in no table."""
    for action in parser._actions:
        flags = [o for o in action.option_strings if o.startswith("--") and o != "--help"]
        name = "GEMSERVE_" + flags[0].removeprefix("--").replace("-", "_").upper() if flags else ""
        if name not in environment or action.dest in _TABLE_FIELDS:
            continue
        text = environment[name]
        is_switch = action.nargs == 0
        action.default = _switch(text) if is_switch else text


def vars_of(config: Any) -> dict[str, Any]:
    return {name: getattr(config, name) for name in config.__dataclass_fields__}


def read_options(
    arguments: argparse.Namespace,
    table: tuple[Option, ...],
    config_type: Callable[..., Any],
    environment: Mapping[str, str] = os.environ,
) -> Any:
    """Build a config from flags, then the environment, then its own defaults."""
    values: dict[str, Any] = {}
    for option in table:
        text, name = getattr(arguments, option.field, None), option.flag
        if option.repeats and text is not None:
            text = ",".join(text)
        if text is None:
            text, name = environment.get(option.variable), option.variable
        if text is None:
            continue
        try:
            values[option.field] = option.read(text)
        except ValueError as error:
            raise ConfigError(f"{name}={text}: {error}") from error
    return config_type(**values)
