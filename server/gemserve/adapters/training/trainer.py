"""Training an adapter on a frozen model, with transformers' `Trainer`."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from gemserve.adapters.folder import write_folder
from gemserve.adapters.training.examples import IGNORED, TrainingExample, collate
from gemserve.adapters.training.forward import logits_with_gradients
from gemserve.adapters.training.parameters import Parameters
from gemserve.errors import AdapterError
from gemserve.model.base_model import base_of
from gemserve.model.causal_model import CausalModel


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """AdamW with a cosine schedule.

    Training stops after `patience` evaluations without a lower loss. With 0 it never stops early.
    """

    epochs: float = 3.0
    batch_size: int = 8
    learning_rate: float = 5e-3
    weight_decay: float = 0.0
    warmup_share: float = 0.05
    evals: int = 10
    patience: int = 3
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """Losses per token of a completion. `eval_loss` is that of the weights that were kept."""

    steps: int
    train_loss: float
    eval_loss: float
    num_parameters: int


def train(
    model: CausalModel,
    parameters: Parameters,
    examples: Sequence[TrainingExample],
    held_out: Sequence[TrainingExample],
    out: Path,
    config: TrainConfig,
    *,
    pad_id: int,
    is_quiet: bool = True,
) -> TrainResult:
    """Train an adapter and write it to `out`; see `run_trainer`.

    Raises `AdapterError` if `out` holds an adapter, or a run of other settings or data.
    """
    if (out / "adapter.json").exists():
        raise AdapterError(f"{out}: holds an adapter already; choose another folder")
    base = base_of(model)
    checkpoints = out / "checkpoints"
    settings = {"type": parameters.kind, **parameters.settings, **asdict(config)}
    data = {"examples": _hashed(examples), "held_out": _hashed(held_out), "weights": base.weights}
    _check_same_run(checkpoints / "run.json", settings | data)
    adapted = AdaptedModel(model, parameters)
    result = run_trainer(
        adapted, examples, held_out, checkpoints, config, pad_id=pad_id, is_quiet=is_quiet
    )
    if not math.isfinite(result.eval_loss):
        shutil.rmtree(checkpoints)
        raise AdapterError(
            f"training diverged, its loss is {result.eval_loss}: nothing was written; a lower "
            "learning rate may help"
        )
    write_folder(
        out,
        kind=parameters.kind,
        settings=parameters.settings,
        tensors=parameters.tensors(),
        base=base,
    )
    shutil.rmtree(checkpoints)
    return result


def _hashed(examples: Sequence[TrainingExample]) -> str:
    numbers = [(example.ids, example.num_prompt) for example in examples]
    return hashlib.sha256(repr(numbers).encode()).hexdigest()[:16]


def _check_same_run(path: Path, run: dict[str, Any]) -> None:
    """Raise `AdapterError` if a run other than `run` was stopped in this folder."""
    if not path.exists() and not any(path.parent.glob("checkpoint-*")):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(run, indent=1) + "\n")
        except OSError as error:
            raise AdapterError(f"{path.parent}: cannot be written: {error}") from error
        return
    try:
        before = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise AdapterError(
            f"{path}: does not tell which run was stopped here ({error}); choose another folder"
        ) from error
    for name in (*run, *before):
        if run.get(name) != before.get(name):
            raise AdapterError(
                f"{path.parent.parent}: a run with {name}={before.get(name)} was stopped here, and "
                f"this one has {name}={run.get(name)}; choose another folder"
            )


def run_trainer(
    module: nn.Module,
    examples: Sequence[TrainingExample],
    held_out: Sequence[TrainingExample],
    checkpoints: Path,
    config: TrainConfig,
    *,
    pad_id: int,
    is_quiet: bool = True,
) -> TrainResult:
    """Train the parameters of `module` that have gradients, and keep the best of them.

    `module` takes `input_ids` and `labels` and returns a `loss`. A run that was stopped goes on
    from the last of its `checkpoints`.
    """
    from transformers import EarlyStoppingCallback, Trainer

    trained = [p for p in module.parameters() if p.requires_grad]
    steps = max(1, math.ceil(config.epochs * math.ceil(len(examples) / config.batch_size)))
    trainer = Trainer(
        model=module,
        args=_arguments(config, steps, checkpoints, trained[0].device, is_quiet=is_quiet),
        train_dataset=list(examples),
        eval_dataset=list(held_out),
        data_collator=partial(collate, pad_id=pad_id),
        callbacks=[EarlyStoppingCallback(config.patience)] if config.patience else [],
    )
    is_resumed = any(checkpoints.glob("checkpoint-*"))
    done: Any = trainer.train(resume_from_checkpoint=is_resumed or None)
    best = trainer.state.best_metric
    return TrainResult(
        steps=trainer.state.global_step,
        train_loss=float(done.training_loss),
        eval_loss=float("nan") if best is None else float(best),
        num_parameters=sum(p.numel() for p in trained),
    )


def _arguments(
    config: TrainConfig, steps: int, checkpoints: Path, device: torch.device, *, is_quiet: bool
) -> Any:
    """The arguments of transformers' `Trainer` for a run of `steps` steps."""
    from transformers import TrainingArguments

    every = max(1, steps // config.evals)
    return TrainingArguments(
        output_dir=str(checkpoints),
        max_steps=steps,
        per_device_train_batch_size=config.batch_size,
        per_device_eval_batch_size=config.batch_size,
        learning_rate=config.learning_rate,
        weight_decay=config.weight_decay,
        warmup_steps=round(config.warmup_share * steps),
        lr_scheduler_type="cosine",
        optim="adamw_torch",
        eval_strategy="steps",
        save_strategy="steps",
        eval_steps=every,
        save_steps=every,
        save_total_limit=2,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        greater_is_better=False,
        logging_steps=every,
        disable_tqdm=is_quiet,
        report_to=[],
        remove_unused_columns=False,
        label_names=["labels"],
        seed=config.seed,
        data_seed=config.seed,
        use_cpu=device.type == "cpu",
        dataloader_pin_memory=False,
    )


class AdaptedModel(nn.Module):
    """A frozen model with an adapter in training. Only the adapter has parameters."""

    def __init__(self, base: CausalModel, parameters: Parameters) -> None:
        super().__init__()
        self.adapter_parameters = parameters
        self._base = (base,)  # torch does not look for modules in a tuple

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor | None = None, **_: Any
    ) -> dict[str, torch.Tensor]:
        """`input_ids`, `labels`: [batch, tokens], padded on the right; labels are not shifted.

        Returns `loss`, the mean over all labels but `IGNORED` ones, and `logits` of every token,
        [batch, tokens, vocab], float32.
        """
        adapter = self.adapter_parameters.adapter()
        logits = logits_with_gradients(self._base[0], adapter, input_ids)
        if labels is None:
            return {"logits": logits}
        loss = F.cross_entropy(
            logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED
        )
        return {"loss": loss, "logits": logits}
