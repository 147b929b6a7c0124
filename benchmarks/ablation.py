"""What each ingredient of sieve is worth: the same examples without it, or with another.

Every example is read once; each variant then chooses from what the layers showed, and the model
answers from its choice. `carry` goes on from the filter layer with what was kept, instead of
reading it anew.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import harness
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from gemserve.config import EngineConfig, ModelConfig
from gemserve.engine.assemble import build_core
from gemserve.engine.core import Core
from gemserve.evaluation.arms import oracle
from gemserve.evaluation.example import Draw, Example
from gemserve.evaluation.metrics import score_answer
from gemserve.evaluation.observe import observe
from gemserve.evaluation.score import generate
from gemserve.evaluation.table import TASKS
from gemserve.filtering.gemfilter import GemFilter
from gemserve.filtering.selector import Evidence
from gemserve.filtering.sieve import Sieve
from gemserve.filtering.spans import protected_positions
from gemserve.model.loader import BUILTIN_PATH
from gemserve.types import Budget, FilterParams, Priority, Span

SUBTASKS = (
    ("needle", "single"),
    ("needle", "multikey"),
    ("needle", "multivalue"),
    ("needle", "multiquery"),
    ("ruler", "vt"),
    ("relevance", "relevant_0.1"),
    ("relevance", "confusing_0.1"),
)
SIEVE = Sieve()
WINDOW = 64
REST_SHARE = 0.25
ByLayer = Mapping[int, Evidence]
Choose = Callable[[ByLayer, int, int], list[int]]  # by layer, the filter layer, tokens to keep


def variant(
    sieve: Sieve = SIEVE,
    *,
    rows: int = SIEVE.observed,
    heads: str = "max",
    window: str = "sum",
    more_layers: int = 0,
    rest: float | None = REST_SHARE,
    chunk: int | None = None,
) -> Choose:
    """Sieve with other chunks, another window, or another way to add up what it shows.

    `heads`, `window`: how the probabilities of heads, and then of rows, become one score.
    `more_layers`: below the filter layer, whose scores are added. `rest`: see `reserved`.
    `chunk`: fixed chunks of that size rank as one, with margins of half a chunk.
    """

    def choose(by_layer: ByLayer, layer: int, keep: int) -> list[int]:
        layers = range(max(0, layer - more_layers), layer + 1)
        scores = sum(
            (reduced(reduced(probabilities(by_layer[i], rows), heads), window) for i in layers),
            torch.zeros(()),
        )
        evidence = by_layer[layer]
        protected: Sequence[int] = ()
        if rest is not None:
            protected = reserved(evidence.protected, evidence.num_tokens, keep, rest)
        if chunk is None:
            order, _ = sieve.order(scores, evidence.code_blocks)
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


def reserved(spans: Sequence[Span], num_tokens: int, budget: int, rest: float) -> list[int]:
    chosen: list[int] = []
    for last, share in ((Priority.QUESTION, 1.0), (Priority.FRAME, 0.75), (Priority.TAIL, rest)):
        allowed = [s for s in spans if s.priority <= last]
        most = max(len(chosen), int(share * budget))
        chosen = protected_positions(allowed, num_tokens, most)
    return chosen


def probabilities(evidence: Evidence, rows: int) -> torch.Tensor:
    """Of the window's last `rows`: [heads, rows, tokens]."""
    queries, keys = evidence.queries[:, -rows:], evidence.keys
    groups = queries.shape[0] // keys.shape[0]
    scores = queries @ keys.repeat_interleave(groups, dim=0).transpose(-1, -2) * evidence.scale
    at = torch.arange(evidence.num_tokens - queries.shape[1], evidence.num_tokens)
    future = torch.arange(evidence.num_tokens)[None] > at[:, None]
    return scores.masked_fill(future, -torch.inf).softmax(-1)


def reduced(values: torch.Tensor, how: str) -> torch.Tensor:
    return values.amax(0) if how == "max" else values.sum(0)


def by_gemfilter(by_layer: ByLayer, layer: int, keep: int) -> list[int]:
    budget = Budget(low=keep, high=keep, limit=keep)
    params = FilterParams(method="gemfilter", keep=keep)
    return list(GemFilter().choose(by_layer[layer], budget, params).positions.tolist())


VARIANTS: dict[str, Choose] = {
    "sieve": variant(),
    **{f"window of {rows}": variant(rows=rows) for rows in (1, 2, 16, 64)},
    "heads summed": variant(heads="sum"),
    "best row": variant(window="max"),
    "2 layers": variant(more_layers=1),
    "3 layers": variant(more_layers=2),
    **{f"reach of {n}": variant(Sieve(reach=n)) for n in (0, 4, 6, 10, 12, 16)},
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
            by_layer = observe(core, example.prompt, WINDOW)
            for share in map(float, arguments.shares.split(",")):
                keep = max(16, round(share * len(ids)))
                choices = {name: f(by_layer, layer, keep) for name, f in variants.items()}
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
        harness.note(f"{subtask} done")
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
    harness.finish("ablation", "cpu", rows, arguments.json)


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
