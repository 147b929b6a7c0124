"""A long prompt against the adapters that are made from it.

With --model the prompts are those of `conversion_tasks.py`. The model answers questions behind the
prompt. Terms of NTK-Attention and short prefixes learn to predict what it predicts there. Each is
then tested as it is served, without the prompt: by the task's rules, and by how often it answers as
the prompt does. Every finished run is a line of a file, and a run that is there is not repeated.

Without it the built-in model has a handbook of 2,000 tokens before it: prose with a few facts. The
chats are of three kinds. Some ask about a text of their own, and the prompt should not change their
answers. Some ask about a fact of the handbook that the fitting chats ask about, too. Some ask about
a fact that no fitting chat asks about, so only the prompt's keys hold it. For each kind the result
says how often answers agree with those after the prompt, with the adapter and with nothing in its
place.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository root

from benchmarks.adapters.comparison import first_token_ms, request_of
from benchmarks.adapters.conversion_tasks import CONVERSIONS, NO_ANSWER
from benchmarks.adapters.tasks import Case
from benchmarks.shared import results
from benchmarks.shared.finished_runs import append_run, find_run, read_runs
from gemserve.adapters.kinds import load_adapter
from gemserve.adapters.prefix import Prefix
from gemserve.config import EngineConfig, ModelConfig
from gemserve.contract.events import Finished, TextDelta
from gemserve.engine.build import assemble
from gemserve.engine.core import Core
from gemserve.model.adapter import Adapter
from gemserve.model.base_model import base_of
from gemserve.model.loading.loader import LoadedModel, load
from gemserve.model.passes.causal_model import CausalModel
from gemserve.synthetic.problems import Problem, ProblemMaker
from gemserve.synthetic.prose import stdlib_sentences
from gemserve_lab.tasks.haystack import draw_filler
from gemserve_train.conversion_texts import ConversionText, after_messages
from gemserve_train.convert import ConvertConfig, convert, num_held_out
from gemserve_train.distill import DistillConfig, Teacher, agreement, distill
from gemserve_train.evaluation.answer_rules import interval
from gemserve_train.evaluation.chats import Question, behind_prefix, read_questions
from gemserve_train.evaluation.evaluate import Evaluation, answer_all, evaluate
from gemserve_train.examples import end_token
from gemserve_train.parameters import Parameters, PrefixParameters, read_prefix

Chat = list[dict[str, str]]
_BUILTIN_TESTS = 100  # chats of each kind
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


def main() -> None:
    arguments = read_arguments()
    if arguments.model is not None:
        convert_real(arguments)
    else:
        convert_builtin(arguments)


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=1900, help="tokens of prose in the prompt")
    parser.add_argument("--facts", type=int, default=16, help="the chats ask about half of them")
    parser.add_argument("--chats", type=int, help="chats to fit on, 400, or 120 with --model")
    parser.add_argument("--asked", type=float, default=0.5, help="share of chats about the facts")
    parser.add_argument("--fit-steps", type=int, help="for each layer, 600, or 0 with --model")
    parser.add_argument("--distill-steps", type=int, default=400)
    parser.add_argument("--seed", type=int, default=1)
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
    results.add_common(parser)
    arguments = parser.parse_args()
    arguments.chats = arguments.chats or (120 if arguments.model else 400)
    if arguments.fit_steps is None:
        arguments.fit_steps = 0 if arguments.model else 600
    return arguments


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
            eos_id = end_token(self._loaded.tokenizer, self._loaded.eos_ids)
            return read_questions(path, self._loaded.tokenizer, eos_id, max_tokens=limit)


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


def convert_builtin(arguments: argparse.Namespace) -> None:
    loaded = load(ModelConfig(device=arguments.device))
    model, rng = loaded.model, Random(f"convert {arguments.seed}")
    text, facts = handbook(loaded, arguments.tokens, arguments.facts, rng)
    known = facts[: len(facts) // 2]
    fitting, tested = draw_chats(arguments, known, facts[len(known) :], rng)
    system = [{"role": "system", "content": text}]
    ids, texts = conversion_texts(loaded, system, fitting)
    keys, values = read_prefix(model, ids)
    prefix = Prefix("", "", keys=keys, values=values)
    config = ConvertConfig(
        r=model.shape.head_dim,
        fit_steps=arguments.fit_steps,
        distill_steps=arguments.distill_steps,
        seed=arguments.seed,
    )
    start = time.perf_counter()
    teacher = Teacher(model, prefix)
    parameters, fit = convert(teacher, texts, config, results.note)
    rows: list[dict[str, Any]] = [
        {
            "positions": len(ids),
            "prefix_bytes": prefix.num_bytes,
            "parameters": parameters.num_parameters,
            "convert_s": time.perf_counter() - start,
            "layer_error": statistics.mean(fit.fitted),
            "layer_error_without": statistics.mean(fit.without),
        }
    ]
    for kind, chats in tested.items():
        _, held_out = conversion_texts(loaded, system, chats)
        for name, other in (("nothing", None), ("ntk 16", parameters.adapter())):
            alike = agreement(teacher, other, held_out)
            rows.append({"chats": kind, "instead": name, **asdict(alike)})
    adapter = stored(model, parameters)
    rows += measure_served(loaded, text, tested["own text"], adapter, arguments.repeats)
    results.finish("convert", arguments.device, rows, arguments.json)


def handbook(
    loaded: LoadedModel, num_tokens: int, num_facts: int, rng: Random
) -> tuple[str, list[Problem]]:
    """Prose with facts in it, and the facts."""
    prose = list(draw_filler(loaded.tokenizer, stdlib_sentences(), num_tokens, rng))
    facts = [ProblemMaker(rng).single() for _ in range(num_facts)]
    for fact in facts:
        at = rng.randrange(len(prose))
        prose[at:at] = fact.statements
    return " ".join(prose), facts


def draw_chats(
    arguments: argparse.Namespace, known: list[Problem], unknown: list[Problem], rng: Random
) -> tuple[list[Chat], dict[str, list[Chat]]]:
    """Chats to fit on, which ask about `known` facts only, and chats to test with by kind."""
    about_facts = round(arguments.asked * arguments.chats)
    fitting = [chat_with_text(rng) for _ in range(arguments.chats - about_facts)]
    fitting += [chat_about(rng.choice(known)) for _ in range(about_facts)]
    rng.shuffle(fitting)
    tested = {
        "own text": [chat_with_text(rng) for _ in range(_BUILTIN_TESTS)],
        "asked before": [chat_about(fact) for fact in known],
        "never asked": [chat_about(fact) for fact in unknown],
    }
    return fitting, tested


def chat_with_text(rng: Random) -> Chat:
    """A chat whose question is about a text in the same message."""
    problem = ProblemMaker(rng).single()
    return turns(f"{' '.join(problem.statements)}\n\n{problem.question}", problem)


def chat_about(problem: Problem) -> Chat:
    """A chat whose question only the handbook answers."""
    return turns(problem.question, problem)


def turns(question: str, problem: Problem) -> Chat:
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": problem.answers[0].text},
    ]


def measure_served(
    loaded: LoadedModel, text: str, chats: list[Chat], adapter: Adapter, repeats: int
) -> list[dict[str, Any]]:
    """Share of right answers and time to the first token, measured with the engine."""
    core = assemble(loaded, EngineConfig(kv_memory_bytes=256 << 20))
    arms: dict[str, tuple[list[dict[str, str]], Adapter | None]] = {
        "the prompt": ([{"role": "system", "content": text}], None),
        "nothing": ([], None),
        "ntk 16": ([], adapter),
    }
    rights: dict[str, list[bool]] = {name: [] for name in arms}
    firsts: dict[str, list[float]] = {name: [] for name in arms}
    for chat in [*chats[:repeats], *chats]:  # the first ones warm up
        for name, (system, used_adapter) in arms.items():  # in turn, so that all see the same load
            ids = loaded.tokenizer.apply_chat_template(
                [*system, *chat[:-1]], add_generation_prompt=True, return_dict=False
            )
            reply, first_s = answer(core, tuple(ids), used_adapter)
            rights[name].append(reply.strip() == chat[-1]["content"])
            firsts[name].append(first_s)
    return [
        {
            "chats": "own text",
            "instead": name,
            "right": statistics.mean(rights[name][repeats:]),
            "ttft_ms": 1e3 * statistics.median(firsts[name][repeats:]),
        }
        for name in arms
    ]


def answer(core: Core, ids: tuple[int, ...], adapter: Adapter | None) -> tuple[str, float]:
    """The engine's answer, and seconds to its first token."""
    reply, first_s, start = "", 0.0, time.perf_counter()
    for event in core.run_alone(request_of(ids, adapter, 16)):
        if isinstance(event, TextDelta):
            first_s = first_s or time.perf_counter() - start
            reply += event.text
        elif isinstance(event, Finished):
            assert event.error is None, event.error
    return reply, first_s


if __name__ == "__main__":
    main()
