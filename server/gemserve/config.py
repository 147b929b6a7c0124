"""Settings, frozen and complete. Nearly all are flags and `GEMSERVE_…` variables (see `cli`).

Only Python sets `step_target_s` and `min_chunk_tokens`. No server was found that needs others: the
pace between streams follows from the measured times of steps, whatever the target is.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

from gemserve.calibration.files import Calibration
from gemserve.contract.adapters import ADAPTER_NAME
from gemserve.contract.filter_options import (
    BESIDE_SEGMENT,
    MIN_SEGMENT,
    FilterMethod,
    Keep,
    SegmentSize,
)
from gemserve.errors import ConfigError, shown

DEFAULT_METHOD: FilterMethod = "sieve"
LONGEST_PROMPT = 1 << 20  # tokens that are read in segments, unless a limit is given
DEFAULT_KEEP = 1024
# Layers from the host share two places on the device, so that fewer than three save nothing.
FEWEST_OFFLOADED = 3
Switch = Literal["auto", "on", "off"]
FilterPrecision = Literal["model", "fp8"]
WhenCached = Literal["auto", "whole", "filter"]
# The attention kernel: "auto", or a name in `gemserve_kernels.attention_backends.ATTENTION`.
ATTENTION_BACKENDS = (
    "auto",
    "native-cpu",
    "aten-cpu",
    "cudnn",
    "flash-attn",
    "flash",
    "efficient",
    "reference",
    "flash-attn-4",
)
# Filter layers from the GemFilter paper, by (layers, hidden size, vocabulary).
KNOWN_FILTER_LAYERS: dict[tuple[int, int, int], int] = {
    (32, 4096, 128256): 13,  # Llama-3.1-8B
    (40, 5120, 131072): 19,  # Mistral-Nemo-12B
    (32, 3072, 32064): 19,  # Phi-3.5-mini
}


Quantise = Literal["off", "int8", "int4"]
DtypeName = Literal["auto", "float32", "bfloat16", "float16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which model is served, and how it is loaded and run.

    `model`: "builtin", "smollm2", a GGUF file, a directory or a hub id. `dtype` auto: the
    checkpoint's own, but on a CPU float32 unless the checkpoint has bfloat16 and the CPU multiplies
    that faster (`model.bfloat16_speed`). `attention_backend`: one of `ATTENTION_BACKENDS`.
    `chat_template`: a file, a name, or "none"; None: the checkpoint's own. See
    `model.chosen_chat_template`. `weights` auto: on a CPU, blocks of a GGUF file stay as they are.
    `quantise`: see `model.quantise_linears`.
    """

    model: str = "builtin"
    device: str = "auto"
    dtype: DtypeName = "auto"
    revision: str | None = None
    trust_remote_code: bool = False
    attention_backend: str = "auto"
    chat_template: str | None = None
    weights: Literal["auto", "dense"] = "auto"
    quantise: Quantise = "off"


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Bytes of memory for an engine on a CPU: weights, KV memory and recurrent states.

    `total`: all that the machine has for it. `usable`: without what the process itself takes.
    `is_kv_default`: nobody has chosen how large the KV memory is.
    """

    total: int
    usable: int
    is_kv_default: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Defaults for requests, and limits of the engine.

    `filter_layer` None: automatic, see `choose_calibration`. `filter_keep` None: 1,024 tokens, or
    "auto" if the layer is a guess, or the calibration found that fewer are as good for its answers.
    `filter_window`: see `FilterParams.window`. `when_cached`: what happens to a prompt that the
    document cache has whole, if the request leaves it to the server. "whole": it is read whole
    where that is cheaper, and documents that are asked about repeatedly are read whole in idle
    time; "filter": it is filtered; "auto": "filter" if the calibration found that whole documents
    distract the model, else "whole". `calibrate`: "auto" uses the calibration that is found for
    the model's weights, and makes one if there is none; "later" makes it while requests are served;
    "off" uses none, anything else is a file. `filter_on_error`: a request
    whose filter pass fails gets an error, or an answer to the whole prompt.

    `kv_memory_bytes`: the pool for the keys and values of all requests. `cache_memory`: the share
    of it, from 0 to 1, that the document cache may hold as long as no request needs it.
    `cache_dir`: the folder where documents are kept on disk too, in at most `cache_disk_bytes`.
    `max_running`: requests in progress at once. `step_target_s`: target time of a step of prompt
    work; cancellations are noticed between steps. `min_chunk_tokens`, `max_chunk_tokens`: how much
    of a prompt passes the layers at once.

    `filter_precision`: that of the filter pass's matrix products. `offload_layers`: how many upper
    layers stay on the host; "auto": all above the filter layer. `cuda_graphs`: whether decode steps
    are recorded and replayed; "auto": if possible. `cpu_step`: whether a decode step on a CPU is
    one call of compiled C++; "auto": if there is a compiler, and the step has the model.
    `prompt_lookup`: whether decode steps try tokens that follow the same words elsewhere in the
    text; "auto": where the step is compiled and it pays; "on": wherever there are any.
    `host_memory`: with which recurrent states are compared; None: they are not.

    `reader`: another model, which looks at prompts for the one that answers, on `reader_device` and
    with `reader_memory_bytes` of keys and values; None: the model reads for itself.
    """

    filter_method: FilterMethod = DEFAULT_METHOD
    filter_layer: int | None = None
    filter_keep: Keep | None = None
    calibrate: str = "auto"
    filter_min_tokens: int = 2048
    filter_window: SegmentSize = "auto"
    when_cached: WhenCached = "auto"  # no flag: the calibration knows which is better
    filter_on_error: Literal["reject", "full"] = "reject"
    kv_memory_bytes: int = 4 << 30
    max_running: int = 256
    step_target_s: float = 0.25
    min_chunk_tokens: int = 128
    max_chunk_tokens: int = 2048
    max_queue: int = 128
    max_prompt_tokens: int | None = None
    cache_memory: float = 0.5
    cache_dir: str | None = None
    cache_disk_bytes: int = 16 << 30
    filter_precision: FilterPrecision = "model"
    offload_layers: int | Literal["auto"] = 0
    cuda_graphs: Switch = "auto"
    cpu_step: Switch = "auto"
    prompt_lookup: Switch = "auto"
    host_memory: HostMemory | None = None
    reader: str | None = None
    reader_device: str = "auto"
    reader_memory_bytes: int = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedEngineConfig(EngineConfig):
    """Settings without automatic values, as `resolve_engine` returns them.

    `max_pass_tokens`: of a prompt that is read as one sequence.
    """

    filter_layer: int
    filter_keep: Keep
    max_prompt_tokens: int
    max_pass_tokens: int
    offload_layers: int
    when_cached: Literal["whole", "filter"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Where and how the HTTP server listens.

    `served_model_name` None: see `served_name`. `keep_alive_s`: silence after
    which a stream gets a comment, so that proxies keep it open. `request_timeout_s`: from a
    request's place in the queue to its end. `max_wait_s`: requests that would wait longer for
    their first token are refused; None: only the queue's length counts. `watchdog_s`: after which
    an engine that makes no progress counts as stuck; 0: never.
    `tensor_parallel`: how many processes have the model together. `api_key_file` None: no key is
    needed. `requests_per_minute`, `tokens_per_minute`, `concurrency_per_key`: of each key.
    `cors_origins`: the web pages whose scripts may read replies; "*" for all. `allowed_hosts`:
    names by which the server may be reached, beside those of this machine; "*": any. Empty: any,
    unless it has no keys and only this machine can reach it. `adapter_dir` None: no adapters.
    `adapters`: loaded at start, by name; paths are relative to `adapter_dir`.

    `max_documents`: that one key has stored; without keys, all documents. `library_dir`: where
    libraries are; None: there are none. `max_libraries`: of one key. `otel`: whether traces are
    exported; "auto": if an OTEL_… variable says where to.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str | None = None
    max_body_bytes: int = 64 << 20
    max_connections: int = 1000
    request_timeout_s: float = 3600.0
    keep_alive_s: float = 10.0
    watchdog_s: float = 600.0
    tensor_parallel: int = 1
    max_wait_s: float | None = None
    api_key_file: str | None = None
    admin_key_file: str | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrency_per_key: int | None = None
    cors_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[str, ...] = ()
    adapter_dir: str | None = None
    adapter_memory_bytes: int = 1 << 30
    adapters: tuple[tuple[str, str], ...] = ()
    max_documents: int = 32
    max_document_bytes: int = 16 << 20
    library_dir: str | None = None
    max_libraries: int = 16
    log_format: Literal["text", "json"] = "text"
    otel: Switch = "auto"
    # What has no flag, because no server has needed another value.
    body_memory_bytes: int = 256 << 20  # all bodies being read: four of the largest
    body_timeout_s: float = 120.0  # for a body to come: the largest at 4 Mbit/s
    read_timeout_s: float = 60.0  # for 64 KiB of a reply to be read: slower is nobody reading
    logprobs_memory_bytes: int = 4 << 30  # of all requests: 512 bytes for each of 8 million
    reply_memory_bytes: int = 1 << 30  # of all large replies that are written or sent
    max_queued_tokens: int = 4_000_000  # of all prompts that are not read yet: minutes of work
    document_memory_bytes: int = 64 << 20  # of one key's texts: four of the largest
    max_pinned_documents: int = 4  # of one key, so that others find room in the cache
    library_disk_bytes: int = 16 << 30  # of one key

    def __post_init__(self) -> None:
        """Raise one `ConfigError` for all settings that are wrong.

        Those are adapters with bad names, and settings without effect: limits without keys,
        adapters without their folder. Each message begins with the
        field's name.
        """
        problems = []
        for name in (
            "admin_key_file",
            "requests_per_minute",
            "tokens_per_minute",
            "concurrency_per_key",
        ):
            value = getattr(self, name)
            if value is not None and self.api_key_file is None:
                problems.append(f"{name}={value}: needs api_key_file, without it no key is asked")
        problems += self._adapter_problems()
        if problems:
            raise ConfigError(*problems)

    def _adapter_problems(self) -> list[str]:
        problems = []
        for index, (name, path) in enumerate(self.adapters):
            given = f"adapters={shown(f'{name}={path}')}"
            if self.adapter_dir is None:
                problems.append(f"{given}: needs adapter_dir, which its path is relative to")
            if not re.fullmatch(ADAPTER_NAME, name):
                problems.append(f"{given}: the name must be {ADAPTER_NAME}")
            if name in (known for known, _ in self.adapters[:index]):
                problems.append(f"{given}: another one has this name")
        return problems


def resolve_engine(
    config: EngineConfig,
    calibration: Calibration,
    *,
    is_adaptive: bool,
    num_layers: int,
    context_tokens: int,
) -> ResolvedEngineConfig:
    """Replace everything automatic in `config`, and check every limit.

    `is_adaptive`: whether the filter method can tell how much of a prompt is worth keeping.
    `max_prompt_tokens` may be above the model's context, because a filter can shorten such prompts.
    Without a limit, it is the context for prompts that are read as one sequence, and
    `LONGEST_PROMPT` for those that are read in segments.
    """
    layer, keep, limit = calibration.layer, config.filter_keep, config.max_prompt_tokens
    longest_pass = context_tokens - 1 if limit is None else limit
    if keep is None:
        is_known = calibration.is_measured or config.filter_layer is not None
        is_best = config.filter_layer is not None or not answers_from_few(calibration)
        keep = DEFAULT_KEEP if (is_known and is_best) or not is_adaptive else "auto"
    when_cached = config.when_cached
    if when_cached == "auto":
        when_cached = "filter" if is_distracted(calibration) else "whole"
    if limit is None:
        has_segments = (
            is_adaptive and find_segment_size(config.filter_window, calibration) is not None
        )
        limit = max(LONGEST_PROMPT if has_segments else 0, longest_pass)
    if config.cache_dir is not None and not config.cache_memory:
        raise ConfigError(
            f"cache_dir={config.cache_dir}: needs a cache_memory above 0, documents are written "
            "from there"
        )
    segment_size, most = config.filter_window, context_tokens - BESIDE_SEGMENT
    if isinstance(segment_size, int) and not MIN_SEGMENT <= segment_size <= most:
        raise ConfigError(
            f"filter_window={segment_size}: must be from {MIN_SEGMENT} to {most}, {BESIDE_SEGMENT} "
            "less than the model's context"
        )
    if limit < 1:
        raise ConfigError(f"max_prompt_tokens={limit}: must be at least 1")
    offloaded = find_offload_layers(config.offload_layers, num_layers, layer)
    known = {field.name: getattr(config, field.name) for field in fields(EngineConfig)}
    known |= {
        "filter_layer": layer,
        "filter_keep": keep,
        "max_prompt_tokens": limit,
        "max_pass_tokens": longest_pass,
        "offload_layers": offloaded,
        "when_cached": when_cached,
    }
    return ResolvedEngineConfig(**known)


def answers_from_few(calibration: Calibration) -> bool:
    """Whether it found that fewer tokens than the usual `keep` are as good for answers."""
    return calibration.auto_keep is not None and calibration.auto_keep < DEFAULT_KEEP


def is_distracted(calibration: Calibration) -> bool:
    """Whether it found that the model answers worse from more tokens than those few."""
    return answers_from_few(calibration) and calibration.more_distracts


def served_name(model: ModelConfig, server: ServerConfig) -> str:
    """The name by which clients know the model: a file's or folder's is its own, without the path.

    As long as `served_model_name` names no other, the path is understood, too (`also_named`).
    """
    if server.served_model_name is not None:
        return server.served_model_name
    path = Path(model.model).expanduser()
    if not path.exists():
        return model.model  # of this package, or of a hub
    path = path.resolve()
    return path.stem if path.is_file() else path.name or model.model


def also_named(model: ModelConfig, server: ServerConfig) -> str | None:
    """A second name that requests may have for the model: the one given as `--model`."""
    return model.model if server.served_model_name is None else None


def find_segment_size(segment_size: SegmentSize, calibration: Calibration) -> int | None:
    """The most tokens of a segment; None: prompts are read as one sequence."""
    if segment_size == "auto":
        return calibration.window
    return None if segment_size == "off" else segment_size


def choose_calibration(
    given_layer: int | None,
    calibration: Calibration | None,
    *,
    num_layers: int,
    hidden_size: int,
    vocab_size: int,
    sliding_windows: Sequence[int | None],
) -> Calibration:
    """The given layer, else the calibration that was found, else a guess.

    `source` tells which. A guess is the papers' layer for a model of this shape, else the layer at
    40% of the depth. It never has a sliding window, unless all layers have one.
    """
    if given_layer is not None:
        if not 0 <= given_layer < num_layers:
            raise ConfigError(
                f"filter_layer={given_layer}: the model has {num_layers} layers, so 0 to "
                f"{num_layers - 1}"
            )
        if calibration is not None and calibration.layer == given_layer:
            return calibration
        return Calibration(layer=given_layer, source="set by --filter-layer")
    if calibration is not None:
        return calibration
    known = KNOWN_FILTER_LAYERS.get((num_layers, hidden_size, vocab_size))
    wanted = round(0.4 * num_layers) if known is None else known
    seeing = [layer for layer in range(num_layers) if sliding_windows[layer] is None]
    layer = min(seeing, key=lambda i: abs(i - wanted)) if seeing else wanted
    source = "guessed from the depth" if known is None else "from GemFilter's paper"
    return Calibration(layer=min(layer, num_layers - 1), source=source)


def nearest_seeing(layer: int, sliding_windows: Sequence[int | None]) -> str:
    """The layers below and above `layer`, where there are any, that see all tokens."""
    seeing = [other for other, window in enumerate(sliding_windows) if window is None]
    below = [other for other in seeing if other < layer][-1:]
    above = [other for other in seeing if other > layer][:1]
    return " and ".join(map(str, below + above)) or "none sees all tokens"


def find_offload_layers(given: int | Literal["auto"], num_layers: int, filter_layer: int) -> int:
    """How many upper layers stay on the host. Layers that filter are on the device."""
    limit = num_layers - filter_layer - 1
    count = limit if given == "auto" else given
    if count != 0 and not FEWEST_OFFLOADED <= count <= limit:
        allowed = f"0, or from {FEWEST_OFFLOADED} to {limit}" if limit >= FEWEST_OFFLOADED else "0"
        raise ConfigError(
            f"offload_layers={given}: must be {allowed}: {limit} of {num_layers} layers are above "
            f"filter layer {filter_layer}, and two on the device are shared by those on the host"
        )
    return count
