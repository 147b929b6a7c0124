"""The settings of all commands: each one's flag, config field, reader and help text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gemserve.cli.option_readers import (
    choice,
    number,
    read_adapters,
    read_bytes,
    read_hosts,
    read_keep,
    read_layer,
    read_method,
    read_offload,
    read_origins,
    read_switch,
)
from gemserve.config import ATTENTION_BACKENDS


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
        "auto: the checkpoint's own; on a CPU without AMX float32",
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
        "auto: use the calibration of the model's weights, and make one if there is none; "
        "off: guess the filter layer; or a calibration file",
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
)
# The settings for commands that run one request at a time.
MEMORY_OPTIONS = tuple(option for option in ENGINE_OPTIONS if option.flag == "--kv-memory")
# The settings that decide where weights are.
WEIGHT_OPTIONS = tuple(
    option for option in ENGINE_OPTIONS if option.flag in ("--filter-precision", "--offload-layers")
)
SERVER_OPTIONS: tuple[Option, ...] = (
    Option("--host", "host", str, "address to listen on"),
    Option("--port", "port", number(0, 65535), "port to listen on"),
    Option("--served-model-name", "served_model_name", str, "model name; auto: that of --model"),
    Option("--keep-alive", "keep_alive_s", number(0.01, 3600, float), "seconds of silence allowed"),
    Option(
        "--max-wait",
        "max_wait_s",
        number(0.1, 3600, float),
        "refuse requests that would probably wait longer for their first token, in seconds",
        "no limit",
    ),
    Option("--max-body-bytes", "max_body_bytes", number(1), "largest request body accepted"),
    Option(
        "--body-memory",
        "body_memory_bytes",
        read_bytes,
        "memory for all request bodies that are being read",
    ),
    Option(
        "--logprobs-memory",
        "logprobs_memory_bytes",
        read_bytes,
        "memory for the log-probabilities that all requests in progress may get",
    ),
    Option("--max-connections", "max_connections", number(1), "connections at once"),
    Option(
        "--head-timeout",
        "head_timeout_s",
        number(0.1, 3600, float),
        "seconds for a request's head, and for a new connection to send one",
    ),
    Option(
        "--body-timeout",
        "body_timeout_s",
        number(0.1, 86400, float),
        "seconds for a request's body",
    ),
    Option(
        "--read-timeout",
        "read_timeout_s",
        number(0.1, 86400, float),
        "seconds in which a client must read 64 KiB of a reply, or all that is left of it",
    ),
    Option(
        "--watchdog",
        "watchdog_s",
        number(0, 86400, float),
        "seconds without progress, although there is work, after which /health fails; 0: never",
    ),
    Option(
        "--watchdog-exit",
        "watchdog_exit",
        read_switch,
        "true ends the process, too, with status 70, so that a supervisor restarts it",
    ),
    Option(
        "--request-timeout",
        "request_timeout_s",
        number(0.1, 604800, float),
        "seconds for a request, from its place in the queue to its end",
    ),
    Option(
        "--max-queued-tokens",
        "max_queued_tokens",
        number(1),
        "tokens of all prompts that wait or are being read",
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
    Option(
        "--document-memory",
        "document_memory_bytes",
        read_bytes,
        "memory of the texts of one key's documents",
    ),
    Option(
        "--max-pinned-documents",
        "max_pinned_documents",
        number(0),
        "documents of one key that the document cache does not give up",
    ),
    Option(
        "--document-ttl", "document_ttl_s", number(1), "seconds that a document stays by default"
    ),
    Option(
        "--max-document-ttl", "max_document_ttl_s", number(1), "seconds that a document may stay"
    ),
    Option("--log-format", "log_format", choice("text", "json"), "text, or a JSON object a line"),
    Option(
        "--otel",
        "otel",
        choice("auto", "on", "off"),
        "export OpenTelemetry traces; auto: if OTEL_EXPORTER_OTLP_ENDPOINT or the like is set",
    ),
)
