"""How much do heads up to each layer find, asked in words that no calibration has seen?

For each layer a calibration's search chooses the best set of heads on the calibration's own probes.
What is reported is what these heads find in the evaluation's probes: of questions that repeat the
fact's words (`words`), and of each kind that does not. Recall is what the calibration measures: the
mean of the shares of what is needed among the best eighth and the best sixteenth of a document.

    python benchmarks/quality/meaning_curve.py --model smollm2
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository root

from benchmarks.shared import results
from gemserve.calibration.search.choose_layer import _search, observe_probe
from gemserve.calibration.search.head_search import Observation, recall_of
from gemserve.calibration.search.probes import WORD_KINDS, draw_probes
from gemserve.config import EngineConfig, ModelConfig
from gemserve.engine.build import assemble, load_for
from gemserve.engine.core import Core
from gemserve.synthetic.natural_facts import VocabularyName

PROSE = ("synonym", "inverse", "cause", "member", "pronoun")


def observations(
    core: Core,
    vocabulary: VocabularyName,
    length: int,
    samples: int,
    seed: int,
    deepest: int | None = None,
) -> list[Observation]:
    """What every head attends to, for all questions with an answer of a vocabulary's probes.

    `deepest`: the last layer; None: that of the model.
    """
    deepest = core.model.num_layers - 1 if deepest is None else deepest
    found: list[Observation] = []
    probes = draw_probes(core.tokenizer, vocabulary, (length,), samples, seed)
    for number, probe in enumerate(probes, start=1):
        found += observe_probe(core, probe, deepest).facts
        results.note(f"{vocabulary}: document {number} of {len(probes)}")
    return [question for question in found if len(question.gold)]


def rows_of(
    heads: Sequence[tuple[int, int]], ends_with: bool, questions: Sequence[Observation]
) -> dict[str, Any]:
    """Recall of a set of heads: by words, by meaning in prose, and of each other kind."""
    groups: dict[str, list[float]] = {}
    for question in questions:
        group = question.kind
        if group in WORD_KINDS:
            group = "words"
        elif group in PROSE:
            group = "prose"
        groups.setdefault(group, []).append(recall_of(heads, question, ends_with))
    return {group: round(statistics.mean(found), 3) for group, found in sorted(groups.items())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2", help="default: %(default)s")
    parser.add_argument("--length", type=int, default=1024, help="default: %(default)s")
    parser.add_argument("--samples", type=int, default=9, help="as of `gemserve calibrate`")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--json", action="store_true", help="only the result line")
    arguments = parser.parse_args()
    config = EngineConfig(filter_method="none", calibrate="off", kv_memory_bytes=1 << 30)
    core = assemble(load_for(ModelConfig(model=arguments.model), config), config)
    given = (arguments.length, arguments.samples, arguments.seed)
    seen = observations(core, "calibration", *given)
    unseen = observations(core, "evaluation", *given)
    results.note("")
    rows: list[dict[str, Any]] = [
        {"layer": row.layer, "heads": " ".join(f"{a}.{b}" for a, b in row.heads)}
        | rows_of(row.heads, row.ends_with, unseen)
        for row in _search(core, seen, arguments.length, 1.0, lambda: None)
    ]
    counts = {
        "calibration": len(seen),
        "evaluation": len(unseen),
        "by_meaning": sum(question.kind not in WORD_KINDS for question in unseen),
    }
    results.finish("meaning_curve", "cpu", [{"questions": counts}, *rows], arguments.json)


if __name__ == "__main__":
    main()
