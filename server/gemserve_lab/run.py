"""Runs examples under the methods, stores every outcome, and averages them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from gemserve.calibration.search.example import Example, ExampleDraw, Subtasks, recall
from gemserve.contract.events import Filtered, Finished, TextDelta
from gemserve.contract.filter_options import FilterParams, Keep, kept_count
from gemserve.contract.reports import FilterReport
from gemserve.contract.requests import Request
from gemserve.contract.sampling import SamplingParams
from gemserve.engine.core import Core
from gemserve.filtering.protected_budget import count_always_read
from gemserve.json_lines import parse_objects
from gemserve_lab.methods_compared import (
    CHOSEN_OUTSIDE,
    constants_of,
    evictor_of,
    keep_of,
    params_of,
)
from gemserve_lab.metrics import score_answer
from gemserve_lab.unfiltered import answer_unfiltered


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One example under one method. `recall`: share of the gold tokens kept; None if unknown.

    `prompt_tokens` is the nominal length. `samples` is how many examples share it, which determines
    their depths. For an example from a file, these are its real length and 1, and `index` is its
    line. `coverage`, `reason`: as in the filter's report.
    """

    subtask: str
    prompt_tokens: int
    samples: int
    index: int
    method: str
    keep: int | float
    score: float
    recall: float | None
    kept_tokens: int
    depth: float | None
    text: str
    coverage: float | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """Averages over the examples of one method, subtask and length."""

    method: str
    subtask: str
    prompt_tokens: int
    keep: Keep
    score: float
    recall: float | None
    kept_tokens: float
    n: int

    def as_json(self) -> dict[str, object]:
        return asdict(self)


Key = tuple[str, int, int, int, str, int | float]


class Outcomes:
    """All outcomes of a run, in memory and in a file, so that a stopped run can be continued.

    The file may hold lines of other runs (other weights, another seed, task or filter layer), and
    of methods whose constants have changed since. They stay there and are not used.
    """

    def __init__(self, path: Path | None, run: dict[str, object]) -> None:
        self._path, self._run = path, run
        self._known: dict[Key, Outcome] = {}
        names = {field.name for field in fields(Outcome)}
        if path is not None and path.exists():
            text = path.read_text()
            whole = text[: text.rfind("\n") + 1]
            if whole != text:  # a run was killed while it was writing this line
                path.write_text(whole)
            for _, entry in parse_objects(whole.encode()):
                is_same = entry.pop("run") == run
                constants = entry.pop("constants", None)
                if is_same and set(entry) == names and constants == constants_of(entry["method"]):
                    self._remember(Outcome(**entry))

    def get(
        self, draw: ExampleDraw, subtask: str, method: str, keep: int | float
    ) -> Outcome | None:
        return self._known.get((subtask, draw.num_tokens, draw.samples, draw.index, method, keep))

    def add(self, outcome: Outcome) -> None:
        self._remember(outcome)
        if self._path is not None:
            with self._path.open("a") as file:
                written = {"run": self._run, "constants": constants_of(outcome.method)}
                file.write(json.dumps(written | asdict(outcome)) + "\n")

    def _remember(self, o: Outcome) -> None:
        self._known[(o.subtask, o.prompt_tokens, o.samples, o.index, o.method, o.keep)] = o


def evaluate(
    core: Core,
    subtasks: Subtasks,
    draws: Sequence[ExampleDraw],
    methods: Sequence[str],
    keep: int | float,
    outcomes: Outcomes,
) -> Iterator[Outcome]:
    """Run every subtask, draw and method, except those that `outcomes` already has."""
    for name, maker in subtasks.items():
        for draw in draws:
            by_method: dict[str, Outcome] = {}
            for method in methods:
                stored = outcomes.get(draw, name, method, keep)
                if stored is not None:
                    by_method[method] = stored
            missing = [method for method in methods if method not in by_method]
            if missing:
                example = maker(core.tokenizer, draw)
                for made in run_example(core, example, draw.samples, missing, keep):
                    outcomes.add(made)
                    by_method[made.method] = made
            yield from (by_method[method] for method in methods)


def average(outcomes: Iterable[Outcome]) -> list[Row]:
    """One row for each subtask, length and method, in the order of first appearance."""
    groups: dict[tuple[str, int, str], list[Outcome]] = {}
    for outcome in outcomes:
        key = (outcome.subtask, outcome.prompt_tokens, outcome.method)
        groups.setdefault(key, []).append(outcome)
    rows: list[Row] = []
    for (subtask, num_tokens, method), group in groups.items():
        recalls = [o.recall for o in group if o.recall is not None]
        rows.append(
            Row(
                method=method,
                subtask=subtask,
                prompt_tokens=num_tokens,
                keep=keep_of(method, group[0].keep),
                score=round(_mean([o.score for o in group]), 4),
                recall=round(_mean(recalls), 4) if recalls else None,
                kept_tokens=round(_mean([o.kept_tokens for o in group]), 1),
                n=len(group),
            )
        )
    return rows


def run_example(
    core: Core, example: Example, samples: int, methods: Sequence[str], keep: int | float
) -> list[Outcome]:
    """Generate greedily under each method and score the answers."""
    num_tokens = len(example.prompt.ids)
    outcomes: list[Outcome] = []
    for answer in _answers(core, example, methods, keep):
        report = answer.report
        is_short = answer.method != "none" and answer.kept_tokens == num_tokens
        outcomes.append(
            Outcome(
                subtask=example.subtask,
                prompt_tokens=example.num_tokens,
                samples=samples,
                index=example.index,
                method=answer.method,
                keep=keep,
                score=score_answer(answer.text, example),
                recall=None if answer.kept is None else recall(example.gold, answer.kept),
                kept_tokens=answer.kept_tokens,
                depth=example.depth,
                text=answer.text,
                coverage=None if report is None else report.coverage,
                reason=report.reason if report else "short_prompt" if is_short else None,
            )
        )
    return outcomes


@dataclass(frozen=True, slots=True)
class _Answer:
    """A method's answer. `kept`: half-open ranges of the prompt; None if each layer has its own."""

    method: str
    text: str
    kept_tokens: int
    kept: Sequence[tuple[int, int]] | None
    report: FilterReport | None = None


def _answers(
    core: Core, example: Example, methods: Sequence[str], keep: int | float
) -> Iterator[_Answer]:
    """The answer of each method. Those that choose outside of the engine protect as sieve does."""
    ids = example.prompt.ids
    count = min(len(ids), kept_count(keep, len(ids)))
    documents = len(ids) - count_always_read(example.prompt.protected, len(ids))
    of_documents = min(documents, kept_count(keep, documents))
    evicting = {m: evictor for m in methods if (evictor := evictor_of(m)) is not None}
    # one prefill is enough for both, unless the engine has to say why one cannot be used
    if "none" in methods and evicting and not core.model.has_states:
        method, evictor = next(iter(evicting.items()))
        answer, evicted = answer_unfiltered(core, ids, example.max_tokens, evictor, count)
        yield _Answer("none", _text(core, answer), len(ids), ((0, len(ids)),))
        yield _Answer(method, _text(core, evicted), count, None)
        methods = [m for m in methods if m not in ("none", method)]
    for method in methods:
        if method in CHOSEN_OUTSIDE:
            kept = CHOSEN_OUTSIDE[method](core.tokenizer, example, of_documents)
            text, _ = generate(
                core, example, [ids[p] for p in kept], FilterParams(method="none", keep=16)
            )
            yield _Answer(method, text, len(kept), [(p, p + 1) for p in kept])
        else:
            text, report = generate(
                core, example, ids, params_of(method, keep, core.config.filter_window)
            )
            yield _Answer(method, text, report.kept_tokens, report.selection, report)


def generate(
    core: Core, example: Example, ids: Sequence[int], params: FilterParams
) -> tuple[str, FilterReport]:
    request = Request(
        request_id="eval",
        **example.prompt.fields | {"prompt_ids": ids},
        sampling=SamplingParams(max_tokens=example.max_tokens, temperature=0.0),
        filter=params,
    )
    text = ""
    report: FilterReport | None = None
    for event in core.run_alone(request):
        if isinstance(event, Filtered):
            report = event.report
        elif isinstance(event, TextDelta):
            text += event.text
        else:
            assert isinstance(event, Finished)
            assert event.error is None, event.error
    assert report is not None
    return text, report


def _text(core: Core, tokens: Sequence[int]) -> str:
    text: Any = core.tokenizer.decode(tokens, skip_special_tokens=True)
    return str(text)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def pool_lengths(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """A file's outcomes, with their mean length in place of each length."""
    if not outcomes:
        return []
    mean = round(sum(o.prompt_tokens for o in outcomes) / len(outcomes))
    return [replace(o, prompt_tokens=mean) for o in outcomes]
