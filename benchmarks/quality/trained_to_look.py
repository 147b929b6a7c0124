"""Can heads be trained to look for what is meant?

A LoRA of the layers up to the given heads is trained on the calibration's probes, by contrast: what
a question needs against everything else in its document, decoys with the question's words included.
Reported is the heads' recall before and after on the evaluation's probes, whose facts, questions
and names are others. QRRanker (2026) trains heads that retrieve in this way.

`--out FOLDER` gets the whole model with the change in its weights. What it answers is worth nothing
any more, so it is for reading only: `gemserve serve --model BIG --reader FOLDER`.

    python benchmarks/quality/trained_to_look.py --model smollm2 --heads 15.6 --out reader
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository root

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface

from benchmarks.quality.meaning_curve import observations, rows_of
from benchmarks.shared import results
from gemserve.calibration.search.example import Example
from gemserve.calibration.search.head_search import Head
from gemserve.calibration.search.probes import Probe, draw_probes
from gemserve.config import EngineConfig, ModelConfig
from gemserve.contract.prompt_parts import Priority
from gemserve.engine.build import assemble, load_for
from gemserve.engine.core import Core
from gemserve.filtering.sieve import Sieve
from gemserve.model.passes.causal_model import CausalModel
from gemserve_train.forward import Layout
from gemserve_train.lora_parameters import LoraParameters

ATTENTION = "gemserve-looking"
LENGTHS = (600, 900, 1300)
_NAMES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_REACH = 2 * Sieve().reach + 1  # a token's neighbours are kept with it
_WARM_UP = 20  # steps


class Looked(Exception):
    """Ends a pass at the highest of the heads. It has what each head's layer looks with."""

    def __init__(self) -> None:
        self.layers: dict[int, tuple[Tensor, Tensor, float]] = {}  # queries, keys, scale


def looking_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    looked: Looked,
    last: int,
    visible: Tensor,
    scaling: float | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, None]:
    """Plain attention; notes queries [heads, tokens, head_dim] and keys, and ends at `last`."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    looked.layers[module.layer_idx] = query[0], key[0], scale
    if module.layer_idx == last:
        raise looked
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask=visible, scale=scale, enable_gqa=True
    )
    return out.transpose(1, 2), None


def loss_of(model: CausalModel, heads: Sequence[Head], probe: Probe) -> Tensor | None:
    """What the heads miss of what the probe's questions need, on average: a scalar.

    All questions stand behind the one document and do not see each other. None: none has an answer
    in the document.
    """
    asked = [example for example in probe.examples if example.gold]
    prompts = [example.prompt for example in asked]
    rows = [Sieve().rows(len(p.ids), p.question, False) for p in prompts]
    shared = min(min(map(min, rows)), _num_common([p.ids for p in prompts]))
    layout = Layout(shared, tuple(len(p.ids) - shared for p in prompts))
    ids = [*prompts[0].ids[:shared], *(token for p in prompts for token in p.ids[shared:])]
    last = max(layer for layer, _ in heads)
    device = model.device
    visible = layout.visible(device, {model.reaches[last]})[model.reaches[last]]
    looked = Looked()
    with model.attention_named(ATTENTION), suppress(Looked):
        model.hf(
            input_ids=torch.tensor([ids], device=device),
            position_ids=layout.positions(0).to(device)[None],
            use_cache=False,
            looked=looked,
            last=last,
            visible=visible,
        )
    losses: list[Tensor] = []
    for example, wanted, (start, _) in zip(asked, rows, layout.bounds(), strict=True):
        is_free, is_gold = _document(example, shared)
        if is_gold.any():
            at = [start + row - shared for row in wanted]
            losses += [_missed(looked, head, at, visible, is_free, is_gold) for head in heads]
    return torch.stack(losses).mean() if losses else None


def _missed(
    looked: Looked,
    head: Head,
    rows: Sequence[int],
    visible: Tensor,
    is_free: Tensor,
    is_gold: Tensor,
) -> Tensor:
    """How far a head's choice is from the needed tokens, and a part for what goes to sinks."""
    layer, number = head
    query, key, scale = looked.layers[layer]
    keys = key[number * len(key) // len(query)]
    logits = (query[number, rows] @ keys.T * scale).masked_fill(~visible[rows], -torch.inf)
    shares = logits.softmax(-1)[:, : len(is_free)]  # [rows, tokens of the document]
    largest = (shares * is_free).amax(0)
    near = F.max_pool1d(largest[None, None], _REACH, 1, _REACH // 2)[0, 0] * is_free + 1e-8
    chosen = (near / near.sum())[is_gold].log().mean() + is_gold.sum().log()
    return -chosen - 0.2 * shares[:, is_gold].sum(-1).amax().clamp_min(1e-6).log()


def _document(example: Example, shared: int) -> tuple[Tensor, Tensor]:
    """Which of the first `shared` tokens a choice is made from, and which are needed."""
    is_free, is_gold = torch.ones(shared, dtype=torch.bool), torch.zeros(shared, dtype=torch.bool)
    is_free[0] = False
    for span in example.prompt.protected:
        if span.priority <= Priority.FRAME:
            is_free[span.start : span.stop] = False
    for start, stop in example.gold:
        is_gold[start:stop] = True
    return is_free, is_gold & is_free


def _num_common(texts: Sequence[Sequence[int]]) -> int:
    """How many tokens all texts begin with."""
    of_all = zip(*texts, strict=False)
    return next((i for i, some in enumerate(of_all) if len(set(some)) > 1), min(map(len, texts)))


def train(core: Core, heads: Sequence[Head], arguments: argparse.Namespace) -> LoraParameters:
    """Train on probes of the calibration's vocabulary, two documents for each drawing."""
    last = max(layer for layer, _ in heads)
    names = [
        f"layers.{layer}.{kind}" for layer in range(last + 1) for kind in _modules(core, layer)
    ]
    lora = LoraParameters(core.model, arguments.rank, names, arguments.seed)
    optimizer = torch.optim.AdamW(lora.low_rank.parameters(), weight_decay=0.0)
    rng, recent, step = Random(arguments.seed), list[float](), 0
    while step < arguments.steps:
        length, seed = rng.choice(LENGTHS), arguments.seed + 1 + step
        for probe in draw_probes(core.tokenizer, "calibration", (length,), 1, seed):
            left = 1 - step / arguments.steps
            for group in optimizer.param_groups:
                group["lr"] = arguments.lr * min(1.0, (step + 1) / _WARM_UP, left)
            with torch.enable_grad():
                loss = loss_of(lora.replacement, heads, probe)
                if loss is None:
                    continue
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(lora.low_rank.parameters(), 1.0)
            optimizer.step()
            step += 1
            recent = [*recent[-19:], loss.item()]
            results.note(f"step {step} of {arguments.steps}, loss {statistics.mean(recent):.2f}")
    return lora


def _modules(core: Core, layer: int) -> list[str]:
    """The linear modules of a layer, by their names in it."""
    inner = f".layers.{layer}."
    found = (name.partition(inner)[2] for name, _ in core.model.hf.named_modules())
    return [name for name in found if name.rpartition(".")[2] in _NAMES]


def found_by(core: Core, heads: Sequence[Head], samples: int) -> dict[str, Any]:
    """The heads' recall on the evaluation's probes, by words, in prose, and of each other kind."""
    last = max(layer for layer, _ in heads)
    questions = observations(core, "evaluation", 1024, samples, 0, last)
    return rows_of(heads, False, questions) | {"questions": len(questions)}


def merge(lora: LoraParameters) -> Any:
    """The transformers model with the change in its weights, as it was before."""
    from peft.tuners.lora import LoraLayer

    tree: Any = lora.replacement.hf
    for module in list(tree.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, LoraLayer):
                child.merge()  # type: ignore[operator]
                setattr(module, name, child.base_layer)
    return tree


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2", help="default: %(default)s")
    parser.add_argument("--heads", default="15.6", help="LAYER.HEAD,… (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=120, help="documents (default: %(default)s)")
    parser.add_argument("--rank", type=int, default=8, help="default: %(default)s")
    parser.add_argument("--lr", type=float, default=3e-4, help="default: %(default)s")
    parser.add_argument("--samples", type=int, default=9, help="as of `gemserve calibrate`")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--out", type=Path, help="a folder for the reader")
    parser.add_argument("--json", action="store_true", help="only the result line")
    arguments = parser.parse_args()
    pairs = (pair.split(".") for pair in arguments.heads.split(","))
    heads = [(int(layer), int(head)) for layer, head in pairs]
    AttentionInterface.register(ATTENTION, looking_attention)
    config = EngineConfig(filter_method="none", calibrate="off", kv_memory_bytes=1 << 30)
    model = ModelConfig(model=arguments.model, weights="dense", dtype="float32")
    loaded = load_for(model, config)
    core = assemble(loaded, config)
    rows = [{"when": "before"} | found_by(core, heads, arguments.samples)]
    tree = merge(train(core, heads, arguments))
    changed = assemble(replace(loaded, model=loaded.model.variant(tree)), config)
    rows += [{"when": "after"} | found_by(changed, heads, arguments.samples)]
    if arguments.out is not None:
        tree.to(torch.bfloat16).save_pretrained(arguments.out)
        loaded.tokenizer.save_pretrained(arguments.out)
    results.finish("trained_to_look", "cpu", rows, arguments.json)


if __name__ == "__main__":
    main()
