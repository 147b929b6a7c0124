"""Whether the filter still finds what a question needs when an adapter acts in its pass.

Each natural needle is asked about without an adapter and with each adapter of a folder, in one
batch. The rows have the share of the needed tokens that the filter kept, and the difference to no
adapter on the same needles. `default` is what a server does, with its fallback. A count or a
fraction is that budget without the fallback, so that a small one shows what a large one hides.

Every finished measurement is a line of --out, and a line that is there is not measured again. So
the run can be stopped and started again with the same command.

    python benchmarks/adapters/recall.py \
        --model smollm2 --adapters adapters --out recall.jsonl
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository root

from benchmarks.adapters.comparison import Contestant
from benchmarks.shared import results
from benchmarks.shared.finished_runs import append_run, read_runs
from gemserve.adapters.kinds import load_adapter
from gemserve.calibration.search.example import Example, ExampleDraw, recall
from gemserve.config import EngineConfig, ModelConfig
from gemserve.contract.events import Filtered, Finished, TextDelta
from gemserve.contract.filter_options import FilterOptions, FilterParams, parse_keep
from gemserve.contract.requests import Request
from gemserve.contract.sampling import SamplingParams
from gemserve.engine.build import assemble
from gemserve.engine.core import Core
from gemserve.errors import GemserveError
from gemserve.model.adapter import Adapter
from gemserve.model.base_model import base_of
from gemserve.model.loading.loader import LoadedModel, load
from gemserve_lab.compare import compare
from gemserve_lab.metrics import score_answer
from gemserve_lab.run import Outcome
from gemserve_lab.tasks.needle import SUBTASKS
from gemserve_train.examples import TrainingExample, end_token
from gemserve_train.trainer import TrainConfig, train

NO_ADAPTER = "none"
_SCORES = ("recall", "whole", "contains", "exact")
_TEXT = "The lantern in the hall is green. What is the colour of the lantern? It is"
_LARGEST = 1 << 32  # bytes of an adapter's file
_FILTERED_ABOVE = 2048  # tokens: the server's default


@dataclass(frozen=True, slots=True)
class Case:
    """A needle is asked about with this adapter, None for none, and this filter."""

    name: str
    adapter: Adapter | None
    keep: str
    params: FilterParams

    @property
    def labels(self) -> dict[str, str]:
        version = "" if self.adapter is None else self.adapter.version
        return {"adapter": self.name, "version": version, "keep": self.keep}


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--adapters", type=Path, help="folder whose subfolders are adapters")
    parser.add_argument("--only", default="", help="adapters whose names begin so: a,b")
    parser.add_argument("--out", type=Path, required=True, help="file of finished measurements")
    parser.add_argument("--needles", type=int, default=100)
    parser.add_argument("--tokens", type=int, default=4096, help="of a prompt")
    parser.add_argument("--subtask", choices=SUBTASKS, default="natural")
    parser.add_argument("--keep", default="default,0.03125", help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--answers", action="store_true", help="let the model answer, too")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no needle after")
    parser.add_argument(
        "--smoke",
        action="store_true",
        help="two needles; without --adapters, with adapters that are trained for one step",
    )
    results.add_common(parser)
    arguments = parser.parse_args(given)
    if arguments.adapters is None and not arguments.smoke:
        parser.error("--adapters: needed unless --smoke is given")
    if arguments.smoke:
        arguments.needles = 2
    with tempfile.TemporaryDirectory() as folder:
        measure(arguments, Path(folder))
    rows = table(find_lines(arguments.out, settings(arguments)))
    results.finish("adapter_recall", arguments.device, rows, arguments.json)


def settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """What all measurements of a run have in common."""
    names = ("model", "device", "subtask", "tokens", "needles", "seed", "answers")
    return {name: getattr(arguments, name) for name in names}


def measure(arguments: argparse.Namespace, temporary: Path) -> None:
    """Do what the file of finished measurements lacks, needle by needle."""
    ends_s = time.monotonic() + 60 * arguments.minutes
    loaded = load(ModelConfig(model=arguments.model, device=arguments.device))
    if arguments.adapters is None:
        arguments.adapters = write_one_step_adapters(loaded, temporary)
    above = min(_FILTERED_ABOVE, arguments.tokens // 2)
    core = assemble(loaded, EngineConfig(cache_memory=0.0, filter_min_tokens=above))
    found = core.calibration
    print(f"filter layer {found.layer}, heads {found.heads}: {found.source}", flush=True)
    run = settings(arguments)
    cases = find_cases(core, arguments)
    done = {_key(line) for line in find_lines(arguments.out, run) if line["error"] is None}
    for index in range(arguments.needles):
        missing = [case for case in cases if _key({"index": index, **case.labels}) not in done]
        if not missing:
            continue
        if time.monotonic() > ends_s:
            print(f"out of time: {index} of {arguments.needles} needles are measured")
            return
        results.note(f"needle {index + 1} of {arguments.needles}")
        draw = ExampleDraw(
            seed=arguments.seed,
            num_tokens=arguments.tokens,
            index=index,
            samples=arguments.needles,
        )
        example = SUBTASKS[arguments.subtask](core.tokenizer, draw)
        assert example.gold, "every part of the document is needed"
        for case, figures in ask(core, example, missing, answers=arguments.answers):
            labels = {**run, "index": index, **case.labels, "kind": _kind(case.adapter)}
            append_run(arguments.out, {**labels, **figures})


def _key(line: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(line[name] for name in ("index", "adapter", "version", "keep"))


def _kind(adapter: Adapter | None) -> str:
    return NO_ADAPTER if adapter is None else type(adapter).__name__.lower()


def find_cases(core: Core, arguments: argparse.Namespace) -> list[Case]:
    """Each filter without an adapter and with each adapter that can be loaded.

    An adapter that cannot is named in the output, and the others are measured.
    """
    adapters: list[tuple[str, Adapter | None]] = [(NO_ADAPTER, None)]
    base, wanted = base_of(core.model), tuple(arguments.only.split(","))
    for folder in sorted(path for path in arguments.adapters.iterdir() if path.is_dir()):
        if not folder.name.startswith(wanted):
            continue
        try:
            adapter = load_adapter(folder.name, folder, core.model, base, _LARGEST)
        except (GemserveError, OSError) as error:
            print(f"left out: adapter {folder.name}: {error}", flush=True)
            continue
        adapters.append((folder.name, adapter))
    return [
        Case(name, adapter, keep, core.planner.resolve(_options(keep)))
        for name, adapter in adapters
        for keep in arguments.keep.split(",")
    ]


def _options(keep: str) -> FilterOptions:
    if keep == "default":
        return FilterOptions(return_selection=True)
    value = keep if keep == "auto" else float(keep)
    return FilterOptions(keep=parse_keep(value), fallback=False, return_selection=True)


def ask(
    core: Core, example: Example, cases: Sequence[Case], *, answers: bool
) -> Iterator[tuple[Case, dict[str, Any]]]:
    """What the filter kept in each case, and the greedy answer if `answers`.

    A case that the engine refuses or that fails has an `error`.
    """
    jobs: dict[Any, Case] = {}
    for case in cases:
        try:
            jobs[core.add(_request(example, case, answers=answers))] = case
        except GemserveError as error:
            yield case, {"error": f"{type(error).__name__}: {error}"}
    texts, figures = dict.fromkeys(jobs, ""), {job: {"error": None} for job in jobs}
    while not core.is_idle:
        for job, event in core.step():
            if isinstance(event, Filtered):
                figures[job] |= _filter_figures(example, event)
            elif isinstance(event, TextDelta):
                texts[job] += event.text
            elif isinstance(event, Finished):
                ended: dict[str, Any] = {**figures[job], "error": event.error}
                if answers:
                    ended |= _answer_figures(example, texts[job])
                yield jobs[job], ended


def _request(example: Example, case: Case, *, answers: bool) -> Request:
    request = Request(
        request_id="recall",
        **example.prompt.fields,
        sampling=SamplingParams(max_tokens=example.max_tokens, temperature=0.0),
        filter=case.params,
        adapter=case.adapter,
    )
    return request if answers else replace(request, selects_only=True)


def _filter_figures(example: Example, event: Filtered) -> dict[str, Any]:
    report = event.report
    assert report.selection is not None
    return {
        "recall": recall(example.gold, report.selection),
        "kept_tokens": report.kept_tokens,
        "coverage": report.coverage,
        "reason": report.reason,
        "layer": report.layer,
    }


def _answer_figures(example: Example, text: str) -> dict[str, Any]:
    """`contains`: the rule of `eval`. `exact`: the answer is the expected one and no more."""
    expected = ", ".join(example.answers)
    given = text.strip().removesuffix(".")
    return {
        "contains": score_answer(text, example),
        "exact": float(given.casefold() == expected.casefold()),
        "text": text,
    }


def find_lines(path: Path, run: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The finished measurements of a run. A line that was cut off is left out.

    Of one measurement the last line counts: one that failed may have been repeated.
    """
    found = {
        _key(line): line
        for line in read_runs(path)
        if all(line.get(name) == value for name, value in run.items())
    }
    return list(found.values())


def table(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each filter and adapter.

    `recall`: the mean share of the needed tokens that were kept. `whole`: the share of needles of
    which all of them were kept. `difference`: the mean difference of recall to no adapter on the
    same needles, from `low` to `high` (95%); `worse` and `better` count the needles of which less
    and more was kept. The other scores have differences of their own.
    """
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for line in lines:
        groups.setdefault((line["keep"], line["adapter"], line["version"]), []).append(line)
    rows = []
    for keep, name, version in sorted(groups, key=_group_order):
        group = groups[keep, name, version]
        good = [_with_whole(line) for line in group if line["error"] is None]
        row: dict[str, Any] = {"keep": keep, "adapter": name, "kind": group[0]["kind"]}
        row |= {"version": version, "n": len(good), "failed": len(group) - len(good)}
        row |= {score: _mean(good, score) for score in _SCORES}
        row |= {"coverage": _mean(good, "coverage"), "kept_tokens": _mean(good, "kept_tokens")}
        row["fallbacks"] = sum(line["reason"] in ("diffuse_attention", "widened") for line in good)
        if name != NO_ADAPTER:
            plain = groups.get((keep, NO_ADAPTER, ""), [])
            others = [_with_whole(line) for line in plain if line["error"] is None]
            row |= _differences(good, others)
        rows.append(row)
    return rows


def _group_order(key: tuple[str, str, str]) -> tuple[Any, ...]:
    """The default filter is first, and no adapter before all adapters."""
    keep, name, version = key
    return keep != "default", keep, name != NO_ADAPTER, name, version


def _with_whole(line: dict[str, Any]) -> dict[str, Any]:
    return {**line, "whole": float(line["recall"] == 1.0)}


def _mean(lines: Sequence[dict[str, Any]], name: str) -> float | None:
    known = [line[name] for line in lines if line.get(name) is not None]
    return round(statistics.fmean(known), 4) if known else None


def _differences(
    ours: Sequence[dict[str, Any]], plain: Sequence[dict[str, Any]]
) -> dict[str, float]:
    """By needle: each score's mean difference, and its interval (95%)."""
    before = {line["index"]: line["recall"] for line in plain}
    gaps = [line["recall"] - before[line["index"]] for line in ours if line["index"] in before]
    row: dict[str, float] = {
        "worse": sum(gap < 0 for gap in gaps),
        "better": sum(gap > 0 for gap in gaps),
    }
    for score in _SCORES:
        outcomes = [
            _outcome(line, method, line[score])
            for method, lines in (("with", ours), (NO_ADAPTER, plain))
            for line in lines
            if line.get(score) is not None
        ]
        try:
            found = compare(outcomes, "with", NO_ADAPTER)
        except ValueError:  # no needle has both
            continue
        lead = "" if score == "recall" else f"{score}_"
        row[f"{lead}difference"] = round(found.difference, 4)
        row |= {f"{lead}low": round(found.low, 4), f"{lead}high": round(found.high, 4)}
    return row


def _outcome(line: Mapping[str, Any], method: str, score: float) -> Outcome:
    return Outcome(
        subtask=line["subtask"],
        prompt_tokens=line["tokens"],
        samples=line["needles"],
        index=line["index"],
        method=method,
        keep=0,
        score=score,
        recall=None,
        kept_tokens=line["kept_tokens"],
        depth=None,
        text="",
    )


def write_one_step_adapters(loaded: LoadedModel, folder: Path) -> Path:
    """Adapters of all types, trained for one step: enough to try what takes adapters.

    Each lies in a subfolder that has the type's name. Returns `folder`.
    """
    ids = tuple(loaded.tokenizer.encode(_TEXT))
    eos_id = end_token(loaded.tokenizer, loaded.eos_ids)
    examples = [
        TrainingExample((*ids, *loaded.tokenizer.encode(answer), eos_id), len(ids))
        for answer in (" green.", " red.")
    ]
    config = TrainConfig(epochs=1, batch_size=2, evals=1, patience=0, warmup_share=0.0)
    for kind, size in (("lora", 1), ("ntk", 4), ("prefix", 4), ("activation", 1)):
        parameters = Contestant(kind, size).parameters(loaded.model, [ids], seed=1)
        train(loaded.model, parameters, examples, examples, folder / kind, config)
    return folder


if __name__ == "__main__":
    main()
