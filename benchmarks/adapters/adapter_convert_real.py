"""A long prompt against adapters that were distilled from it, on a pretrained model.

The model answers questions behind the prompt. Terms of NTK-Attention and short prefixes learn to
predict what it predicts there. Each is then tested as it is served, without the prompt: by the
task's rules, and by how often it answers as the prompt does. Every finished run is a line of a
file, and a run that is there is not repeated.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from benchmarks.adapters.adapter_comparison import append_run, find_run, read_runs
from benchmarks.adapters.adapter_convert_steps import Chat, conversion_texts, stored
from benchmarks.adapters.adapter_convert_tasks import CONVERSIONS, NO_ANSWER
from benchmarks.adapters.adapter_serving_times import first_token_ms
from benchmarks.adapters.adapter_task_cases import Case
from benchmarks.shared import results
from gemserve.adapters.prefix import Prefix
from gemserve.adapters.training.conversion_texts import ConversionText
from gemserve.adapters.training.convert import ConvertConfig, convert, num_held_out
from gemserve.adapters.training.distill import DistillConfig, Teacher, agreement, distill
from gemserve.adapters.training.parameters import Parameters, PrefixParameters, read_prefix
from gemserve.config import EngineConfig, ModelConfig
from gemserve.engine.build import assemble
from gemserve.engine.core import Core
from gemserve.evaluation.adapters.answer_rules import interval
from gemserve.evaluation.adapters.chats import Question, behind_prefix, read_questions
from gemserve.evaluation.adapters.evaluate import Evaluation, evaluate
from gemserve.evaluation.answers import answer_all
from gemserve.model.adapter import Adapter
from gemserve.model.loader import LoadedModel, load

_RATES = {"ntk": 2e-3, "prefix": 3e-2}
_ANSWERS = 5  # answers of each kind that a run keeps


@dataclass(frozen=True, slots=True)
class Arm:
    """`size`: rank s of ntk, or positions of a prefix."""

    kind: str
    size: int = 0

    @property
    def name(self) -> str:
        return f"{self.kind} {self.size}" if self.size else self.kind


PROMPT, NOTHING = Arm("the prompt"), Arm("nothing")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="convert on this model (default: the built-in one)")
    parser.add_argument("--task", choices=CONVERSIONS, help="what is converted, for --model")
    parser.add_argument("--out", type=Path, help="file of finished runs, for --model")
    parser.add_argument("--sizes", default="16,64", help="ranks s of ntk")
    parser.add_argument("--positions", default="10,100", help="lengths of distilled prefixes")
    parser.add_argument("--rate", type=float, help="learning rate of all, instead of the type's")
    parser.add_argument("--tests", type=int, default=24, help="questions of each kind")
    parser.add_argument("--minutes", type=float, default=3.0, help="limit of a distillation")
    parser.add_argument(
        "--no-timing", action="store_true", help="on a busy machine: do not time requests"
    )


def convert_real(arguments: argparse.Namespace) -> None:
    """Do the runs that the file of finished runs lacks, and print the table of all."""
    if arguments.out is None or arguments.task is None:
        raise SystemExit("--model needs --task, and --out, the file of finished runs")
    loaded = load(ModelConfig(model=arguments.model, device=arguments.device))
    conversion = RealConversion(arguments, loaded)
    for arm in arms(arguments):
        conversion.do(arm)
    runs = [run for run in read_runs(arguments.out) if run["task"] == arguments.task]
    results.finish("convert", arguments.device, table(runs), arguments.json)


def arms(arguments: argparse.Namespace) -> list[Arm]:
    """The prompt is first: the others are compared with its answers."""
    ntk = [Arm("ntk", s) for s in results.numbers(arguments.sizes)]
    prefixes = [Arm("prefix", length) for length in results.numbers(arguments.positions)]
    return [PROMPT, NOTHING, *ntk, *prefixes]


def table(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each run and kind of test."""
    costs = ("parameters", "bytes", "convert_s", "ttft_ms")
    return [
        {
            "arm": run["arm"],
            "rate": run["rate"],
            "fit_steps": run["fit_steps"],
            "tests": kind,
            **found["scores"],
        }
        | {name: value for name, value in found.items() if name not in ("scores", "answers")}
        | {name: run[name] for name in costs}
        for run in runs
        for kind, found in run["tests"].items()
    ]


class RealConversion:
    """One model and one task."""

    def __init__(self, arguments: argparse.Namespace, loaded: LoadedModel) -> None:
        self._given, self._loaded = arguments, loaded
        config = EngineConfig(calibrate="off", cache_memory=0.0, kv_memory_bytes=1 << 30)
        self._core: Core = assemble(loaded, config)
        make = CONVERSIONS[arguments.task]
        self._task = make(arguments.seed, arguments.chats, arguments.tests)

    def do(self, arm: Arm) -> None:
        """Do a run and append it to the file, unless it is there."""
        given = self._given
        is_made = arm not in (PROMPT, NOTHING)
        key = {
            "model": given.model,
            "task": given.task,
            "arm": arm.name,
            "seed": given.seed,
            "rate": (given.rate or _RATES[arm.kind]) if is_made else None,
            "chats": given.chats,
            "fit_steps": given.fit_steps if arm.kind == "ntk" else None,
            "steps": given.distill_steps if is_made else None,
            "minutes": given.minutes if is_made else None,
        }
        if find_run(read_runs(given.out), key) is not None:
            return
        results.note(arm.name)
        self._teacher_texts  # noqa: B018  what all arms need is not part of their time
        parameters, made = self._made(arm, key["rate"])
        adapter = None if parameters is None else stored(self._core.model, parameters)
        sizes: dict[str, Any] = {"parameters": 0, "bytes": 0, "prompt_tokens": 0}
        if parameters is not None and adapter is not None:
            sizes |= {"parameters": parameters.num_parameters, "bytes": adapter.num_bytes}
        elif arm == PROMPT:
            prefix = self._teacher.prefix
            sizes |= {"bytes": prefix.num_bytes, "prompt_tokens": prefix.num_positions}
        tests = {kind: self._tested(arm, adapter, kind) for kind in self._task.tests}
        append_run(given.out, {**key, **sizes, **made, "tests": tests, **self._times(arm, adapter)})

    @cached_property
    def _teacher_texts(self) -> tuple[Teacher, list[ConversionText]]:
        """The prompt as a teacher, and the model's own answers behind it."""
        cases = [Case(user, NO_ANSWER, group=user) for user in self._task.learnt_from]
        prefix, questions = behind_prefix(self._core.model, self._questions(cases, True))
        prompts = [q.example.ids[: q.example.num_prompt] for q in questions]
        answers = answer_all(self._core, prompts, self._task.max_tokens, adapter=prefix)
        chats = [
            [{"role": "user", "content": case.user}, {"role": "assistant", "content": answer}]
            for case, answer in zip(cases, answers, strict=True)
            if answer.strip()
        ]
        ids, texts = conversion_texts(self._loaded, self._task.before, chats)
        self._prompt_ids = ids
        keys, values = read_prefix(self._loaded.model, ids)
        return Teacher(self._loaded.model, Prefix("", "", keys=keys, values=values)), texts

    @property
    def _teacher(self) -> Teacher:
        return self._teacher_texts[0]

    @cached_property
    def _prompt_results(self) -> dict[str, Evaluation]:
        """What the prompt itself scores, by kind of test."""
        return {
            kind: evaluate(
                self._core,
                PROMPT.name,
                None,
                self._questions(cases, True),
                self._task.rules,
                self._task.max_tokens,
            )
            for kind, cases in self._task.tests.items()
        }

    def _made(self, arm: Arm, rate: float | None) -> tuple[Parameters | None, dict[str, Any]]:
        """The adapter of an arm, and what making it took."""
        if rate is None:
            return None, {"convert_s": None, "steps_made": None, "layer_error": None}
        given, (teacher, texts) = self._given, self._teacher_texts
        error, started_s = None, time.perf_counter()
        parameters: Parameters
        if arm.kind == "ntk":
            config = ConvertConfig(
                r=teacher.model.shape.head_dim,
                s=arm.size,
                fit_steps=given.fit_steps,
                max_queries=2048,
                distill_steps=0,
                seed=given.seed,
            )
            parameters, fit = convert(teacher, texts, config, results.note)
            error = statistics.mean(fit.fitted) / statistics.mean(fit.without)
        else:
            parameters = PrefixParameters(teacher.model, self._prompt_ids[: arm.size])
        distilling = DistillConfig(
            steps=given.distill_steps, rate=rate, max_minutes=given.minutes, seed=given.seed
        )
        made = distill(teacher, parameters, texts[: -num_held_out(texts)], distilling)
        results.synchronize(given.device)
        spent_s = time.perf_counter() - started_s
        return parameters, {"convert_s": spent_s, "steps_made": made, "layer_error": error}

    def _tested(self, arm: Arm, adapter: Adapter | None, kind: str) -> dict[str, Any]:
        """Scores of one kind of test, and agreement with the prompt's own answers."""
        prompts, cases = self._prompt_results[kind], self._task.tests[kind]
        found = prompts
        if arm != PROMPT:
            rules, questions = self._task.rules, self._questions(cases, False)
            limit = self._task.max_tokens
            found = evaluate(self._core, arm.name, adapter, questions, rules, limit)
        first = next(iter(found.scores.values()))
        same = [a == b for a, b in zip(found.answers, prompts.answers, strict=True)]
        return {
            "n": len(cases),
            "scores": {rule: statistics.fmean(values) for rule, values in found.scores.items()},
            "interval": interval(first),
            "loss": None if cases[0].answer == NO_ANSWER else found.loss,
            "same_answers": statistics.fmean(same),
            **self._agreement(arm, adapter, prompts, cases),
            "answers": list(found.answers[:_ANSWERS]),
        }

    def _agreement(
        self, arm: Arm, adapter: Adapter | None, prompts: Evaluation, cases: Sequence[Case]
    ) -> dict[str, float | None]:
        """How often the likeliest tokens of the prompt's own answers are those of the prompt."""
        chats: list[Chat] = [
            [{"role": "user", "content": case.user}, {"role": "assistant", "content": answer}]
            for case, answer in zip(cases, prompts.answers, strict=True)
            if answer.strip()
        ]
        if arm == PROMPT or not chats:
            return dict.fromkeys(("top1", "whole_answers", "kl"))
        _, texts = conversion_texts(self._loaded, self._task.before, chats)
        alike = asdict(agreement(self._teacher, adapter, texts))
        alike["whole_answers"] = alike.pop("answers")
        return alike

    def _times(self, arm: Arm, adapter: Adapter | None) -> dict[str, float | None]:
        """Time to the first token; `read_ms`: with the prompt's keys and values in memory."""
        times: dict[str, float | None] = {"ttft_ms": None, "read_ms": None}
        if self._given.no_timing:
            return times
        cases = next(iter(self._task.tests.values()))
        questions = self._questions(cases, arm == PROMPT)
        repeats = self._given.repeats
        times["ttft_ms"] = first_token_ms(self._core, adapter, questions, repeats)
        if arm == PROMPT:
            prefix, rest = behind_prefix(self._core.model, questions)
            times["read_ms"] = first_token_ms(self._core, prefix, rest, repeats)
        return times

    def _questions(self, cases: Sequence[Case], is_behind_prompt: bool) -> list[Question]:
        before = self._task.before if is_behind_prompt else []
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "questions.jsonl"
            chats = [{"messages": [*before, *case.messages]} for case in cases]
            path.write_text("".join(json.dumps(chat) + "\n" for chat in chats))
            limit = self._core.model.context_tokens - 1
            eos_id = min(self._loaded.eos_ids)
            return read_questions(path, self._loaded.tokenizer, eos_id, max_tokens=limit)
