"""Compares prompts and adapters on a task of `adapter_tasks.py`: what they learn, what they cost.

Every finished run is a line of a file, and a run that is there is not repeated. So the comparison
can be stopped and started again with the same command.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.adapters.adapter_serving_times import served
from benchmarks.adapters.adapter_tasks import SPLITS, TASKS, write_task
from benchmarks.shared import results
from gemserve.adapters.kinds import load_adapter
from gemserve.adapters.training.examples import read_examples
from gemserve.adapters.training.lora_parameters import DEFAULT_TARGETS, LoraParameters
from gemserve.adapters.training.parameters import (
    ActivationParameters,
    NTKParameters,
    Parameters,
    PrefixParameters,
)
from gemserve.adapters.training.trainer import TrainConfig, TrainResult, train
from gemserve.cli.adapter_train import LEARNING_RATES
from gemserve.config import EngineConfig, ModelConfig
from gemserve.engine.build import assemble
from gemserve.engine.core import Core
from gemserve.errors import AdapterError
from gemserve.evaluation.adapters.answer_rules import RULES, interval, matching
from gemserve.evaluation.adapters.chats import Question, draw_shots, read_questions
from gemserve.evaluation.adapters.evaluate import evaluate
from gemserve.model.adapter import Adapter
from gemserve.model.base_model import base_of
from gemserve.model.loader import LoadedModel, load

_LONGEST = 1024  # tokens of a training example
_KV_BYTES = 1 << 30  # several comparisons share a GPU


@dataclass(frozen=True, slots=True)
class Contestant:
    """`size`: examples of few-shot, rank s of ntk, positions of a prefix, rank of LoRA, or layer.

    `width`: the features r of ntk as multiples of the head dimension.
    """

    kind: str
    size: int = 0
    width: int = 1

    @property
    def name(self) -> str:
        wide = f" r={self.width}d" if self.width > 1 else ""
        return self.kind if self.kind == "zero-shot" else f"{self.kind} {self.size}{wide}"

    @property
    def is_trained(self) -> bool:
        return self.kind in LEARNING_RATES

    def parameters(self, loaded: LoadedModel, texts: Sequence[Any], seed: int) -> Parameters:
        model = loaded.model
        if self.kind == "lora":
            return LoraParameters(model, self.size, DEFAULT_TARGETS, seed)
        if self.kind == "ntk":
            r = self.width * model.shape.head_dim
            return NTKParameters.beside(model, texts, r, self.size, seed)
        if self.kind == "activation":
            return ActivationParameters(model.shape, self.size, model.dtype)
        text = [*texts[0]] * -(-self.size // len(texts[0]))
        return PrefixParameters(model, text[: self.size])


# In the order of what is learnt from them. On SmolLM2-135M LoRA of ranks 1, 5 and 19 has as many
# parameters as a prefix of 10 and as ntk with s = 16 and 64.
CONTESTANTS = (
    Contestant("zero-shot"),
    Contestant("few-shot", 8),
    Contestant("few-shot", 32),
    Contestant("lora", 5),
    Contestant("ntk", 16),
    Contestant("prefix", 10),
    Contestant("lora", 1),
    Contestant("ntk", 4),
    Contestant("prefix", 100),
    Contestant("prefix", 1),
    Contestant("ntk", 64),
    Contestant("lora", 19),
    Contestant("ntk", 16, 2),
    *(Contestant("activation", layer) for layer in (1, 8, 15, 22)),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, help="file of finished runs, for --model")
    parser.add_argument("--adapters", type=Path, help="keep the trained adapters in this folder")
    parser.add_argument("--minutes", type=float, default=20.0, help="limit of a run's training")
    parser.add_argument("--tests", type=int, default=200, help="questions asked, for --model")
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--rates", help="learning rates to try, for --model: 0.001,0.003")
    parser.add_argument(
        "--no-timing", action="store_true", help="on a busy machine: do not time requests"
    )


def compare(arguments: argparse.Namespace) -> None:
    """Do the runs that the file of finished runs lacks, and print the table of all."""
    if arguments.out is None:
        raise SystemExit("--model needs --out, the file of finished runs")
    loaded = load(ModelConfig(model=arguments.model, device=arguments.device))
    engine = EngineConfig(calibrate="off", cache_memory=0.0, kv_memory_bytes=_KV_BYTES)
    core = assemble(loaded, engine)
    wanted = {name.strip() for name in (arguments.only or "").split(",")}
    seeds = [int(seed) for seed in arguments.seeds.split(",")]
    given = (arguments.rates or "").split(",")
    rates = [float(rate) if rate else None for rate in given]  # None: the type's own
    with tempfile.TemporaryDirectory() as folder:
        comparison = Comparison(arguments, core, loaded, Path(folder))
        for seed, rate in itertools.product(seeds, rates):
            for contestant in CONTESTANTS:
                if not {"", contestant.kind, contestant.name} & wanted:
                    continue
                try:
                    comparison.do(contestant, seed, rate)
                except AdapterError as error:  # such as a run that diverged: the others go on
                    print(f"left out: {contestant.name}, seed {seed}: {error}", flush=True)
    rows = [run for run in read_runs(arguments.out) if run["task"] == arguments.task]
    results.finish("adapters", arguments.device, table(rows), arguments.json)


def read_runs(path: Path) -> list[dict[str, Any]]:
    """The finished runs. A line that was cut off when a run was stopped is left out."""
    runs = []
    # splitlines would also split at U+2028 and others, which an answer may contain
    for line in path.read_text().split("\n") if path.exists() else []:
        try:
            runs.append(json.loads(line))
        except ValueError:
            continue
    return runs


def append_run(path: Path, run: Mapping[str, Any]) -> None:
    with path.open("a") as file:
        # a line that was cut off before stays a line of its own
        file.write("\n" + json.dumps(run, ensure_ascii=False) + "\n")


def find_run(runs: Sequence[dict[str, Any]], key: Mapping[str, Any]) -> dict[str, Any] | None:
    """The run that has all values of `key`."""
    return next((r for r in runs if all(r.get(n) == value for n, value in key.items())), None)


def table(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each contestant and rate: the means over its seeds and their spread."""
    rows = []
    for key in dict.fromkeys((run["contestant"], run["rate"]) for run in runs):
        mine = [run for run in runs if (run["contestant"], run["rate"]) == key]
        scores = [run["score"] for run in mine]
        row = {"contestant": key[0], "rate": key[1], "seeds": len(mine)}
        row |= {"score": statistics.mean(scores), "least": min(scores), "most": max(scores)}
        numbers = ("loss", "parameters", "train_s", "ttft_ms", "decode_ms", "mixed_ms")
        for name in numbers:
            known = [run[name] for run in mine if run[name] is not None]
            row[name] = statistics.mean(known) if known else None
        rows.append(row)
    return rows


class Comparison:
    """One model and one task. `folder` gets the task's files and the adapters."""

    def __init__(
        self, arguments: argparse.Namespace, core: Core, loaded: LoadedModel, folder: Path
    ) -> None:
        self._given, self._core, self._loaded, self._folder = arguments, core, loaded, folder
        task = TASKS[arguments.task]
        self._max_tokens = task.max_tokens
        self._rules = {
            name: matching(task.pattern or "") if name == "pattern" else RULES[name]
            for name in task.rules
        }
        self._eos_id = min(loaded.eos_ids)
        wanted = (arguments.examples, max(20, arguments.examples // 10), arguments.tests)
        sizes = dict(zip(SPLITS, wanted, strict=True))
        # the same questions for all seeds, which are those of training
        self._sizes = write_task(arguments.task, folder, 1, sizes)

    def do(self, contestant: Contestant, seed: int, rate: float | None = None) -> None:
        """Do a run and append it to the file, unless it is there. `rate`: not the type's own."""
        given = self._given
        rate = rate or LEARNING_RATES.get(contestant.kind)
        key = {
            "model": given.model,
            "task": given.task,
            "contestant": contestant.name,
            "seed": seed,
            "rate": rate if contestant.is_trained else None,
            "examples": self._sizes["train"],
            "minutes": given.minutes,
        }
        if find_run(read_runs(given.out), key) is not None:
            return
        results.note(f"{contestant.name}, seed {seed}")
        adapter, trained = self._train(contestant, seed, rate)
        questions = self._questions(contestant, seed)
        found = evaluate(
            self._core, contestant.name, adapter, questions, self._rules, self._max_tokens
        )
        scores = {rule: [round(s, 4) for s in values] for rule, values in found.scores.items()}
        first = next(iter(scores.values()))
        run = {
            **key,
            "score": statistics.fmean(first),
            "interval": interval(first),
            "scores": scores,
            "loss": found.loss,
            "parameters": trained.num_parameters if trained else 0,
            "steps": trained.steps if trained else 0,
            "eval_loss": trained.eval_loss if trained else None,
            "history": list(trained.history) if trained else [],
            "train_s": trained.seconds if trained else None,
            "prompt_tokens": found.prompt_tokens,
            "answers": list(found.answers[:10]),
            **self._times(adapter, questions),
        }
        append_run(given.out, run)

    def _times(
        self, adapter: Adapter | None, questions: Sequence[Question]
    ) -> dict[str, float | None]:
        if self._given.no_timing:
            return dict.fromkeys(("ttft_ms", "decode_ms", "mixed_ms"))
        return {**served(self._core, adapter, questions, self._given.repeats)}

    def _questions(self, contestant: Contestant, seed: int) -> list[Question]:
        train_file, test_file = (self._folder / f"{name}.jsonl" for name in ("train", "test"))
        shots = draw_shots(train_file, contestant.size, seed) if "few" in contestant.kind else []
        limit = self._core.model.context_tokens - 1
        tokenizer = self._core.tokenizer
        return read_questions(test_file, tokenizer, self._eos_id, shots=shots, max_tokens=limit)

    def _train(
        self, contestant: Contestant, seed: int, rate: float | None
    ) -> tuple[Adapter | None, TrainResult | None]:
        if not contestant.is_trained or rate is None:
            return None, None
        examples, held_out = (
            read_examples(
                self._folder / f"{name}.jsonl",
                self._loaded.tokenizer,
                eos_id=self._eos_id,
                max_tokens=_LONGEST,
            )
            for name in ("train", "valid")
        )
        model, folder = self._loaded.model, self._adapter_folder(contestant, seed, rate)
        started_s = time.perf_counter()
        made = contestant.parameters(self._loaded, [e.ids for e in examples], seed)
        config = TrainConfig(
            epochs=self._given.epochs,
            batch_size=self._given.batch_size,
            learning_rate=rate,
            evals=5,
            patience=0,
            seed=seed,
            max_minutes=self._given.minutes,
        )
        result = train(model, made, examples, held_out, folder, config)
        spent_s = time.perf_counter() - started_s
        served_model = self._core.model
        adapter = load_adapter("a", folder, served_model, base_of(served_model), 1 << 40)
        return adapter, replace(result, seconds=spent_s)

    def _adapter_folder(self, contestant: Contestant, seed: int, rate: float) -> Path:
        """Where this run's adapter will be. One that a run left there before is removed."""
        name = "-".join(f"{self._given.task} {contestant.name} {seed} {rate:g}".split())
        folder: Path = (self._given.adapters or self._folder) / name.replace("=", "")
        if folder.exists():
            shutil.rmtree(folder)
        return folder
