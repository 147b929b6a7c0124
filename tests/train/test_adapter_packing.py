"""Packed rows, gradient checkpointing, time limits, and LoRA as `adapter train` makes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from gemserve.adapters.adapter_store import AdapterStore
from gemserve.errors import AdapterError
from gemserve.model.passes.causal_model import CausalModel
from gemserve_train.examples import IGNORED, TrainingExample, pack
from gemserve_train.forward import logits_with_gradients
from gemserve_train.lora_parameters import DEFAULT_TARGETS, LoraParameters, count_lora
from gemserve_train.loss_curve import history_of, loss_curve
from gemserve_train.parameters import Parameters, PrefixParameters
from gemserve_train.trainer import AdaptedModel, RunClock, TrainConfig, train
from tests import models
from tests.model.test_adapters import core_of, generate, prompt, request, run
from tests.train.test_adapter_training import parameters_of, toy_examples

START = tuple(prompt(9))


def examples_of(shared: int) -> list[TrainingExample]:
    """Three examples of different lengths whose first `shared` tokens are the same."""
    lengths = ((14, 3), (20, 1), (11, 6))
    return [
        TrainingExample(
            (*START[:shared], *prompt(count - shared, 9 + count), *range(7, 7 + end)), count
        )
        for count, end in lengths
    ]


def one_by_one(
    model: CausalModel, parameters: Parameters, examples: list[TrainingExample]
) -> torch.Tensor:
    """The mean loss over all answers' tokens, each example in a pass of its own."""
    losses = []
    for example in examples:
        logits = logits_with_gradients(
            parameters.replacement or model, parameters.adapter(), torch.tensor([example.ids])
        )[0]
        wanted = torch.tensor(example.ids[example.num_prompt :])
        losses.append(
            torch.nn.functional.cross_entropy(
                logits[example.num_prompt - 1 : -1], wanted, reduction="none"
            )
        )
    return torch.cat(losses).mean()


@pytest.mark.parametrize("is_recomputing", [False, True])
@pytest.mark.parametrize("shared", [0, 9])
@pytest.mark.parametrize("name", ["llama", "opt", "mistral-window", "phi3-longrope"])
def test_a_packed_row_is_its_examples(name: str, shared: int, is_recomputing: bool) -> None:
    """A token must see its own sequence alone, at its own positions; loss and gradients agree."""
    model = CausalModel(models.build(name, scale=1.5))
    examples = examples_of(shared)
    row = pack(examples)
    assert row["layout"][0] == shared
    assert row["input_ids"].numel() == sum(len(e.ids) for e in examples) - 2 * shared
    for kind in ("ntk", "prefix"):
        if name == "mistral-window" and kind == "prefix":
            continue
        parameters = parameters_of(kind, model)
        adapted = AdaptedModel(model, parameters, is_recomputing=is_recomputing)
        adapted(**row)["loss"].backward()
        packed = [p.grad.clone() for p in parameters.parameters() if p.grad is not None]
        parameters.zero_grad()
        loss = one_by_one(model, parameters, examples)
        loss.backward()
        torch.testing.assert_close(adapted(**row)["loss"], loss, atol=1e-4, rtol=1e-4)
        assert packed
        for ours, parameter in zip(packed, parameters.parameters(), strict=True):
            torch.testing.assert_close(ours, parameter.grad, atol=1e-4, rtol=1e-3)


def test_every_prompt_keeps_a_token_of_its_own() -> None:
    """With equal prompts the first answer token had nothing in the row that predicts it."""
    examples = [TrainingExample((*START, 7, 8), 9), TrainingExample((*START, 5), 9)]
    row = pack(examples)
    assert row["layout"].tolist() == [8, 3, 2]
    labels = row["labels"][0]
    assert labels[labels != IGNORED].tolist() == [7, 8, 5]
    alone = pack(examples[:1])
    assert alone["layout"].tolist() == [0, 11]


def test_prefixes_are_trained_in_float32() -> None:
    """In bfloat16 a step of a thousandth of a value changes nothing."""
    model = CausalModel(models.build("llama").bfloat16())
    parameters = PrefixParameters(model, prompt(4))
    assert {p.dtype for p in parameters.parameters()} == {torch.float32}
    for made in (parameters, *(parameters_of(kind, model) for kind in ("ntk", "activation"))):
        loss = AdaptedModel(model, made)(**pack(examples_of(0)))["loss"]
        loss.backward()
        assert loss.dtype == torch.float32
        assert all(p.grad is not None and p.grad.isfinite().all() for p in made.parameters())


def train_lora(folder: Path, model: CausalModel, **settings: Any) -> Any:
    data = toy_examples(32, 0), toy_examples(4, 1000)
    config = TrainConfig(**{"epochs": 2, "learning_rate": 3e-2, "evals": 2, **settings})
    return train(model, LoraParameters(model, 4, DEFAULT_TARGETS, 0), *data, folder, config)


def test_a_trained_lora_is_served_and_is_peft_s(tmp_path: Path) -> None:
    """gemserve's folder is read by PEFT, and both say the same; the base stays as it was."""
    from peft import PeftModel

    hf = models.build("llama", scale=1.5)
    model = CausalModel(hf)
    before = {name: p.clone() for name, p in hf.named_parameters()}
    result = train_lora(tmp_path / "l", model)
    assert result.num_parameters == count_lora(hf, 4, DEFAULT_TARGETS)
    assert all(torch.equal(p, before[name]) for name, p in hf.named_parameters())
    theirs = PeftModel.from_pretrained(models.build("llama", scale=1.5), tmp_path / "l").eval()
    store = AdapterStore(model, tmp_path, 1 << 20)
    store.load("l", "l")
    ids = prompt(40)
    expected = generate(theirs, ids)
    assert run(core_of(model), [request(ids, store.get("l"))]) == [expected]
    assert expected != run(core_of(model), [request(ids, None)])[0]
    with pytest.raises(AdapterError, match="holds an adapter already"):
        train_lora(tmp_path / "l", model)


def test_a_lora_trained_by_peft_alone(tmp_path: Path) -> None:
    """PEFT's own model and a plain loop, without gemserve; loaded here it answers as there."""
    from peft import LoraConfig, get_peft_model

    hf = models.build("qwen3", scale=1.5)
    config = LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", lora_dropout=0.1)
    peft = get_peft_model(hf, config)
    peft.train()
    optimizer = torch.optim.AdamW([p for p in peft.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    torch.manual_seed(0)
    for _ in range(12):
        ids = torch.tensor([example.ids for example in toy_examples(8, 0)])
        labels = ids.masked_fill(torch.arange(ids.shape[1]) < 6, -100)
        loss = peft(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    peft.save_pretrained(tmp_path / "l")
    peft.eval()
    model = CausalModel(models.build("qwen3", scale=1.5))
    store = AdapterStore(model, tmp_path, 4 << 20)
    store.load("l", "l")
    for seed in range(3):
        ids = prompt(30, seed)
        expected = generate(peft, ids)
        assert run(core_of(model), [request(ids, store.get("l"))]) == [expected]
        assert expected != run(core_of(model), [request(ids, None)])[0]


def test_unknown_targets_are_named() -> None:
    with pytest.raises(AdapterError, match="targets nowhere_proj"):
        LoraParameters(CausalModel(models.build("llama")), 4, ["nowhere_proj"], 0)


def test_a_time_limit_ends_training_with_an_adapter(tmp_path: Path) -> None:
    """The limit is in the past after the first step; what is left is evaluated and written."""
    result = train_lora(tmp_path / "l", CausalModel(models.build("llama")), max_minutes=1e-9)
    assert result.steps == 1
    assert result.eval_loss > 0
    told = json.loads((tmp_path / "l" / "training.json").read_text())
    assert told["history"]
    assert (tmp_path / "l" / "loss.svg").read_text().startswith("<svg")


def test_a_clock_goes_on_where_its_run_was_saved(tmp_path: Path) -> None:
    """A run that was stopped four times had four times its limit."""
    path = tmp_path / "seconds.json"
    path.write_text('{"seconds": 100.0}')
    clock = RunClock(path)
    assert 100 <= clock.elapsed_s < 160
    clock.save()
    assert RunClock(path).elapsed_s >= 100
    path.write_text("{")
    assert RunClock(path).elapsed_s < 60


def test_a_loss_curve_is_a_picture_of_its_points() -> None:
    log = [
        {"step": 1, "loss": 4.0, "learning_rate": 0.1},
        {"step": 2, "loss": float("nan")},
        {"step": 2, "eval_loss": 2.0},
        {"step": 2, "train_runtime": 3.0},
    ]
    history = history_of(log)
    assert len(history) == 3
    svg = loss_curve(history)
    lines = [line for line in svg.splitlines() if line.startswith("<polyline")]
    assert [line.split('points="')[1].split('"')[0].count(",") for line in lines] == [1, 1]
    assert "nan" not in svg + loss_curve([])
