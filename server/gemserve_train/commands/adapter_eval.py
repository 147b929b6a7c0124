"""`gemserve adapter eval`: score answers to a file of chats, with an adapter and without."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gemserve.cli.options import MODEL_OPTIONS, add_options, number, read_options
from gemserve.cli.tables import aligned
from gemserve.config import EngineConfig, ModelConfig
from gemserve.errors import AdapterError, ConfigError

if TYPE_CHECKING:  # imported for types only: a command that runs no model loads no torch
    from gemserve.engine.core import Core
    from gemserve.model.adapter import Adapter
    from gemserve_train.evaluation.answer_rules import Rule
    from gemserve_train.evaluation.evaluate import Evaluation

_RULES = ("exact", "contains", "json", "fields", "pattern")


def add_command(actions: Any) -> None:
    parser = actions.add_parser("eval", help="score answers with an adapter and without")
    parser.add_argument("--adapter", type=Path, help="the adapter's folder (default: none)")
    parser.add_argument(
        "--data", type=Path, required=True, help="questions and answers, in the format of train"
    )
    parser.add_argument(
        "--rule",
        action="append",
        choices=_RULES,
        help="how an answer is compared with the expected one; may be repeated (default: exact)",
    )
    parser.add_argument("--pattern", help="the regular expression of --rule pattern")
    parser.add_argument(
        "--few-shot", type=number(1), help="also ask with this many chats of --shots before"
    )
    parser.add_argument("--shots", type=Path, help="the file of --few-shot's chats")
    parser.add_argument("--limit", type=number(1), help="ask only the first questions")
    parser.add_argument(
        "--max-tokens", type=number(1), default=64, help="longest answer (default: %(default)s)"
    )
    parser.add_argument("--seed", type=number(0), default=0, help="which chats --few-shot draws")
    parser.add_argument("--answers", type=Path, help="write all answers to this file")
    parser.add_argument("--json", action="store_true", help="end the output with a line of JSON")
    add_options(parser, MODEL_OPTIONS)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    rules = _rules(arguments)
    if (arguments.few_shot is None) != (arguments.shots is None):
        raise ConfigError("--few-shot and --shots: must be given together")
    model: ModelConfig = read_options(arguments, MODEL_OPTIONS, ModelConfig)
    from gemserve.engine.build import assemble
    from gemserve.model.loading.loader import load

    loaded = load(model)
    core = assemble(loaded, EngineConfig(calibrate="off", cache_memory=0.0))
    evaluations = _evaluate_all(arguments, core, rules)
    result = summary(evaluations)
    print(*_table(evaluations), sep="\n")
    for name, other, gaps in ((g["of"], g["to"], g["differences"]) for g in result["paired"]):
        for rule, (mean, low, high) in gaps.items():
            print(f"{name} − {other}, {rule}: {mean:+.3f} ({low:+.3f} to {high:+.3f}, 95%, paired)")
    if arguments.answers is not None:
        given = {evaluation.name: evaluation.answers for evaluation in evaluations}
        arguments.answers.write_text(json.dumps(given, indent=1, ensure_ascii=False) + "\n")
    if arguments.json:
        print(json.dumps(result))
    return 0


def _rules(arguments: argparse.Namespace) -> dict[str, Rule]:
    from gemserve_train.evaluation.answer_rules import RULES, matching

    chosen = arguments.rule or ["exact"]
    if ("pattern" in chosen) != (arguments.pattern is not None):
        raise ConfigError("--rule pattern and --pattern: must be given together")
    try:
        return {
            name: matching(arguments.pattern) if name == "pattern" else RULES[name]
            for name in chosen
        }
    except re.error as error:
        raise ConfigError(f"--pattern: is no regular expression: {error}") from error


def _evaluate_all(
    arguments: argparse.Namespace, core: Core, rules: Mapping[str, Rule]
) -> list[Evaluation]:
    """Without anything, after examples if --few-shot is given, and with the adapter."""
    from gemserve_train.evaluation.chats import draw_shots, read_questions
    from gemserve_train.evaluation.evaluate import evaluate
    from gemserve_train.examples import end_token

    eos_id = end_token(core.tokenizer, core.eos_ids)
    limits = {"limit": arguments.limit, "max_tokens": core.model.context_tokens - 1}
    contestants: list[tuple[str, Adapter | None, Sequence[list[dict[str, str]]]]] = [
        ("without", None, ())
    ]
    if arguments.few_shot is not None:
        shots = draw_shots(arguments.shots, arguments.few_shot, arguments.seed)
        contestants.append((f"few-shot {arguments.few_shot}", None, shots))
    if arguments.adapter is not None:
        contestants.append((arguments.adapter.name, _load(arguments.adapter, core), ()))
    evaluations = []
    for name, adapter, before in contestants:
        questions = read_questions(arguments.data, core.tokenizer, eos_id, shots=before, **limits)
        evaluations.append(evaluate(core, name, adapter, questions, rules, arguments.max_tokens))
    return evaluations


def _load(path: Path, core: Core) -> Adapter:
    from gemserve.adapters.kinds import load_adapter
    from gemserve.model.base_model import base_of

    try:
        return load_adapter(path.name, path.resolve(), core.model, base_of(core.model), 1 << 40)
    except AdapterError as error:
        raise AdapterError(f"{path}: {error}") from error


def summary(evaluations: Sequence[Evaluation]) -> dict[str, Any]:
    """The results as JSON: each contestant, and the last one's differences from the others."""
    from gemserve_train.evaluation.answer_rules import interval, paired

    rows = [
        {
            "name": e.name,
            "n": len(e.answers),
            "scores": {
                rule: {"mean": sum(scores) / len(scores), "interval": interval(scores)}
                for rule, scores in e.scores.items()
            },
            "loss": e.loss,
            "prompt_tokens": e.prompt_tokens,
            "seconds": e.seconds,
        }
        for e in evaluations
    ]
    last = evaluations[-1]
    gaps = [
        {
            "of": last.name,
            "to": other.name,
            "differences": {r: paired(last.scores[r], other.scores[r]) for r in last.scores},
        }
        for other in evaluations[:-1]
    ]
    return {"results": rows, "paired": gaps}


def _table(evaluations: Sequence[Evaluation]) -> list[str]:
    from gemserve_train.evaluation.answer_rules import interval

    rules = list(evaluations[0].scores)
    lines = [("", "n", "prompt", *rules, "loss", "seconds")]
    for e in evaluations:
        scores = []
        for values in e.scores.values():
            low, high = interval(values)
            scores.append(f"{sum(values) / len(values):.3f} ({low:.3f} to {high:.3f})")
        counts = (str(len(e.answers)), f"{e.prompt_tokens:.0f}")
        lines.append((e.name, *counts, *scores, f"{e.loss:.3f}", f"{e.seconds:.1f}"))
    return aligned(lines, left=(0,))
