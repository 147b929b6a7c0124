"""The kinds of adapters, by name, and the function that loads one from a folder."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from gemserve.adapters import activation, lora, ntk, prefix
from gemserve.adapters.folder import AdapterFolder, read_folder
from gemserve.errors import AdapterError, shown
from gemserve.model.adapter import Adapter
from gemserve.model.base_model import BaseModel
from gemserve.model.passes.causal_model import CausalModel

Build = Callable[[str, AdapterFolder, CausalModel], Adapter]
KINDS: dict[str, Build] = {
    "ntk": lambda name, f, model: ntk.build(name, f.version, f.tensors, f.settings, model),
    "prefix": lambda name, f, model: prefix.build(name, f.version, f.tensors, model),
    "activation": lambda name, f, model: activation.build(
        name, f.version, f.tensors, f.settings, model
    ),
    "peft PREFIX_TUNING": lambda name, f, model: prefix.build(
        name, f.version, prefix.from_peft(f.tensors, model.shape), model
    ),
    "peft LORA": lambda name, f, model: lora.build(name, f.version, f.tensors, f.settings, model),
}


def check_adaptable(model: CausalModel) -> None:
    """Raise `AdapterError` if adapters are not for this model."""
    if model.has_states:
        raise AdapterError("adapters are not for models whose layers keep a recurrent state")


def load_adapter(
    name: str, path: Path, model: CausalModel, base: BaseModel, max_bytes: int
) -> Adapter:
    """Load the adapter in folder `path` under `name`. `base` describes `model`.

    Raises `AdapterError`, which says what is wrong with the adapter or why it does not fit the
    model.
    """
    check_adaptable(model)
    folder = read_folder(path, max_bytes)
    if folder.kind not in KINDS:
        raise AdapterError(f"type {shown(folder.kind)}: unknown; known are {', '.join(KINDS)}")
    difference = None if folder.base is None else folder.base.difference(base)
    if difference is not None:
        raise AdapterError(f"made for another model: {difference}")
    adapter = KINDS[folder.kind](name, folder, model)
    _try_step(model, adapter)
    return adapter


def _try_step(model: CausalModel, adapter: Adapter) -> None:
    """Have the compiled decode step try the adapter, so that no request waits for that.

    The thread for it ends: those that stay keep threads of their own for computing, and more
    threads than cores wait for each other longer.
    """
    thread = threading.Thread(target=model.steps, args=(adapter,), name="gemserve-adapter-trial")
    thread.start()
    thread.join()
