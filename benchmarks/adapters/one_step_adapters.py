"""Adapters of all types, trained for one step: enough to try what takes adapters."""

from __future__ import annotations

from pathlib import Path

from gemserve.adapters.training.examples import TrainingExample
from gemserve.adapters.training.lora_parameters import DEFAULT_TARGETS, LoraParameters
from gemserve.adapters.training.parameters import (
    ActivationParameters,
    NTKParameters,
    Parameters,
    PrefixParameters,
)
from gemserve.adapters.training.trainer import TrainConfig, train
from gemserve.model.loader import LoadedModel

_TEXT = "The lantern in the hall is green. What is the colour of the lantern? It is"


def write_all(loaded: LoadedModel, folder: Path) -> Path:
    """Write one adapter of each type, in a subfolder that has the type's name. Returns `folder`."""
    model = loaded.model
    ids = tuple(loaded.tokenizer.encode(_TEXT))
    examples = [
        TrainingExample((*ids, *loaded.tokenizer.encode(answer), min(loaded.eos_ids)), len(ids))
        for answer in (" green.", " red.")
    ]
    config = TrainConfig(epochs=1, batch_size=2, evals=1, patience=0, warmup_share=0.0)
    made: dict[str, Parameters] = {
        "lora": LoraParameters(model, 1, DEFAULT_TARGETS, seed=1),
        "ntk": NTKParameters.beside(model, [ids], model.shape.head_dim, 4, seed=1),
        "prefix": PrefixParameters(model, ids[:4]),
        "activation": ActivationParameters(model.shape, 1, model.dtype),
    }
    for kind, parameters in made.items():
        train(model, parameters, examples, examples, folder / kind, config)
    return folder
