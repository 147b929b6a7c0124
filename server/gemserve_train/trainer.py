"""Training an adapter on a frozen model, with transformers' `Trainer`."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from gemserve.errors import AdapterError
from gemserve.model.base_model import base_of
from gemserve.model.passes.causal_model import CausalModel
from gemserve_train.examples import IGNORED, TrainingExample, pack
from gemserve_train.forward import Layout, packed_logits, recomputing
from gemserve_train.loss_curve import history_of, loss_curve
from gemserve_train.parameters import Parameters


class AdaptedModel(nn.Module):
    """Only the adapter has parameters. `is_recomputing`: see `forward.recomputing`."""

    def __init__(
        self, base: CausalModel, parameters: Parameters, *, is_recomputing: bool = False
    ) -> None:
        super().__init__()
        self.adapter_parameters = parameters
        model = parameters.replacement or base
        # torch does not look for modules in a tuple
        self._model = (recomputing(model) if is_recomputing else model,)

    def forward(
        self,
        input_ids: torch.Tensor,
        labels: torch.Tensor,
        layout: torch.Tensor | None = None,
        **_: Any,
    ) -> dict[str, torch.Tensor]:
        """The `loss`: the mean over all labels but `IGNORED` ones, which are not shifted.

        The arguments are what `pack` returns, or, without a `layout`, sequences of one length:
        [batch, tokens]. The model's head is computed only where there is a label.
        """
        if layout is None:
            rows = Layout(0, (input_ids.shape[1],) * input_ids.shape[0])
        else:
            shared, *lengths = layout.tolist()
            rows = Layout(shared, tuple(lengths))
        ids, targets = input_ids.flatten(), labels.flatten().clone()
        # nothing predicts the first token of a sequence
        targets[[start for start, _ in rows.bounds()]] = IGNORED
        wanted = (targets[1:] != IGNORED).nonzero().flatten()
        adapter = self.adapter_parameters.adapter()
        logits = packed_logits(self._model[0], adapter, ids, rows, wanted=wanted)
        return {"loss": F.cross_entropy(logits, targets[wanted + 1])}


class RunClock:
    """Counts from where the run was when it was saved last. `path`: the file that keeps it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._before_s = float(json.loads(path.read_text())["seconds"])
        except (OSError, ValueError, KeyError, TypeError):
            self._before_s = 0.0
        self._start_s = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        return self._before_s + time.monotonic() - self._start_s

    def save(self) -> None:
        self._path.write_text(json.dumps({"seconds": self.elapsed_s}) + "\n")


def time_limit(clock: RunClock, limit_s: float) -> Any:
    """A callback of transformers' `Trainer` that evaluates, saves and stops after `limit_s`."""
    from transformers import TrainerCallback

    class TimeLimit(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if clock.elapsed_s >= limit_s:
                control.should_evaluate = control.should_save = True
                control.should_training_stop = True

        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            clock.save()

    return TimeLimit()


_LOGGED = 50  # points of a training loss's curve


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """AdamW with a cosine schedule.

    Training stops after `patience` evaluations without a lower loss. With 0 it never stops early.
    After `max_minutes` it stops with a last evaluation; the learning rate has then come down as it
    would have after all steps. With `gradient_checkpointing` it takes less memory and more time.
    """

    epochs: float = 3.0
    batch_size: int = 8
    learning_rate: float = 5e-3
    weight_decay: float = 0.0
    warmup_share: float = 0.05
    evals: int = 10
    patience: int = 3
    seed: int = 0
    max_minutes: float | None = None
    gradient_checkpointing: bool = False

    @property
    def of_run(self) -> dict[str, Any]:
        """The settings that a run that goes on must have had from the beginning."""
        given = asdict(self)
        return {name: given[name] for name in given if name not in _MAY_CHANGE}


_MAY_CHANGE = ("max_minutes", "gradient_checkpointing")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """Losses per token of a completion. `eval_loss` is that of the weights that were kept.

    `seconds`: the time of all parts of the run. `history`: see `loss_curve`.
    """

    steps: int
    train_loss: float
    eval_loss: float
    num_parameters: int
    seconds: float = 0.0
    history: tuple[dict[str, float], ...] = ()


def train(
    model: CausalModel,
    parameters: Parameters,
    examples: Sequence[TrainingExample],
    held_out: Sequence[TrainingExample],
    out: Path,
    config: TrainConfig,
    *,
    is_quiet: bool = True,
) -> TrainResult:
    """Train an adapter and write it to `out`; see `run_trainer`.

    Raises `AdapterError` if `out` holds an adapter, or a run of other settings or data.
    """
    if any((out / name).exists() for name in ("adapter.json", "adapter_config.json")):
        raise AdapterError(f"{out}: holds an adapter already; choose another folder")
    base = base_of(model)
    checkpoints = out / "checkpoints"
    settings = {"type": parameters.kind, **parameters.settings, **config.of_run}
    data = {"examples": _hashed(examples), "held_out": _hashed(held_out), "weights": base.weights}
    _check_same_run(checkpoints / "run.json", settings | data)
    adapted = AdaptedModel(model, parameters, is_recomputing=config.gradient_checkpointing)
    adapted.to(model.device)
    result = run_trainer(adapted, examples, held_out, checkpoints, config, is_quiet=is_quiet)
    if not math.isfinite(result.eval_loss):
        shutil.rmtree(checkpoints)
        raise AdapterError(
            f"training diverged, its loss is {result.eval_loss}: nothing was written; a lower "
            "learning rate may help"
        )
    write_history(out, settings | data, result)
    parameters.write(out, base)
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


def write_history(out: Path, settings: dict[str, Any], result: TrainResult) -> None:
    """Write `training.json`, with what was trained and its losses, and their picture."""
    told = {"settings": settings, **asdict(result)}
    (out / "training.json").write_text(json.dumps(told, indent=1) + "\n")
    (out / "loss.svg").write_text(loss_curve(result.history))


def run_trainer(
    module: nn.Module,
    examples: Sequence[TrainingExample],
    held_out: Sequence[TrainingExample],
    checkpoints: Path,
    config: TrainConfig,
    *,
    is_quiet: bool = True,
) -> TrainResult:
    """Train the parameters of `module` that have gradients, and keep the best of them.

    `module` takes what `pack` returns and returns a `loss`. A run that was stopped goes on from the
    last of its `checkpoints`.
    """
    from transformers import EarlyStoppingCallback, Trainer

    trained = [p for p in module.parameters() if p.requires_grad]
    steps = max(1, math.ceil(config.epochs * math.ceil(len(examples) / config.batch_size)))
    clock = RunClock(checkpoints / "seconds.json")
    limit_s = math.inf if config.max_minutes is None else 60 * config.max_minutes
    optimizer = torch.optim.AdamW(
        trained, lr=config.learning_rate, weight_decay=config.weight_decay
    )
    trainer = Trainer(
        model=module,
        args=_arguments(config, steps, checkpoints, trained[0].device, is_quiet=is_quiet),
        train_dataset=list(examples),
        eval_dataset=list(held_out),
        data_collator=pack,
        optimizers=(optimizer, _schedule(optimizer, config, steps, clock, limit_s)),
        callbacks=[
            time_limit(clock, limit_s),
            *([EarlyStoppingCallback(config.patience)] if config.patience else []),
        ],
    )
    is_resumed = any(checkpoints.glob("checkpoint-*"))
    done: Any = trainer.train(resume_from_checkpoint=is_resumed or None)
    best = trainer.state.best_metric
    return TrainResult(
        steps=trainer.state.global_step,
        train_loss=float(done.training_loss),
        eval_loss=float("nan") if best is None else float(best),
        num_parameters=sum(p.numel() for p in trained),
        seconds=clock.elapsed_s,
        history=history_of(trainer.state.log_history),
    )


def _schedule(
    optimizer: torch.optim.Optimizer,
    config: TrainConfig,
    steps: int,
    clock: RunClock,
    limit_s: float,
) -> torch.optim.lr_scheduler.LRScheduler:
    """Warm-up, then half a cosine over the steps, or over the time if that ends first."""
    warmup = round(config.warmup_share * steps)

    def share(step: int) -> float:
        done = max((step - warmup) / max(1, steps - warmup), clock.elapsed_s / limit_s)
        cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, max(0.0, done))))
        return cosine * min(1.0, step / warmup if warmup else 1.0)

    return torch.optim.lr_scheduler.LambdaLR(optimizer, share)


def _arguments(
    config: TrainConfig, steps: int, checkpoints: Path, device: torch.device, *, is_quiet: bool
) -> Any:
    """The arguments of transformers' `Trainer` for a run of `steps` steps."""
    from transformers import TrainingArguments

    every = max(1, steps // config.evals)
    arguments = TrainingArguments(
        output_dir=str(checkpoints),
        max_steps=steps,
        per_device_train_batch_size=config.batch_size,
        per_device_eval_batch_size=config.batch_size,
        eval_strategy="steps",
        save_strategy="steps",
        eval_steps=every,
        save_steps=every,
        save_total_limit=2,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        greater_is_better=False,
        logging_steps=max(1, steps // _LOGGED),
        disable_tqdm=is_quiet,
        report_to=[],
        remove_unused_columns=False,
        label_names=["labels"],
        seed=config.seed,
        data_seed=config.seed,
        use_cpu=device.type == "cpu",
        dataloader_pin_memory=False,
    )
    if arguments.n_gpu > 1:  # each GPU would get a part of a row's layout, and all of its tokens
        arguments._n_gpu = 1
    return arguments
