"""Training on a GPU, where a packed row is one attention and not one for each sequence."""

from __future__ import annotations

from pathlib import Path

import pytest

from gemserve.adapters.kinds import load_adapter
from gemserve.model.base_model import base_of
from gemserve.model.passes.causal_model import CausalModel
from gemserve_train.lora_parameters import DEFAULT_TARGETS, LoraParameters
from gemserve_train.parameters import NTKParameters, Parameters
from gemserve_train.trainer import TrainConfig, TrainResult, train
from tests import models
from tests.model.test_adapters import prompt
from tests.train.test_adapter_packing import examples_of
from tests.train.test_adapter_training import parameters_of


def made(kind: str, model: CausalModel) -> Parameters:
    if kind == "lora":
        return LoraParameters(model, 4, DEFAULT_TARGETS, seed=0)
    if kind == "ntk":
        return NTKParameters.beside(model, [prompt(12)], model.shape.head_dim, 4, seed=0)
    return parameters_of(kind, model)


def result_on(device: str, name: str, kind: str, folder: Path) -> TrainResult:
    model = CausalModel(models.build(name, scale=1.5).to(device))
    config = TrainConfig(epochs=4, batch_size=3, evals=4, patience=0)
    examples = examples_of(9)
    result = train(model, made(kind, model), examples, examples, folder, config)
    adapter = load_adapter("a", folder, model, base_of(model), 1 << 30)
    assert adapter.num_bytes > 0
    return result


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["ntk", "prefix", "activation", "lora"])
@pytest.mark.parametrize("name", ["llama", "mistral-window"])
def test_losses_are_those_of_the_cpu(name: str, kind: str, tmp_path: Path) -> None:
    """Parameters that stayed on the CPU, or a mask that is wrong, end it or change the loss."""
    if name == "mistral-window" and kind == "prefix":
        pytest.skip("a prefix is refused for models with a sliding window")
    expected = result_on("cpu", name, kind, tmp_path / "cpu")
    found = result_on("cuda", name, kind, tmp_path / "cuda")
    assert found.eval_loss == pytest.approx(expected.eval_loss, rel=1e-3)
