"""The seams of the server, and how each one tells the victim's calls from those of others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from greenlet import getcurrent
from uvicorn.protocols.http.h11_impl import RequestResponseCycle

from gemserve.adapters import adapter_store, kinds
from gemserve.api.replies import choices_reply
from gemserve.decoding.detokenize import TextStream
from gemserve.decoding.grammar import Matcher
from gemserve.engine.cache.files import FileWriter
from gemserve.engine.core import Core
from gemserve.engine.reuse import disk_threads
from gemserve.engine.reuse.disk import DiskCache
from gemserve.engine.running import draws, runner
from gemserve.engine.running.pool_bytes import PoolCopies
from gemserve.model.passes.causal_model import CausalModel
from gemserve.model.passes.offload import HostLayers
from gemserve.prompting import prompt
from tests.e2e.fault_plan import FaultPlan, Seam

VICTIM_WORD = "zebra"  # every chunk of the victim's prompt has it
VICTIM_SEED = 4711
VICTIM_STOP = "@victim@"


def _always(plan: FaultPlan, *_: Any, **__: Any) -> bool:
    return True


def _has_word(plan: FaultPlan, tokenizer: Any, text: str, **_: Any) -> bool:
    return VICTIM_WORD in text


def _has_token(plan: FaultPlan, model: Any, ids: Iterable[int], **_: Any) -> bool:
    return plan.token in ids


def _notes_pass(plan: FaultPlan, model: Any, ids: Iterable[int], **_: Any) -> bool:
    """No fault: it notes in which greenlet the victim's prompt is read."""
    if plan.token in ids:
        plan.passes.add(getcurrent())
    return False


def _in_pass(plan: FaultPlan, *_: Any) -> bool:
    return getcurrent() in plan.passes


def _is_request(plan: FaultPlan, core: Any, request: Any, *_: Any) -> bool:
    return bool(request.sampling.seed == VICTIM_SEED)


def _notes_task(plan: FaultPlan, runner: Any, task: Any, *_: Any) -> bool:
    """No fault: it notes by which number plans mean the victim."""
    if task.request.sampling.seed == VICTIM_SEED:
        plan.numbers.add(task.sequence)
    return False


def _is_chosen_for(plan: FaultPlan, request: Any, *_: Any) -> bool:
    return bool(request.sampling.seed == VICTIM_SEED)


def _has_row(plan: FaultPlan, runner: Any, rows: Iterable[Any], *_: Any) -> bool:
    return any(row.sequence in plan.numbers for row in rows)


def _has_state(plan: FaultPlan, logits: Any, states: Iterable[Any]) -> bool:
    return any(state.params.seed == VICTIM_SEED for state in states)


def _has_stop(plan: FaultPlan, stream: TextStream, *_: Any, **__: Any) -> bool:
    return any(stop.text == VICTIM_STOP for stop in stream._stops)


def _is_copied(plan: FaultPlan, copy: Any, memory: Any) -> bool:
    return copy.sequence in plan.numbers


def _is_loaded(plan: FaultPlan, disk: Any, load: Any, *_: Any) -> bool:
    return load.sequence.request.sampling.seed == VICTIM_SEED


def _is_streamed(plan: FaultPlan, content: Any, **_: Any) -> bool:
    """In the middle of a stream, of which the others' are chats."""
    is_victims = content.get("object") == "text_completion"
    return is_victims and any(choice["text"] for choice in content["choices"])


def _is_for_client(plan: FaultPlan, cycle: Any, message: Any) -> bool:
    is_victims = (b"x-victim", b"1") in cycle.scope["headers"]
    return is_victims and message["type"] == "http.response.body"


def _spoil_keys(result: None, model: Any, ids: Any, *, kv: Any, tap: Any, **_: Any) -> None:
    kv.keys(tap.layer, tap.num_tokens).fill_(torch.nan)


def _spoil_logits(logits: torch.Tensor | None, *_: Any, **__: Any) -> torch.Tensor | None:
    return None if logits is None else torch.full_like(logits, torch.nan)


def _spoil_tensors(folder: Any, *_: Any) -> Any:
    for tensor in folder.tensors.values():
        tensor[...] = torch.nan
    return folder


def _spoil_rows(logits: torch.Tensor, runner: Any, rows: list[Any], *_: Any) -> torch.Tensor:
    spoilt = logits.clone()
    numbers = [row.sequence for row in rows for _ in (row, *row.proposed)]
    seeds = [runner._states[number].request.sampling.seed for number in numbers]
    spoilt[[index for index, seed in enumerate(seeds) if seed == VICTIM_SEED]] = torch.nan
    return spoilt


SEAMS: dict[str, Seam] = {
    "tokenizer": Seam(prompt, "encode", _has_word),
    "admission": Seam(Core, "add", _is_request),
    "filter chunk": Seam(CausalModel, "filter_chunk", _has_token, _spoil_keys),
    "selection": Seam(runner, "choose_positions", _is_chosen_for),
    "prefill chunk": Seam(CausalModel, "prefill_chunk", _has_token, _spoil_logits),
    "decode step": Seam(runner.Runner, "_decode_rows", _has_row, _spoil_rows),
    "sampler": Seam(draws, "draw", _has_state),
    "grammar": Seam(Matcher, "allowed", _always),
    "detokenizer": Seam(TextStream, "push", _has_stop),
    "reply": Seam(choices_reply, "data_event", _is_streamed, limit=1),
    "adapter load": Seam(adapter_store, "load_adapter", _always),
    "adapter file": Seam(kinds, "read_folder", _always, _spoil_tensors),
    "cache copy": Seam(runner, "copy_tokens", _is_copied),
    "cache write": Seam(FileWriter, "add", _always),
    "cache publish": Seam(FileWriter, "publish", _always),
    "cache take": Seam(PoolCopies, "take", _always),
    "cache read": Seam(disk_threads, "read_block", _always),
    "cache put": Seam(DiskCache, "_put", _is_loaded),
    "offload copy": Seam(HostLayers, "_copy", _in_pass),
}
CLIENT_SOCKET = Seam(RequestResponseCycle, "send", _is_for_client)
# Replaced beside a seam, without a fault.
NOTES_TASK = Seam(runner.Runner, "begin", _notes_task)
NOTES_PASS = Seam(CausalModel, "prefill_chunk", _notes_pass)
