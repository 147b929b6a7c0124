"""What each ingredient of sieve is worth: the same examples without it.

Every example is read once; each variant then chooses from what the filter layer showed, and the
model answers from its choice.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace

import harness

from gemserve.config import EngineConfig, ModelConfig
from gemserve.engine.assemble import build_core
from gemserve.evaluation.example import Draw, Example
from gemserve.evaluation.metrics import score_answer
from gemserve.evaluation.observe import observe
from gemserve.evaluation.score import generate
from gemserve.evaluation.table import TASKS
from gemserve.filtering.gemfilter import GemFilter
from gemserve.filtering.selector import Evidence
from gemserve.filtering.sieve import Sieve
from gemserve.types import Budget, FilterParams

BUDGET_SHARES = (1 / 16, 1 / 64)
SUBTASKS = (
    ("needle", "single"),
    ("needle", "multikey"),
    ("needle", "multivalue"),
    ("needle", "multiquery"),
    ("ruler", "vt"),
    ("relevance", "relevant_0.1"),
    ("relevance", "confusing_0.1"),
)
WINDOW = 64
Choose = Callable[[Evidence, int], list[int]]


def by_sieve(sieve: Sieve) -> Choose:
    def choose(evidence: Evidence, keep: int) -> list[int]:
        seen = replace(evidence, queries=evidence.queries[:, -sieve.window(evidence.num_tokens) :])
        budget = Budget(low=keep, high=keep, limit=keep)
        params = FilterParams(method="sieve", keep=keep)
        return list(sieve.choose(seen, budget, params).positions.tolist())

    return choose


def unprotected(evidence: Evidence, keep: int) -> list[int]:
    return by_sieve(Sieve())(replace(evidence, protected=()), keep)


def by_gemfilter(evidence: Evidence, keep: int) -> list[int]:
    budget = Budget(low=keep, high=keep, limit=keep)
    params = FilterParams(method="gemfilter", keep=keep)
    return list(GemFilter().choose(evidence, budget, params).positions.tolist())


VARIANTS: dict[str, Choose] = {
    "sieve": by_sieve(Sieve()),
    "nothing protected": unprotected,
    "one row observed": by_sieve(Sieve(observed=1)),
    "single tokens": by_sieve(Sieve(chunk=1, margin=0)),
    "no margin": by_sieve(Sieve(margin=0)),
    "gemfilter": by_gemfilter,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--samples", type=int, default=20, help="of each subtask")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="only the result line")
    arguments = parser.parse_args()
    core = build_core(ModelConfig(model=arguments.model), EngineConfig(filter_min_tokens=0))
    layer = core.config.filter_layer
    assert layer is not None
    results: dict[tuple[str, float], list[tuple[float, float]]] = {}
    for task, subtask in SUBTASKS:
        for index in range(arguments.samples):
            draw = Draw(
                seed=arguments.seed,
                num_tokens=arguments.tokens,
                index=index,
                samples=arguments.samples,
            )
            example = TASKS[task][subtask](core.tokenizer, draw)
            ids = example.prompt.ids
            evidence = observe(core, example.prompt, WINDOW)[layer]
            for share in BUDGET_SHARES:
                keep = max(16, round(share * len(ids)))
                for name, choose in VARIANTS.items():
                    kept = choose(evidence, keep)
                    params = FilterParams(method="none", keep=16)
                    text, _ = generate(core, example, [ids[p] for p in kept], params)
                    results.setdefault((name, share), []).append(
                        (score_answer(text, example), whole_statements(example, kept))
                    )
        harness.note(f"{subtask} done")
    rows = [
        {"variant": name, "share": f"{share:g}", **averages(of)}
        for (name, share), of in sorted(results.items(), key=lambda item: -item[0][1])
    ]
    harness.finish("ablation", "cpu", rows, arguments.json)


def whole_statements(example: Example, kept: list[int]) -> float:
    """Share of the needed statements of which every token is kept."""
    held = set(kept)
    whole = [all(p in held for p in range(start, stop)) for start, stop in example.gold]
    return sum(whole) / max(1, len(whole))


def averages(results: list[tuple[float, float]]) -> dict[str, float | int]:
    scores, whole = zip(*results, strict=True)
    return {
        "score": round(sum(scores) / len(scores), 4),
        "whole_statements": round(sum(whole) / len(whole), 4),
        "n": len(scores),
    }


if __name__ == "__main__":
    main()
