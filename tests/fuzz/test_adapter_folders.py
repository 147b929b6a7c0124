"""A changed adapter folder is loaded or refused as one: whoever asks for it gets a clear 400."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemserve.adapters.kinds import load_adapter
from gemserve.errors import AdapterError
from gemserve.model.base_model import base_of
from gemserve.model.passes.causal_model import CausalModel
from tests import adapters, models
from tests.fuzz.cases import MIB, bounded, cases, changed_bytes, changed_json, written

KINDS = ("ntk", "prefix", "activation", "peft lora", "peft prefix")
LIMIT = 16 * MIB


@pytest.fixture(scope="module")
def model() -> CausalModel:
    return CausalModel(models.build("llama"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, model: CausalModel) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    for kind in KINDS:
        if kind.startswith("peft"):
            adapters.write_peft(root / kind, models.build("llama"), kind.split()[1])
        else:
            adapters.write(root / kind, kind, model)
    return {kind: root / kind for kind in KINDS}


@given(st.data())
@cases(25)
def test_a_folder_is_loaded_or_refused(
    folders: dict[str, Path], model: CausalModel, tmp_path_factory: Any, data: st.DataObject
) -> None:
    source = folders[data.draw(st.sampled_from(KINDS))]
    target = tmp_path_factory.mktemp("changed")
    tensors, description = sorted(source.glob("*.safetensors"))[0], next(source.glob("*.json"))
    packed, stated = tensors.read_bytes(), description.read_bytes()
    if data.draw(st.booleans()):
        packed = data.draw(changed_bytes(packed, hot=int.from_bytes(packed[:8], "little") + 8))
    if data.draw(st.booleans()):
        if data.draw(st.booleans()):
            stated = data.draw(changed_bytes(stated))
        else:
            changed = data.draw(changed_json(json.loads(stated)))
            stated = written(changed)
    (target / tensors.name).write_bytes(packed)
    (target / description.name).write_bytes(stated)
    with bounded("adapter folder", cpu_s=10, grown_bytes=400 * MIB):
        try:
            adapter = load_adapter("a", target, model, base_of(model), LIMIT)
        except AdapterError as error:
            assert len(str(error).encode()) < 2000  # it goes into a reply
        else:
            assert adapter.num_bytes <= 2 * LIMIT
            assert 0 <= adapter.num_positions < model.context_tokens
