"""Steps of `adapter_convert.py` on any model: the texts to fit on, and the adapter as served."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

from gemserve.adapters.kinds import load_adapter
from gemserve.adapters.training.conversion_texts import ConversionText, after_messages
from gemserve.adapters.training.parameters import Parameters
from gemserve.model.adapter import Adapter
from gemserve.model.base_model import base_of
from gemserve.model.causal_model import CausalModel
from gemserve.model.loader import LoadedModel

Chat = list[dict[str, str]]


def conversion_texts(
    loaded: LoadedModel, before: Chat, chats: Sequence[Chat]
) -> tuple[tuple[int, ...], list[ConversionText]]:
    """Token ids of the prompt, the messages `before`, and the chats without it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "chats.jsonl"
        path.write_text("\n".join(json.dumps({"messages": chat}) for chat in chats))
        return after_messages(loaded.tokenizer, before, path, max_tokens=4096)


def stored(model: CausalModel, parameters: Parameters) -> Adapter:
    """The adapter as a server loads it from a folder."""
    base = base_of(model)
    with tempfile.TemporaryDirectory() as root:
        parameters.write(Path(root) / "adapter", base)
        return load_adapter("a", Path(root) / "adapter", model, base, 1 << 40)
