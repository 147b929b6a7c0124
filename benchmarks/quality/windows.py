"""Does a filter that reads a document in windows find what one pass finds, and what does it cost?

Everything runs through the server's defaults, in this process. A *cell* is a task at one length in
one *way*: `windows`, `one pass`, `none` (the whole prompt is read) or `bm25` (the passages that
share most words with the question are read). The same questions are asked in every way. A cell that
is impossible, because a prompt does not fit the context, is reported with the reason.

    python benchmarks/quality/windows.py --out windows.jsonl
    python benchmarks/quality/windows.py --tasks natural,pairs --lengths 131072,1000000 \
        --samples 5 --ways windows,bm25 --out windows.jsonl

With `--no-answers` only what is kept is looked at, which takes a third of the time at 4,000 tokens.

A finished cell is a line in the file `--out` at once, and is not measured again. Of the tasks,
`real` are the questions of `real_documents.py` with their contexts of 3,000 to 7,000 tokens,
`real_padded` the same with other documents of the machine around them, and `held_out` the held-out
questions, which are about other documents. From 65,536 tokens on the tasks in prose ask several
questions about one document, one after the other, so that the later ones can use what the cache
has; `benchmarks/shared/long_documents.py` says what such documents are filled with. `choose_s` is
the median time until the filter has chosen, `first_choose_s` that of the first question about each
document.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository root

from benchmarks.quality import real_padding
from benchmarks.shared import long_documents, peak_memory, results
from benchmarks.shared.finished_runs import append_run, find_run, read_runs
from benchmarks.shared.timed_answers import HAS_SEGMENTS, TimedAnswer, answer, filter_options
from gemserve.calibration.search.example import Example, ExampleDraw, recall
from gemserve.config import EngineConfig
from gemserve.errors import RequestError
from gemserve.filtering.protected_budget import count_always_read
from gemserve.llm import LLM
from gemserve.prompting.prompt import Prompt
from gemserve_lab.methods_compared import CHOSEN_OUTSIDE
from gemserve_lab.metrics import score_answer
from gemserve_lab.tasks import needle, ruler

PROSE = ("natural", "near_misses", "pairs", "far_definition")
REAL = ("real", "real_padded", real_padding.HELD_OUT)
BARE = ("real", real_padding.HELD_OUT)  # their contexts have lengths of their own
RULER = ("vt", "niah_multiquery", "cwe", "fwe")
TASKS = (*PROSE, *REAL, *RULER)
WAYS = ("windows", "one pass", "none", *CHOSEN_OUTSIDE)
# By default: 8,000 leave room for an answer in a context of 8,192.
LENGTHS = {
    **dict.fromkeys(PROSE, (4096, 8000, 16384, 32768)),
    **dict.fromkeys(BARE, (0,)),
    "real_padded": (21504,),
    **dict.fromkeys(RULER, (4096, 8000)),
}
LONG = 65536  # from here on several questions are about one document
SAMPLES, LONG_SAMPLES = 20, 5


@dataclass(slots=True)
class Cell:
    """What has been measured of one task, length and way. Prompts are not kept."""

    scores: list[float] = field(default_factory=list)  # of answers
    recalls: list[float | None] = field(default_factory=list)
    linked: list[float | None] = field(default_factory=list)
    choose_s: list[float | None] = field(default_factory=list)
    first_choose_s: list[float | None] = field(default_factory=list)
    ttft_s: list[float | None] = field(default_factory=list)
    total_s: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    reports: list[dict[str, Any]] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)

    def figures(self) -> dict[str, Any]:
        """The figures of the row. Without an answer, only why there is none."""
        refused = {"refused": dict(self.refused)} if self.refused else {}
        if not self.tokens:
            return {"n": 0, "impossible": next(iter(self.refused), "no examples"), **refused}
        return {
            "n": len(self.tokens),
            "recall": _mean(self.recalls),
            "linked_recall": _mean(self.linked),
            "right": _mean([*self.scores]),
            "choose_s": _median(self.choose_s),
            "first_choose_s": _median(self.first_choose_s),
            "ttft_s": _median(self.ttft_s),
            "total_s": _median(self.total_s),
            "mean_tokens": round(statistics.mean(self.tokens)),
            **{
                name: _median([report[name] for report in self.reports])
                for name in ("kept_tokens", "cached_tokens", "windows", "cached_windows")
            },
            "window_tokens": _median([report["window"] for report in self.reports]),
            "reasons": dict(Counter(str(report["reason"]) for report in self.reports)),
            "scores": self.scores,
            "recalls": self.recalls,
            **refused,
        }


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(statistics.mean(known), 4) if known else None


def _median(values: list[Any]) -> float | None:
    known = [value for value in values if value is not None]
    return round(statistics.median(known), 4) if known else None


def main() -> None:
    arguments = _parser().parse_args()
    tasks, ways = _names(arguments.tasks, TASKS), _names(arguments.ways, WAYS)
    settings = EngineConfig(max_prompt_tokens=arguments.max_prompt_tokens)
    llm = LLM(arguments.model, settings)
    rows: list[dict[str, Any]] = []
    for task in tasks:
        lengths = LENGTHS[task]
        if arguments.lengths and task not in BARE:
            lengths = tuple(results.numbers(arguments.lengths))
        for length in lengths:
            for way, segment_size in _with_segments(ways, arguments.window):
                key = _key(llm, arguments, task, length, way, segment_size)
                row = _finished(arguments.out, key)
                if row is None:
                    results.note(f"{task} {length} {way} {segment_size or ''}")
                    row = key | _measure(llm, arguments, task, length, way, segment_size)
                    if arguments.out is not None:
                        append_run(arguments.out, row)
                rows.append(row)
                if not arguments.json:
                    results.note("")
                    print(json.dumps(row), flush=True)
    short = [{k: v for k, v in row.items() if k not in ("scores", "recalls")} for row in rows]
    results.finish("windows", "cpu", short, arguments.json)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2", help="default: %(default)s")
    parser.add_argument("--tasks", default=",".join(TASKS), help="default: %(default)s")
    parser.add_argument(
        "--lengths",
        default="",
        help=f"in tokens, of all tasks but {' and '.join(BARE)} (default: the task's)",
    )
    parser.add_argument(
        "--samples",
        type=int,
        help=f"of each cell (default: {SAMPLES}; {LONG_SAMPLES} from {LONG} tokens on; all real "
        "questions)",
    )
    parser.add_argument("--ways", default=",".join(WAYS), help="default: %(default)s")
    parser.add_argument(
        "--window", default="auto", help="tokens of a window, or several (default: %(default)s)"
    )
    parser.add_argument("--no-answers", action="store_true", help="only what is kept")
    parser.add_argument("--keep", help="count, fraction or auto (default: the server's)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--max-prompt-tokens", type=int, help="the server's option (default: its default)"
    )
    parser.add_argument("--out", type=Path, help="a line for each cell; what is there stands")
    parser.add_argument("--json", action="store_true", help="only the result line")
    return parser


def _names(text: str, known: tuple[str, ...]) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in known:
            raise SystemExit(f"{name!r} must be among {', '.join(known)}")
    return names


def _with_segments(ways: list[str], segments: str) -> Iterator[tuple[str, int | str | None]]:
    """Each way with its size of segments; `windows` once for each of them."""
    for way in ways:
        if way != "windows":
            yield way, None
            continue
        for segment_size in segments.split(","):
            yield way, segment_size if segment_size == "auto" else int(segment_size)


def _samples(given: int | None, task: str, length: int) -> int:
    if given is not None:
        return given
    if task in REAL:
        return len(real_padding.questions(task))
    return SAMPLES if length < LONG else LONG_SAMPLES


def _key(
    llm: LLM, arguments: argparse.Namespace, task: str, length: int, way: str, segment_size: Any
) -> dict[str, Any]:
    """What a finished cell must have in common with one that is wanted."""
    keep = _keep(arguments.keep)
    return {
        "task": task,
        "prompt_tokens": length,
        "way": way,
        "window": segment_size,
        "keep": llm.core.config.filter_keep if keep is None else keep,
        "samples": _samples(arguments.samples, task, length),
        "seed": arguments.seed,
        "model": arguments.model,
        "has_answers": not arguments.no_answers,
    }


def _keep(text: str | None) -> Any:
    if text is None or text == "auto":
        return text
    return float(text) if "." in text else int(text)


def _finished(path: Path | None, key: dict[str, Any]) -> dict[str, Any] | None:
    """A finished cell. One that was impossible is tried again: the server may have changed."""
    runs = [] if path is None else read_runs(path)
    return find_run([run for run in runs if "impossible" not in run], key)


def _measure(
    llm: LLM, arguments: argparse.Namespace, task: str, length: int, way: str, segment_size: Any
) -> dict[str, Any]:
    if way == "windows" and not HAS_SEGMENTS:
        return {"n": 0, "impossible": "this gemserve has no filter.window"}
    cell, before = Cell(), peak_memory.mark()
    samples = _samples(arguments.samples, task, length)
    # a tenant's documents are its own: no way finds what another one has left in the cache, and no
    # document the beginning that it shares with another
    number, name = 0, f"{task} {length} {way} {segment_size} {arguments.seed}"
    for is_first, example in _examples(llm.tokenizer, task, length, samples, arguments.seed):
        number += is_first
        try:
            answered = _answer(llm, example, way, segment_size, arguments, f"{name} {number}")
        except RequestError as error:
            cell.refused[str(error)] += 1
            if length >= LONG:
                break  # the others are as long
            continue
        _add(cell, example, answered, is_first, arguments.no_answers)
    peak = peak_memory.peak()
    mebibytes = {"rss_before_mib": before >> 20, "peak_rss_mib": peak >> 20}
    return cell.figures() | mebibytes


def _examples(
    tokenizer: Any, task: str, length: int, samples: int, seed: int
) -> Iterator[tuple[bool, Example]]:
    """Examples one at a time, and whether it is the first question about its document."""
    if task in REAL:
        for index in range(samples):
            yield True, real_padding.make_example(tokenizer, task, index, length)
    elif task in PROSE and length >= LONG:
        most = long_documents.MOST_QUESTIONS[task]
        for document in range(math.ceil(samples / min(most, LONG_SAMPLES))):
            count = min(samples - document * LONG_SAMPLES, LONG_SAMPLES, most)
            drawn = long_documents.draw_examples(
                tokenizer, task, length, count, seed * 1000 + document
            )
            for index, example in enumerate(drawn):
                yield index == 0, example
    else:
        make = (ruler if task in RULER else needle).SUBTASKS[task]
        for index in range(samples):
            draw = ExampleDraw(seed=seed, num_tokens=length, index=index, samples=samples)
            yield True, make(tokenizer, draw)


@dataclass(frozen=True, slots=True)
class _Way:
    """An answer, when the filter had chosen, and what was kept: half-open ranges of the prompt.

    `before_s`: what was done before the request. `choose_s` None: there is no filter.
    """

    answer: TimedAnswer
    choose_s: float | None
    kept: Any
    before_s: float = 0.0


def _answer(
    llm: LLM,
    example: Example,
    way: str,
    segment_size: Any,
    arguments: argparse.Namespace,
    tenant: str,
) -> _Way:
    core, keep, selects_only = llm.core, _keep(arguments.keep), arguments.no_answers
    if way in CHOSEN_OUTSIDE:
        return _answer_chosen(llm, example, way, keep, tenant, selects_only)
    if way == "none":
        options = filter_options(method="none")
    else:
        options = filter_options("off" if way == "one pass" else segment_size, keep=keep)
    made = answer(
        core, example.prompt, options, example.max_tokens, tenant, selects_only=selects_only
    )
    kept = ((0, len(example.prompt.ids)),) if way == "none" else made.report.selection
    return _Way(made, None if way == "none" else made.choose_s, kept)


def _answer_chosen(
    llm: LLM, example: Example, way: str, keep: Any, tenant: str, selects_only: bool
) -> _Way:
    """As `gemserve eval` asks it: what is chosen, and the question and the template beside."""
    core, ids = llm.core, example.prompt.ids
    started_s = monotonic()
    budget = core.config.filter_keep if keep is None else keep
    documents = len(ids) - count_always_read(example.prompt.protected, len(ids))
    most = min(documents, core.planner.calibration.most_kept(budget, documents))
    kept = CHOSEN_OUTSIDE[way](llm.tokenizer, example, most)
    chosen_s = monotonic() - started_s
    prompt = Prompt([ids[position] for position in kept], ())
    made = answer(
        core,
        prompt,
        filter_options(method="none"),
        example.max_tokens,
        tenant,
        selects_only=selects_only,
    )
    ranges = [(position, position + 1) for position in kept]
    return _Way(made, chosen_s, ranges, before_s=chosen_s)


def _add(cell: Cell, example: Example, way: _Way, is_first: bool, selects_only: bool) -> None:
    made, report = way.answer, way.answer.report
    if not selects_only:
        cell.scores.append(score_answer(made.text, example))
    cell.recalls.append(None if way.kept is None else recall(example.gold, way.kept))
    cell.linked.append(None if way.kept is None else recall(example.linked, way.kept))
    cell.choose_s.append(way.choose_s)
    if is_first:
        cell.first_choose_s.append(way.choose_s)
    cell.ttft_s.append(None if made.ttft_s is None else way.before_s + made.ttft_s)
    cell.total_s.append(way.before_s + made.total_s)
    cell.tokens.append(len(example.prompt.ids))
    cell.reports.append(
        {
            "kept_tokens": report.kept_tokens,
            "cached_tokens": report.cached_tokens,
            "reason": report.reason,
            **{
                field: getattr(report, field, None)
                for field in ("window", "windows", "cached_windows")
            },
        }
    )


if __name__ == "__main__":
    main()
