"""The options of all commands: flags and `GEMSERVE_…` variables, from three tables.

First come the readers of values, then the tables, then what makes a parser and a config of them.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from gemserve.config import ATTENTION_BACKENDS, EngineConfig, ModelConfig, ServerConfig
from gemserve.contract.filter_options import Keep, SegmentSize, parse_keep, parse_segment_size
from gemserve.errors import ConfigError, RequestError

# Readers take a text and raise `ValueError` if it is invalid.


def choice(*allowed: str) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in allowed:
            raise ValueError(f"must be one of {', '.join(allowed)}")
        return text

    return read


class BadNumber(ValueError, argparse.ArgumentTypeError):
    """Says what a number must be. argparse shows the message, too."""


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


def read_layer(text: str) -> int | None:
    return None if text == "auto" else int(number(0)(text))


def read_method(text: str) -> str:
    """A filter method that requests may name. The table of methods takes torch along."""
    from gemserve.filtering.methods import SERVED_METHODS

    return choice(*SERVED_METHODS)(text)


def read_offload(text: str) -> int | str:
    return text if text == "auto" else int(number(0)(text))


def make_folder(name: str, path: Path) -> None:
    """Make a folder before the work begins. Raises `ConfigError` naming the option."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{name}={path}: cannot be a folder ({error.strerror})") from error


def read_value(name: str, text: str, read: Callable[[str], Any]) -> Any:
    """Read an option that is in no table. Raises `ConfigError` naming option, value and reason."""
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


def read_segment_size(text: str) -> SegmentSize:
    """A `window` from the command line: "1024", "auto" or "off"."""
    try:
        return parse_segment_size(int(text) if text.isdecimal() else text)
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


def read_lengths(text: str) -> list[int]:
    """Prompt lengths such as "1024,4096". Raises `ConfigError`."""
    lengths = [read_value("lengths", part, int) for part in text.split(",")]
    for length in lengths:
        if length < 128:
            raise ConfigError(f"lengths={length}: must be at least 128")
    if len(set(lengths)) < len(lengths):
        raise ConfigError(f"lengths={text}: one of them stands there twice")
    return lengths


def read_origins(text: str) -> tuple[str, ...]:
    origins = tuple(origin.strip() for origin in text.split(","))
    if origins != ("*",) and not all(map(_ORIGIN.fullmatch, origins)):
        raise ValueError("must be * alone, or origins such as https://example.org, without a path")
    return origins


_HOST = re.compile(r"\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+")


def read_hosts(text: str) -> tuple[str, ...]:
    hosts = tuple(host.strip() for host in text.split(","))
    if hosts != ("*",) and not all(map(_HOST.fullmatch, hosts)):
        raise ValueError("must be * alone, or names such as gem.example.org, without a port")
    return hosts


def read_adapters(text: str) -> tuple[tuple[str, str], ...]:
    given = [part.strip().partition("=") for part in text.split(",")]
    if not all(name and equals and path for name, equals, path in given):
        raise ValueError("must be NAME=PATH")
    return tuple((name, path) for name, _, path in given)


def read_switch(text: str) -> bool:
    if text not in ("0", "1", "true", "false"):
        raise ValueError("must be true or false")
    return text in ("1", "true")


@dataclass(frozen=True, slots=True)
class Option:
    """One setting: its flag, the config field it fills, and how its text is read."""

    flag: str
    field: str
    read: Callable[[str], Any]
    help: str
    unset: str = "auto"  # what the help shows as default if there is none
    repeats: bool = False  # if the flag is given several times, commas join the texts

    @property
    def variable(self) -> str:
        return "GEMSERVE_" + self.flag.removeprefix("--").replace("-", "_").upper()


MODEL_OPTIONS: tuple[Option, ...] = (
    Option("--model", "model", str, "builtin, smollm2, a GGUF file, a directory, or a hub id"),
    Option("--device", "device", str, "auto, cpu, cuda or cuda:N"),
    Option(
        "--dtype",
        "dtype",
        choice("auto", "float32", "bfloat16", "float16"),
        "auto: the checkpoint's own; float32 on a CPU that is slower in bfloat16",
    ),
    Option("--revision", "revision", str, "revision of a hub id"),
    Option(
        "--trust-remote-code",
        "trust_remote_code",
        read_switch,
        "true runs code that comes with the model; false by default",
    ),
    Option(
        "--attention-backend",
        "attention_backend",
        choice(*ATTENTION_BACKENDS),
        f"one of {', '.join(ATTENTION_BACKENDS)}",
    ),
    Option(
        "--chat-template",
        "chat_template",
        str,
        "a file of Jinja, chatml, plain, one of several that the model has, or none",
        "the model's own",
    ),
    Option(
        "--weights",
        "weights",
        choice("auto", "dense"),
        "auto: blocks of a GGUF file stay as they are on a CPU; dense: all are dequantised",
    ),
    Option(
        "--quantise",
        "quantise",
        choice("off", "int8", "int4"),
        "quantise the matrices of an ordinary checkpoint when it is loaded, on a CPU",
    ),
)
ENGINE_OPTIONS: tuple[Option, ...] = (
    Option("--filter", "filter_method", read_method, "default filter method"),
    Option("--filter-layer", "filter_layer", read_layer, "0-based layer that chooses, or auto"),
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
        "auto: use the calibration of the model's weights, and make one first if there is none; "
        "later: make it while there are no requests, and read prompts whole until then; "
        "off: guess the filter layer; or a calibration file",
    ),
    Option(
        "--filter-window",
        "filter_window",
        read_segment_size,
        "most tokens of a window in which documents are read; auto: the calibration's; off: "
        "prompts are read as one sequence",
    ),
    Option("--filter-min-tokens", "filter_min_tokens", number(0), "longest prompt read whole"),
    Option(
        "--filter-on-error",
        "filter_on_error",
        choice("reject", "full"),
        "if a filter fails: reject ends the request, full reads the whole prompt",
    ),
    Option("--kv-memory", "kv_memory_bytes", read_bytes, "memory for all keys and values"),
    Option(
        "--cache-memory",
        "cache_memory",
        number(0, 1, float),
        "share of the KV memory in which documents stay for further questions; 0: none",
    ),
    Option("--cache-dir", "cache_dir", str, "folder where documents are kept on disk", "none"),
    Option("--cache-disk", "cache_disk_bytes", read_bytes, "most bytes of documents on disk"),
    Option("--max-chunk-tokens", "max_chunk_tokens", number(1), "largest chunk of a prompt"),
    Option("--max-running", "max_running", number(1), "requests in progress at once"),
    Option("--max-queue", "max_queue", number(1), "requests that may wait"),
    Option("--max-prompt-tokens", "max_prompt_tokens", number(1), "longest prompt accepted"),
    Option(
        "--filter-precision",
        "filter_precision",
        choice("model", "fp8"),
        "precision of the filter pass's matrix products; fp8 needs compute capability 9.0",
    ),
    Option(
        "--offload-layers",
        "offload_layers",
        read_offload,
        "number of upper layers held in the host's memory; auto: all above the filter layer",
    ),
    Option(
        "--cuda-graphs",
        "cuda_graphs",
        choice("auto", "on", "off"),
        "record and replay decode steps; auto: on CUDA, if the model allows it",
    ),
    Option(
        "--cpu-step",
        "cpu_step",
        choice("auto", "on", "off"),
        "compute a decode step on a CPU in one call of C++, compiled at the first start; auto: if "
        "a compiler is installed and the model allows it",
    ),
    Option(
        "--prompt-lookup",
        "prompt_lookup",
        choice("auto", "on", "off"),
        "try tokens that follow the same words elsewhere in the text, several in one decode step; "
        "auto: if the step is compiled, for as long as it pays",
    ),
    Option(
        "--reader",
        "reader",
        str,
        "another model, such as a smaller one of the same family, that looks at prompts and "
        "chooses what --model answers from",
        "none, the model reads for itself",
    ),
    Option("--reader-device", "reader_device", str, "the reader's device: as --device"),
    Option(
        "--reader-memory",
        "reader_memory_bytes",
        read_bytes,
        "memory for the reader's keys and values",
    ),
)
# The settings for commands that run one request at a time.
MEMORY_OPTIONS = tuple(option for option in ENGINE_OPTIONS if option.flag == "--kv-memory")
# The settings that decide where weights are.
WEIGHT_OPTIONS = tuple(
    option for option in ENGINE_OPTIONS if option.flag in ("--filter-precision", "--offload-layers")
)
# The settings of a model that reads for another one, as far as costs depend on them.
READER_OPTIONS = tuple(
    option for option in ENGINE_OPTIONS if option.flag in ("--reader", "--reader-memory")
)
SERVER_OPTIONS: tuple[Option, ...] = (
    Option("--host", "host", str, "address to listen on"),
    Option("--port", "port", number(0, 65535), "port to listen on"),
    Option(
        "--served-model-name",
        "served_model_name",
        str,
        "the name that clients use; auto: the file's or folder's own, or that of --model",
    ),
    Option("--keep-alive", "keep_alive_s", number(0.01, 3600, float), "seconds of silence allowed"),
    Option(
        "--max-wait",
        "max_wait_s",
        number(0.1, 3600, float),
        "refuse requests that would probably wait longer for their first token, in seconds",
        "no limit",
    ),
    Option("--max-body-bytes", "max_body_bytes", number(1), "largest request body accepted"),
    Option("--max-connections", "max_connections", number(1), "connections at once"),
    Option(
        "--tensor-parallel",
        "tensor_parallel",
        number(1, 64),
        "processes (ranks) that share the model's heads, one for each GPU or share of the cores",
    ),
    Option(
        "--watchdog",
        "watchdog_s",
        number(0, 86400, float),
        "seconds without progress, although there is work, after which /health fails; 0: never",
    ),
    Option(
        "--request-timeout",
        "request_timeout_s",
        number(0.1, 604800, float),
        "seconds for a request, from its place in the queue to its end",
    ),
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
        "--tokens-per-minute",
        "tokens_per_minute",
        number(1),
        "tokens of prompts and answers that one key may use in a minute",
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
        read_origins,
        "web origin whose pages may call the server, or * for all; commas separate several",
        "none",
        repeats=True,
    ),
    Option(
        "--allowed-host",
        "allowed_hosts",
        read_hosts,
        "name by which the server may be reached, beside localhost, or * for any; commas separate "
        "several",
        "any; but none if it has no keys and listens on a loopback address",
        repeats=True,
    ),
    Option("--adapter-dir", "adapter_dir", str, "folder that adapters may be loaded from", "none"),
    Option("--adapter-memory", "adapter_memory_bytes", read_bytes, "memory of loaded adapters"),
    Option(
        "--adapter",
        "adapters",
        read_adapters,
        "NAME=PATH, loaded at start; PATH is relative to the adapter folder; several by commas",
        "none",
        repeats=True,
    ),
    Option("--max-documents", "max_documents", number(0), "documents that one key may store"),
    Option("--max-document-bytes", "max_document_bytes", read_bytes, "largest stored document"),
    Option("--library-dir", "library_dir", str, "folder of the libraries of all keys", "none"),
    Option("--max-libraries", "max_libraries", number(0), "libraries that one key may have"),
    Option("--log-format", "log_format", choice("text", "json"), "text, or a JSON object a line"),
    Option(
        "--otel",
        "otel",
        choice("auto", "on", "off"),
        "export OpenTelemetry traces; auto: if OTEL_EXPORTER_OTLP_ENDPOINT or the like is set",
    ),
)

# Flags without a variable, each of one command, and why.
_OTHER_FORM = "GEMSERVE_ADAPTER is the server's, NAME=PATH; here it is a folder"
WITHOUT_VARIABLE = {
    ("gemserve ask", "--adapter"): _OTHER_FORM,
    ("gemserve adapter eval", "--adapter"): _OTHER_FORM,
}
# Flags that may be repeated have their values in one variable, between commas, except these.
_SEPARATORS = {"--also": "\n"}  # a question may have commas


def add_options(parser: argparse.ArgumentParser, *tables: tuple[Option, ...]) -> None:
    defaults = {**vars_of(ModelConfig()), **vars_of(EngineConfig()), **vars_of(ServerConfig())}
    for option in (o for table in tables for o in table):
        default = defaults[option.field]
        shown = option.unset if default in (None, ()) else default
        parser.add_argument(
            option.flag,
            action="append" if option.repeats else "store",
            dest=option.field,
            default=argparse.SUPPRESS,  # then `read_options` looks for the variable
            metavar=option.flag.removeprefix("--").upper().replace("-", "_"),
            help=f"{option.help} (default: {shown}; {option.variable})",
        )


def refuse_unknown_variables(environment: Mapping[str, str] = os.environ) -> None:
    """Raise `ConfigError` for a `GEMSERVE_…` variable that no setting of the server reads."""
    tables = (*MODEL_OPTIONS, *ENGINE_OPTIONS, *SERVER_OPTIONS)
    known = {option.variable for option in tables}
    # A shell may also hold the client's variables. GEMSERVE_API_KEY is refused, because whoever
    # gives it to a server expects that clients need it.
    known |= {"GEMSERVE_URL", "GEMSERVE_REPLICAS"}
    if "GEMSERVE_API_KEY" in environment:
        raise ConfigError(
            "GEMSERVE_API_KEY: this is the client's; a server's keys are in --api-key-file"
        )
    unknown = [name for name in environment if name.startswith("GEMSERVE_") and name not in known]
    if unknown:
        raise ConfigError(
            *(
                f"{name}: no such setting; `gemserve serve --help` lists them all"
                for name in unknown
            )
        )


def variable_of(parser: argparse.ArgumentParser, action: argparse.Action) -> str | None:
    """The variable that sets a flag of a command. None for words, and for what is no setting."""
    flag = action.option_strings[-1] if action.option_strings else ""
    is_setting = not isinstance(action, argparse._HelpAction | argparse._VersionAction)
    if not flag or not is_setting or (parser.prog, flag) in WITHOUT_VARIABLE:
        return None
    return "GEMSERVE_" + flag.removeprefix("--").replace("-", "_").upper()


def _set_flags(
    parser: argparse.ArgumentParser, environment: Mapping[str, str]
) -> list[tuple[argparse.Action, str]]:
    """The flags of a command that variables set, without those that `read_options` reads."""
    named = ((action, variable_of(parser, action)) for action in parser._actions)
    return [
        (action, name)
        for action, name in named
        if name is not None and name in environment and action.default is not argparse.SUPPRESS
    ]


def require_no_set_flags(
    parser: argparse.ArgumentParser, environment: Mapping[str, str] = os.environ
) -> None:
    """Let a variable do where a flag is required."""
    for action, _ in _set_flags(parser, environment):
        action.required = False


def apply_environment(
    parsed: argparse.Namespace, words: Sequence[str], environment: Mapping[str, str] = os.environ
) -> None:
    """Set the flags that are in no table, and not among the words, from `GEMSERVE_…` variables.

    `parsed.from_variables`: the destinations that were set. Raises one `ConfigError` for all values
    that are wrong.
    """
    parser: argparse.ArgumentParser = parsed.parser
    given = {word.partition("=")[0] for word in takewhile("--".__ne__, words)}
    parsed.from_variables, problems = set(), []
    for action, name in _set_flags(parser, environment):
        if given.isdisjoint(action.option_strings):
            try:
                setattr(parsed, action.dest, _read_variable(parser, action, environment[name]))
                parsed.from_variables.add(action.dest)
            except (ValueError, argparse.ArgumentError) as error:
                said = error.message if isinstance(error, argparse.ArgumentError) else error
                problems.append(f"{name}={environment[name]}: {said}")
    if problems:
        raise ConfigError(*problems)


def _read_variable(parser: argparse.ArgumentParser, action: argparse.Action, text: str) -> Any:
    if action.nargs == 0:
        return read_switch(text)
    if isinstance(action, argparse._AppendAction):
        parts = text.split(_SEPARATORS.get(action.option_strings[-1], ","))
        return [parser._get_values(action, [part.strip()]) for part in parts]
    return parser._get_values(action, [text])


def vars_of(config: Any) -> dict[str, Any]:
    return {name: getattr(config, name) for name in config.__dataclass_fields__}


def read_options(
    arguments: argparse.Namespace,
    table: tuple[Option, ...],
    config_type: Callable[..., Any],
    environment: Mapping[str, str] = os.environ,
) -> Any:
    """Build a config from flags, then the environment, then its own defaults.

    Raises one `ConfigError` for all values that are wrong.
    """
    config, problems = read_good_options(arguments, table, config_type, environment)
    if problems:
        raise ConfigError(*problems)
    return config


def read_good_options(
    arguments: argparse.Namespace,
    table: tuple[Option, ...],
    config_type: Callable[..., Any],
    environment: Mapping[str, str] = os.environ,
) -> tuple[Any, list[str]]:
    """A config without the values that are wrong, and what is wrong with them."""
    values: dict[str, Any] = {}
    problems: list[str] = []
    unreadable: set[str] = set()
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
            problems.append(f"{name}={text}: {error}")
            unreadable.add(option.field)
    while True:
        try:
            return config_type(**values), problems
        except ConfigError as error:
            for problem in error.problems:
                named = {field for field in values if re.search(rf"\b{field}\b", problem)}
                if not any(re.search(rf"\b{field}\b", problem) for field in unreadable):
                    problems.append(problem)
                for field in named or set(values):
                    del values[field]
