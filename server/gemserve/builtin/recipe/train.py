"""Train the built-in model on a CPU: `python -m gemserve.builtin.recipe.train --work DIR`.

The curriculum lengthens step by step: bare facts, then prose, then long documents with skipped
positions. Beside the loss on answers, guided heads are taught where to look at each step of a skill
(`guides.Guide`), those of the filter layer at all that an answer needs: a filter can only see what
that layer's queries and keys show. Every step's data follows from (seed, step), and the state is
saved every few minutes: a stopped run resumes where it was.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

from gemserve.builtin.recipe.corpus import Batch, Corpus
from gemserve.builtin.recipe.curriculum import MAX_POSITION, STAGES, Stage, choose_stages
from gemserve.builtin.recipe.guides import Guide
from gemserve.builtin.recipe.tokenizer import BOS, END, PAD, as_transformers, train_tokenizer
from gemserve.synthetic.prose import package_sentences
from gemserve.synthetic.words import ADJECTIVES, ATTRIBUTES, NOUNS

PACKAGES = ("torch", "numpy", "networkx", "sympy", "matplotlib", "pydantic", "transformers")
VOCAB_SIZE = 4096
HEAD_DIM = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What is built: `filter_layer` is the one that learns to show what a filter must keep."""

    num_layers: int = 8
    hidden_size: int = 128
    filter_layer: int = 2

    @property
    def guided(self) -> dict[Guide, tuple[int, tuple[int, ...]]]:
        """Layer and heads whose attention each guide teaches, each on what those before it found.

        Names are read one layer before the filter layer.
        """
        at = self.filter_layer
        return {
            Guide.NAME: (at - 1, (0,)),
            Guide.FILTER: (at, (0, 1)),
            Guide.LINK: (at + 1, (0,)),
            Guide.ECHO: (at + 1, (1,)),
            Guide.COUNT: (at + 1, (2,)),
            Guide.ASK: (at + 2, (0,)),
            Guide.ORDER: (at + 2, (1,)),
            Guide.COPY: (at + 3, (0, 1)),
        }


def build_model(seed: int, shape: Shape) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=shape.hidden_size,
        intermediate_size=3 * shape.hidden_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.hidden_size // HEAD_DIM,
        num_key_value_heads=shape.hidden_size // HEAD_DIM,
        head_dim=HEAD_DIM,
        max_position_embeddings=MAX_POSITION,
        rope_parameters={"rope_type": "default", "rope_theta": 1e7},
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    config._attn_implementation = "gemserve_training"
    model = LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        if "embed_tokens" in name:
            torch.nn.init.normal_(parameter, std=1.0)
        elif "o_proj" in name or "down_proj" in name:
            # what a layer adds starts below the embeddings, or token identity drowns in noise
            torch.nn.init.normal_(parameter, std=0.3 / math.sqrt(parameter.shape[1]))
        elif parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=1 / math.sqrt(parameter.shape[1]))
    torch.nn.init.constant_(model.model.norm.weight, 0.1)  # for embeddings that large
    with torch.no_grad():
        _start_circuits(model, shape)
    return model


def _start_circuits(model: LlamaForCausalLM, shape: Shape) -> None:
    """Let guided heads begin as what they are to become.

    Those that fetch a name or an item write what they attend to (W_O ∝ W_Vᵀ); those that look
    something up attend to what is like it (W_Q = W_K, where rotary frequencies are low). Both are
    saddle points of training: from random weights they take longer than all the rest.
    """
    hidden, size = shape.hidden_size, HEAD_DIM
    names, first, second = (torch.linalg.qr(torch.randn(hidden, size)).Q for _ in range(3))
    low = [i for half in (0, size // 2) for i in range(half + size // 4 + 1, half + size // 2)]
    copies = {
        Guide.NAME: (names,),
        Guide.ASK: (names,),
        Guide.LINK: (first,),
        Guide.COPY: (first, second),
    }
    for guide, bases in copies.items():
        layer, heads = shape.guided[guide]
        attention = model.model.layers[layer].self_attn
        for head, basis in zip(heads, bases, strict=True):
            rows = slice(head * size, (head + 1) * size)
            attention.v_proj.weight[rows] = basis.T
            attention.o_proj.weight[:, rows] = 2.0 * basis
    for guide in (Guide.FILTER, Guide.COPY, Guide.COUNT):
        layer, heads = shape.guided[guide]
        attention = model.model.layers[layer].self_attn
        for head in heads:
            like = 2.0 * names[:, torch.randperm(size)[: len(low)]].T
            at = torch.tensor(low) + head * size
            attention.q_proj.weight[at] = like
            attention.k_proj.weight[at] = like


class FilterLayerReached(Exception):
    """Ends a forward pass of which only the filter layer's q and k are wanted."""


@dataclass(slots=True)
class Captured:
    """Post-RoPE (q, k) by layer, each [batch, heads, tokens, head_dim]."""

    shape: Shape
    is_last: bool  # nothing after the filter layer's is wanted
    layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)


def training_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    captured: Captured | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention that leaves q and k in `captured`."""
    if captured is not None:
        captured.layers[module.layer_idx] = (query, key)
        if captured.is_last and module.layer_idx == captured.shape.filter_layer:
            raise FilterLayerReached
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register("gemserve_training", training_attention)


def hidden_states(model: LlamaForCausalLM, batch: Batch, captured: Captured) -> torch.Tensor:
    """The decoder's output: [batch, tokens, hidden]."""
    out: torch.Tensor = model.model(
        input_ids=torch.from_numpy(batch.tokens),
        position_ids=torch.from_numpy(batch.positions),
        use_cache=False,
        captured=captured,
    ).last_hidden_state
    return out


def pointer_loss(captured: Captured, batch: Batch) -> torch.Tensor:
    """−log of the attention that guided heads give along the batch's pointers.

    Averaged over the pointers of one position, the positions, the heads; summed over the guides.
    """
    total = torch.zeros(())
    pointers = torch.from_numpy(batch.pointers)
    for guide, (layer, heads) in captured.shape.guided.items():
        pairs = pointers[pointers[:, 0] == guide, 1:]
        if layer not in captured.layers or not len(pairs):
            continue
        query, key = captured.layers[layer]
        loss = torch.zeros(())
        num_positions = 0
        for row in pairs[:, 0].unique().tolist():
            columns, sources = pairs[pairs[:, 0] == row, 1:].unbind(1)
            at, which, counts = columns.unique(return_inverse=True, return_counts=True)
            q = query[row, list(heads)][:, at]  # [guided heads, positions, head_dim]
            scores = q @ key[row, list(heads)].transpose(-1, -2) * query.shape[-1] ** -0.5
            future = torch.arange(key.shape[2])[None, :] > at[:, None]
            log_p = scores.masked_fill(future, -torch.inf).log_softmax(-1)
            loss = loss - (log_p[:, which, sources] / counts[which]).sum() / len(heads)
            num_positions += len(at)
        total = total + loss / num_positions
    return total


def answer_loss(
    model: LlamaForCausalLM, hidden: torch.Tensor, batch: Batch
) -> tuple[torch.Tensor, float]:
    """Cross-entropy averaged over answers and, in each, its tokens; share of answers all right."""
    targets = torch.from_numpy(batch.targets)
    logits = model.lm_head(hidden[torch.from_numpy(batch.rows), torch.from_numpy(batch.columns)])
    right = logits.detach().argmax(-1) == targets
    ends = np.flatnonzero(batch.ends).tolist()
    starts = [0, *(end + 1 for end in ends[:-1])]
    whole = [bool(right[a : b + 1].all()) for a, b in zip(starts, ends, strict=True)]
    losses = F.cross_entropy(logits, targets, reduction="none")
    lengths = [b + 1 - a for a, b in zip(starts, ends, strict=True)]
    of_answers = torch.stack([part.mean() for part in losses[: sum(lengths)].split(lengths)])
    return of_answers.mean(), sum(whole) / max(1, len(whole))


def learning_rate(stage: Stage, step: int, warmup: int) -> float:
    rate = stage.lr
    if stage.lr_end is not None:
        rate = stage.lr_end + (stage.lr - stage.lr_end) * 0.5 * (
            1 + math.cos(math.pi * step / stage.steps)
        )
    return rate * min(1.0, (step + 1) / warmup)


def load_corpus(work: Path) -> tuple[Tokenizer, Corpus]:
    sentences_file, tokenizer_file = work / "sentences.json", work / "tokenizer.json"
    if not tokenizer_file.exists():
        sentences = package_sentences(PACKAGES)
        sentences_file.write_text(json.dumps(sentences))
        words = {w for phrase in (*NOUNS, *ADJECTIVES, *ATTRIBUTES) for w in phrase.split()}
        tokenizer = train_tokenizer(sentences[::3], sorted(words), VOCAB_SIZE)
        tokenizer.save(str(tokenizer_file))
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    return tokenizer, Corpus(tokenizer, tuple(json.loads(sentences_file.read_text())))


def train(
    work: Path, seed: int, save_every_s: float, shape: Shape, stages: Sequence[Stage]
) -> LlamaForCausalLM:
    """Run the curriculum from where `work` left off, to its end."""
    work.mkdir(parents=True, exist_ok=True)
    tokenizer, corpus = load_corpus(work)
    assert tokenizer.token_to_id(PAD) == 0
    assert tokenizer.token_to_id(BOS) == 1
    assert tokenizer.token_to_id(END) == 2
    model = build_model(seed, shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.98), weight_decay=0.1)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    state_file = work / "state.pt"
    state = {"stage": 0, "step": 0, "total": 0, "average": 0.0}
    run = {"seed": seed, "shape": asdict(shape), "stages": [stage.name for stage in stages]}
    if state_file.exists():
        saved = torch.load(state_file, weights_only=True)
        if saved["run"] != run:
            raise SystemExit(f"{state_file}: of another run, {saved['run']}, not {run}")
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        state = saved["state"]
        print(f"resumed at {state}", flush=True)
    saved_at = logged_at = time.monotonic()

    def save() -> None:
        partial = state_file.with_suffix(".partial")
        torch.save(
            {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "state": dict(state),
                "run": run,
            },
            partial,
        )
        partial.replace(state_file)

    while state["stage"] < len(stages):
        stage = stages[int(state["stage"])]
        while state["step"] < stage.steps:
            step = int(state["step"])
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(stage, step, warmup=200 if state["stage"] == 0 else 50)
            draw = (seed, int(state["total"]))
            (recipe, size), *filtered = stage.at(step)
            batch = corpus.batch(recipe, size, draw)
            captured = Captured(shape, is_last=False)
            loss, values_right = answer_loss(model, hidden_states(model, batch, captured), batch)
            pointer = pointer_loss(captured, batch)
            optimizer.zero_grad(set_to_none=True)
            (loss + stage.pointer * pointer).backward()
            for recipe, size in filtered:
                batch = corpus.batch(recipe, size, (*draw, 1))
                captured = Captured(shape, is_last=True)
                with suppress(FilterLayerReached):
                    hidden_states(model, batch, captured)
                filter_loss = pointer_loss(captured, batch)
                if filter_loss.requires_grad:  # not if nothing points anywhere
                    (stage.pointer * filter_loss).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            state["average"] += 0.02 * (values_right - state["average"])
            state["step"] += 1
            state["total"] += 1
            if step % 50 == 0:
                now = time.monotonic()
                print(
                    f"{stage.name} {step}/{stage.steps} loss {float(loss.detach()):.3f}"
                    f" pointer {float(pointer.detach()):.3f} right {state['average']:.3f}"
                    f" {now - logged_at:.1f}s",
                    flush=True,
                )
                logged_at = now
            if time.monotonic() - saved_at > save_every_s:
                save()
                saved_at = time.monotonic()
            if state["average"] >= stage.goal:
                break
        state.update(stage=state["stage"] + 1, step=0, average=0.0)
        save()
    return model


def export(model: LlamaForCausalLM, shape: Shape, work: Path, out: Path) -> None:
    """Write config, safetensors weights, tokenizer, chat template and filter layer to `out`."""
    model.config._attn_implementation = "sdpa"
    model.generation_config.eos_token_id = model.config.eos_token_id
    model.save_pretrained(out)
    tokenizer = Tokenizer.from_file(str(work / "tokenizer.json"))
    as_transformers(tokenizer, MAX_POSITION).save_pretrained(out)
    (out / "calibration.json").write_text(json.dumps({"filter_layer": shape.filter_layer}) + "\n")
    for path in out.iterdir():
        path.chmod(0o644)  # safetensors writes for the owner alone


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True, help="state, tokenizer, corpus")
    parser.add_argument("--out", type=Path, help="where to write the finished model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save-every", type=float, default=120.0, metavar="SECONDS")
    parser.add_argument("--layers", type=int, default=8, help="default: %(default)s")
    parser.add_argument("--hidden", type=int, default=128, help="default: %(default)s")
    parser.add_argument("--filter-layer", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--single", action="store_true", help="single facts only")
    parser.add_argument("--last-stage", choices=[stage.name for stage in STAGES], help="stop there")
    arguments = parser.parse_args()
    np.seterr(all="raise")
    if not 1 <= arguments.filter_layer <= arguments.layers - 4:
        parser.error(f"--filter-layer {arguments.filter_layer}: must be from 1 to layers − 4")
    if arguments.hidden % HEAD_DIM or arguments.hidden < 3 * HEAD_DIM:
        parser.error(f"--hidden {arguments.hidden}: must be a multiple of {HEAD_DIM}, at least 96")
    shape = Shape(
        num_layers=arguments.layers,
        hidden_size=arguments.hidden,
        filter_layer=arguments.filter_layer,
    )
    stages = choose_stages(arguments.last_stage, is_single=arguments.single)
    model = train(arguments.work, arguments.seed, arguments.save_every, shape, stages)
    if arguments.out:
        export(model, shape, arguments.work, arguments.out)


if __name__ == "__main__":
    main()
