"""What each ingredient of sieve is worth: the same examples without it, or with another one.

Every example is read once. Each variant then chooses from what the layers showed, and the model
answers from its choice. `carry` continues from the kept tokens' states at the filter layer, instead
of reading these tokens again.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository root

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from benchmarks.quality.ablation_variants import VARIANTS, Choose, ObservedExample
from benchmarks.shared import results
from gemserve.calibration.search.example import Example, ExampleDraw
from gemserve.calibration.search.observe import observe
from gemserve.config import EngineConfig, ModelConfig
from gemserve.contract.filter_options import FilterParams
from gemserve.engine.build import build_core
from gemserve.engine.core import Core
from gemserve.model.loading.loader import BUILTIN_PATH
from gemserve_lab.methods_compared import oracle
from gemserve_lab.metrics import score_answer
from gemserve_lab.run import generate
from gemserve_lab.tasks.registry import TASKS

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
    for past in cache.layers[:layer]:
        past.keys, past.values = past.keys[:, :, chosen], past.values[:, :, chosen]
    hidden = run(hidden[:, chosen], model.layers[layer:], chosen[None])
    generated: list[int] = []
    for position in range(len(ids), len(ids) + count):
        token = int(hf.lm_head(model.norm(hidden[:, -1])).argmax())
        if token in core.eos_ids:
            break
        generated.append(token)
        embedded = model.embed_tokens(torch.tensor([[token]]))
        hidden = run(embedded, model.layers, torch.tensor([[position]]))
    return str(core.tokenizer.decode(generated, skip_special_tokens=True))


@dataclass(slots=True)
class Ablation:
    """Runs all variants on one model, and collects their scores."""

    core: Core
    hf: Any
    variants: dict[str, Choose]
    shares: list[float]
    with_carry: bool
    # by variant and share: the scores of each subtask, and the shares of whole statements
    scores: dict[tuple[str, float], dict[str, list[float]]] = field(default_factory=dict)
    statements: dict[tuple[str, float], list[float]] = field(default_factory=dict)

    def run(self, example: Example) -> None:
        """Read an example once, and answer it from every variant's choice."""
        core, ids, question = self.core, example.prompt.ids, example.prompt.question
        question_rows = {row for start, stop in question for row in range(start, stop)}
        rows = sorted(question_rows | set(range(len(ids) - LAST, len(ids))))
        (evidence,) = observe(core, [example.prompt], [rows])
        observed = ObservedExample(
            evidence=evidence, calibration=core.calibration, question=question
        )
        for share in self.shares:
            keep = max(16, round(share * len(ids)))
            choices = {name: choose(observed, keep) for name, choose in self.variants.items()}
            choices["oracle"] = list(oracle(core.tokenizer, example, keep))
            self._add(example, share, choices)

    def _add(self, example: Example, share: float, choices: dict[str, list[int]]) -> None:
        core, layer = self.core, self.core.config.filter_layer
        # many variants make the same choice, which is answered once
        by_choice = {kept: answer(core, example, kept) for kept in map(tuple, choices.values())}
        answers = {name: by_choice[tuple(kept)] for name, kept in choices.items()}
        if self.with_carry:
            kept = choices["carry"] = choices["sieve"]
            ids, count = example.prompt.ids, example.max_tokens
            assert layer is not None
            answers["carry"] = carry(self.hf, core, layer, ids, kept, count)
        for name, text in answers.items():
            scores = self.scores.setdefault((name, share), {}).setdefault(example.subtask, [])
            scores.append(score_answer(text, example))
            statements = self.statements.setdefault((name, share), [])
            statements.append(whole_statements(example, choices[name]))

    def rows(self) -> list[dict[str, Any]]:
        return [
            {
                "variant": name,
                "share": f"{share:g}",
                "score": mean([score for scores in by_subtask.values() for score in scores]),
                "whole_statements": mean(self.statements[name, share]),
                **{subtask: mean(scores) for subtask, scores in by_subtask.items()},
                "n": sum(map(len, by_subtask.values())),
            }
            for (name, share), by_subtask in sorted(
                self.scores.items(), key=lambda item: -item[0][1]
            )
        ]


def main() -> None:
    arguments = read_arguments()
    core = build_core(ModelConfig(model=arguments.model), EngineConfig(filter_min_tokens=0))
    source = BUILTIN_PATH if arguments.model == "builtin" else arguments.model
    hf = AutoModelForCausalLM.from_pretrained(source, attn_implementation="sdpa").eval()
    variants = {
        n: f for n, f in VARIANTS.items() if n == "sieve" or re.search(arguments.variants, n)
    }
    shares = [float(share) for share in arguments.shares.split(",")]
    ablation = Ablation(core, hf, variants, shares, arguments.carry)
    for task, subtask in SUBTASKS:
        for index in range(arguments.samples):
            draw = ExampleDraw(
                seed=arguments.seed,
                num_tokens=arguments.tokens,
                index=index,
                samples=arguments.samples,
            )
            ablation.run(TASKS[task][subtask](core.tokenizer, draw))
        results.note(f"{subtask} done")
    results.finish("ablation", "cpu", ablation.rows(), arguments.json)


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--samples", type=int, default=20, help="samples of each subtask")
    parser.add_argument("--variants", default=".", help="variants whose names match this pattern")
    parser.add_argument("--carry", action="store_true", help="also carry on sieve's states")
    parser.add_argument("--shares", default="0.0625,0.03125", help="shares of the prompt to keep")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print only the result line")
    return parser.parse_args()


def answer(core: Core, example: Example, kept: Sequence[int]) -> str:
    """The model's answer from the kept tokens alone."""
    ids = [example.prompt.ids[p] for p in kept]
    text, _ = generate(core, example, ids, FilterParams(method="none", keep=16))
    return text


def whole_statements(example: Example, kept: list[int]) -> float:
    """Share of the needed statements that are kept completely."""
    positions = set(kept)
    whole = [all(p in positions for p in range(start, stop)) for start, stop in example.gold]
    return sum(whole) / max(1, len(whole))


def mean(values: Sequence[float]) -> float:
    return round(sum(values) / len(values), 4)


if __name__ == "__main__":
    main()
