"""What each ingredient of sieve is worth: the same examples without it, or with another.

Every example is read once; each variant then chooses from what the layers showed, and the model
answers from its choice. `carry` goes on from the filter layer with what was kept, instead of
reading it anew.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from gemserve.calibration import Calibration
from gemserve.config import EngineConfig, ModelConfig
from gemserve.engine.build import build_core
from gemserve.engine.core import Core
from gemserve.evaluation.calibration.observe import observe
from gemserve.evaluation.methods_compared import oracle
from gemserve.evaluation.metrics import score_answer
from gemserve.evaluation.run import generate
from gemserve.evaluation.tasks.example import Draw, Example
from gemserve.evaluation.tasks.registry import TASKS
from gemserve.filter_plan import Budget
from gemserve.filtering.gemfilter import GemFilter
from gemserve.filtering.protected_budget import protected_positions
from gemserve.filtering.selector import Evidence
from gemserve.filtering.sieve import Sieve
from gemserve.model.loader import BUILTIN_PATH
from gemserve.types import FilterParams, Priority, ProtectedRange

SUBTASKS = (
    ("needle", "single"),
    ("needle", "multikey"),
    ("needle", "multivalue"),
    ("needle", "multiquery"),
    ("ruler", "vt"),
    ("relevance", "relevant_0.1"),
    ("relevance", "confusing_0.1"),
)
LAST = 64
REST_SHARE = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One example in all layers, from the rows of `question` and the prompt's last `LAST` ones."""

    evidence: Evidence
    calibration: Calibration
    question: Sequence[tuple[int, int]]


Choose = Callable[[Seen, int], list[int]]  # what was seen, tokens to keep


def variant(
    sieve: Sieve = Sieve(),  # noqa: B008, a frozen value
    *,
    rows: int | None = None,
    all_heads: bool = False,
    heads: str = "max",
    window: str = "max",
    more_layers: int = 0,
    rest: float | None = REST_SHARE,
    chunk: int | None = None,
) -> Choose:
    """Sieve with other chunks, other rows or heads, or another way to add up what these show.

    `rows`: so many at the prompt's end instead of the served ones. `all_heads`: of the filter layer
    instead of the calibrated ones. `heads`, `window`: how the probabilities of heads, and then of
    rows, become one score. `more_layers`: whose heads look, too, below the filter layer. `rest`:
    see `reserved`. `chunk`: fixed chunks of that size rank as one, with margins of half a chunk.
    """

    def choose(seen: Seen, keep: int) -> list[int]:
        evidence, found = seen.evidence, seen.calibration
        num_tokens = evidence.num_tokens
        watched = sieve.rows(num_tokens, seen.question, found.ends_with)
        if rows is not None:
            watched = list(range(num_tokens - rows, num_tokens))
        looking = found.heads
        if all_heads or more_layers or looking is None:
            lowest = max(0, found.layer - more_layers)
            count = evidence.layers[found.layer].queries.shape[0]
            looking = tuple(
                (i, h) for i in evidence.layers if lowest <= i <= found.layer for h in range(count)
            )
        scores = reduced(reduced(probabilities(evidence, looking, watched), heads), window)
        scores[0] = 0.0
        protected: Sequence[int] = ()
        if rest is not None:
            protected = reserved(evidence.protected, num_tokens, keep, rest)
        if chunk is None:
            order, _ = sieve.order(scores, evidence.breaks, keep - len(protected))
        else:
            order = by_chunks(scores, chunk)
        kept = dict.fromkeys([*protected, *order.tolist()])
        return sorted(list(kept)[:keep])

    return choose


def by_chunks(scores: torch.Tensor, size: int) -> torch.Tensor:
    """Positions by the rank of their chunk, or of the best one whose margin reaches them."""
    margin, num_tokens = size // 2, len(scores)
    padded = torch.nn.functional.pad(scores, (0, -num_tokens % size), value=-torch.inf)
    best = padded.view(-1, size).amax(1).repeat_interleave(size)[:num_tokens]
    reach = torch.nn.functional.max_pool1d(best[None, None], 2 * margin + 1, 1, margin)[0, 0]
    by_score = scores.sort(descending=True, stable=True).indices
    return by_score[reach[by_score].sort(descending=True, stable=True).indices]


def reserved(
    spans: Sequence[ProtectedRange], num_tokens: int, budget: int, rest: float
) -> list[int]:
    chosen: list[int] = []
    for last, share in ((Priority.QUESTION, 1.0), (Priority.FRAME, 0.75), (Priority.TAIL, rest)):
        allowed = [s for s in spans if s.priority <= last]
        most = max(len(chosen), int(share * budget))
        chosen = protected_positions(allowed, num_tokens, most)
    return chosen


def probabilities(
    evidence: Evidence, heads: Sequence[tuple[int, int]], rows: Sequence[int]
) -> torch.Tensor:
    """What these rows of these (layer, head) pairs look at: [heads, rows, tokens]."""
    at = [evidence.rows.index(row) for row in rows]
    future = torch.arange(evidence.num_tokens)[None] > torch.tensor(rows)[:, None]
    looks = []
    for index, head in heads:
        layer = evidence.layers[index]
        keys = layer.keys[head * layer.keys.shape[0] // layer.queries.shape[0]]
        scores = layer.queries[head, at] @ keys.T * layer.scale
        looks.append(scores.masked_fill(future, -torch.inf).softmax(-1))
    return torch.stack(looks)


def reduced(values: torch.Tensor, how: str) -> torch.Tensor:
    return values.amax(0) if how == "max" else values.sum(0)


def by_gemfilter(seen: Seen, keep: int) -> list[int]:
    budget = Budget(low=keep, high=keep, limit=keep)
    params = FilterParams(method="gemfilter", keep=keep)
    layer = seen.calibration.layer
    evidence = replace(seen.evidence, layers={layer: seen.evidence.layers[layer]})
    return list(GemFilter().choose(evidence, budget, params).positions.tolist())


VARIANTS: dict[str, Choose] = {
    "sieve": variant(),
    **{f"last {rows} rows": variant(rows=rows) for rows in (1, 4, 16, 64)},
    "all heads": variant(all_heads=True),
    "heads summed": variant(heads="sum"),
    "rows summed": variant(window="sum"),
    "all heads of 2 layers": variant(more_layers=1),
    "all heads of 3 layers": variant(more_layers=2),
    **{f"passages of up to {n}": variant(Sieve(longest=n)) for n in (32, 64, 256)},
    **{f"passages of at least {n}": variant(Sieve(shortest=n)) for n in (16, 64)},
    "half a budget a passage": variant(Sieve(passage_share=1 / 2)),
    **{f"chunks of {n}": variant(chunk=n) for n in (8, 16, 32)},
    "nothing protected": variant(rest=None),
    **{f"rest up to {share}": variant(rest=share) for share in (0.0, 0.5)},
    "gemfilter": by_gemfilter,
}


@torch.inference_mode()
def carry(hf: Any, core: Core, layer: int, ids: Sequence[int], kept: list[int], count: int) -> str:
    """Generate from the kept tokens' states at `layer`, at the positions they had."""
    model, cache, chosen = hf.model, DynamicCache(), torch.tensor(kept)

    def run(hidden: torch.Tensor, layers: Any, positions: torch.Tensor) -> torch.Tensor:
        rope = model.rotary_emb(hidden, positions)
        for block in layers:
            hidden = block(
                hidden,
                attention_mask=None,
                position_ids=positions,
                past_key_values=cache,
                position_embeddings=rope,
            )
        return hidden

    hidden = run(
        model.embed_tokens(torch.tensor([list(ids)])),
        model.layers[:layer],
        torch.arange(len(ids))[None],
    )
    for held in cache.layers[:layer]:
        held.keys, held.values = held.keys[:, :, chosen], held.values[:, :, chosen]
    hidden = run(hidden[:, chosen], model.layers[layer:], chosen[None])
    said: list[int] = []
    for position in range(len(ids), len(ids) + count):
        token = int(hf.lm_head(model.norm(hidden[:, -1])).argmax())
        if token in core.eos_ids:
            break
        said.append(token)
        embedded = model.embed_tokens(torch.tensor([[token]]))
        hidden = run(embedded, model.layers, torch.tensor([[position]]))
    return str(core.tokenizer.decode(said, skip_special_tokens=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--samples", type=int, default=20, help="of each subtask")
    parser.add_argument("--variants", default=".", help="those whose names match this pattern")
    parser.add_argument("--carry", action="store_true", help="beside sieve, which restarts")
    parser.add_argument("--shares", default="0.0625,0.03125", help="of the prompt, kept")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="only the result line")
    arguments = parser.parse_args()
    core = build_core(ModelConfig(model=arguments.model), EngineConfig(filter_min_tokens=0))
    source = BUILTIN_PATH if arguments.model == "builtin" else arguments.model
    hf = AutoModelForCausalLM.from_pretrained(source, attn_implementation="sdpa").eval()
    layer = core.config.filter_layer
    assert layer is not None
    variants = {
        n: f for n, f in VARIANTS.items() if n == "sieve" or re.search(arguments.variants, n)
    }
    results: dict[tuple[str, float], dict[str, list[float]]] = {}
    whole: dict[tuple[str, float], list[float]] = {}
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
            question = example.prompt.question
            asked = {row for start, stop in question for row in range(start, stop)}
            rows = sorted(asked | set(range(len(ids) - LAST, len(ids))))
            (evidence,) = observe(core, [example.prompt], [rows])
            seen = Seen(evidence=evidence, calibration=core.calibration, question=question)
            for share in map(float, arguments.shares.split(",")):
                keep = max(16, round(share * len(ids)))
                choices = {name: f(seen, keep) for name, f in variants.items()}
                choices["oracle"] = list(oracle(core.tokenizer, example, keep))
                answers = dict.fromkeys(map(tuple, choices.values()), "")  # many agree
                for kept in answers:
                    answers[kept] = answer(core, example, kept)
                said = {name: answers[tuple(kept)] for name, kept in choices.items()}
                if arguments.carry:
                    choices["carry"] = choices["sieve"]
                    said["carry"] = carry(
                        hf, core, layer, ids, choices["sieve"], example.max_tokens
                    )
                for name, text in said.items():
                    scores = results.setdefault((name, share), {}).setdefault(subtask, [])
                    scores.append(score_answer(text, example))
                    held = whole_statements(example, choices[name])
                    whole.setdefault((name, share), []).append(held)
        results.note(f"{subtask} done")
    rows = [
        {
            "variant": name,
            "share": f"{share:g}",
            "score": mean([score for scores in by_subtask.values() for score in scores]),
            "whole_statements": mean(whole[name, share]),
            **{subtask: mean(scores) for subtask, scores in by_subtask.items()},
            "n": sum(map(len, by_subtask.values())),
        }
        for (name, share), by_subtask in sorted(results.items(), key=lambda item: -item[0][1])
    ]
    results.finish("ablation", "cpu", rows, arguments.json)


def answer(core: Core, example: Example, kept: Sequence[int]) -> str:
    """What the model says to the kept tokens alone."""
    ids = [example.prompt.ids[p] for p in kept]
    text, _ = generate(core, example, ids, FilterParams(method="none", keep=16))
    return text


def whole_statements(example: Example, kept: list[int]) -> float:
    """Share of the needed statements of which every token is kept."""
    held = set(kept)
    whole = [all(p in held for p in range(start, stop)) for start, stop in example.gold]
    return sum(whole) / max(1, len(whole))


def mean(values: Sequence[float]) -> float:
    return round(sum(values) / len(values), 4)


if __name__ == "__main__":
    main()
