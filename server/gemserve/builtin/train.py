"""Train the built-in model on CPU: `python -m gemserve.builtin.train --work DIR [--out DIR]`.

The curriculum lengthens step by step: bare needles, then prose, then long documents with skipped
positions. Beside the loss on answers, one auxiliary loss points some heads of the filter layer at
the value being asked for (the share of their attention that reaches it), since a filter can only
see what that layer's queries and keys show. Every step's data follows from (seed, step), and the
state is saved every few minutes: a stopped run resumes where it was.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

from gemserve.builtin.corpus import Batch, Corpus, Recipe
from gemserve.builtin.tokenizer import BOS, END, PAD, as_transformers, train_tokenizer
from gemserve.evaluation.prose import package_sentences
from gemserve.evaluation.words import ADJECTIVES, ATTRIBUTES, NOUNS

PACKAGES = ("torch", "numpy", "networkx", "sympy", "matplotlib", "pydantic", "transformers")
VOCAB_SIZE = 4096
MAX_POSITION = 32768
FILTER_LAYER = 2
POINTER_HEADS = (0, 1)
SKILLS = (0.25, 0.25, 0.2, 0.2, 0.1)  # weights of `corpus.KINDS` once there are several


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage of the curriculum: ends at `steps`, or once `goal` answers in all are right."""

    name: str
    recipe: Recipe
    batch: int
    steps: int
    lr: float
    goal: float = 1.1  # share of whole values right, moving average; above 1: never
    pointer: float = 1.0  # weight of the auxiliary loss
    filter_recipe: Recipe | None = None  # longer documents, for the auxiliary loss alone
    lr_end: float | None = None  # cosine to this; None: constant


STAGES: tuple[Stage, ...] = (
    Stage(
        name="bare",
        recipe=Recipe(num_tokens=160, problems=(2, 5), questions=2, wordings=1),
        batch=32,
        steps=4000,
        lr=2e-3,
        goal=0.95,
    ),
    Stage(
        name="wordings",
        recipe=Recipe(num_tokens=256, problems=(3, 8), questions=3, two_words=0.2, letters=0.1),
        batch=24,
        steps=4000,
        lr=2e-3,
        goal=0.93,
    ),
    Stage(
        name="prose",
        recipe=Recipe(
            num_tokens=512,
            problems=(1, 8),
            questions=4,
            two_words=0.3,
            letters=0.15,
            max_position=4096,
            noise=0.1,
        ),
        batch=10,
        steps=3000,
        lr=1.5e-3,
        goal=0.94,
    ),
    Stage(
        name="distance",
        recipe=Recipe(
            num_tokens=1024,
            problems=(1, 8),
            questions=5,
            two_words=0.3,
            letters=0.2,
            max_position=MAX_POSITION,
            noise=0.1,
        ),
        batch=6,
        steps=450,
        lr=1.2e-3,
    ),
    Stage(
        name="long",
        recipe=Recipe(
            num_tokens=4096,
            problems=(2, 8),
            questions=8,
            two_words=0.3,
            letters=0.2,
            max_position=MAX_POSITION,
            noise=0.1,
        ),
        batch=1,
        steps=520,
        lr=8e-4,
        lr_end=2e-5,
        filter_recipe=Recipe(
            num_tokens=8192,
            problems=(4, 12),
            questions=12,
            two_words=0.3,
            letters=0.2,
            max_position=MAX_POSITION,
            noise=0.1,
        ),
    ),
    Stage(
        name="skills",
        recipe=Recipe(
            num_tokens=512,
            problems=(1, 4),
            questions=4,
            weights=SKILLS,
            two_words=0.2,
            letters=0.15,
            max_position=4096,
            noise=0.1,
        ),
        batch=10,
        steps=2500,
        lr=1.2e-3,
        goal=0.95,
    ),
    Stage(
        name="skills at a distance",
        recipe=Recipe(
            num_tokens=1024,
            problems=(1, 6),
            questions=5,
            weights=SKILLS,
            two_words=0.2,
            letters=0.15,
            max_position=MAX_POSITION,
            noise=0.1,
        ),
        batch=5,
        steps=500,
        lr=1e-3,
    ),
    Stage(
        name="skills, long",
        recipe=Recipe(
            num_tokens=4096,
            problems=(2, 8),
            questions=8,
            weights=SKILLS,
            two_words=0.2,
            letters=0.15,
            max_position=MAX_POSITION,
            noise=0.1,
        ),
        batch=1,
        steps=600,
        lr=8e-4,
        lr_end=2e-5,
        filter_recipe=Recipe(
            num_tokens=8192,
            problems=(4, 12),
            questions=12,
            weights=SKILLS,
            two_words=0.2,
            letters=0.15,
            max_position=MAX_POSITION,
            noise=0.1,
        ),
    ),
)


def build_model(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
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
            torch.nn.init.normal_(parameter, std=0.1)
        elif "o_proj" in name or "down_proj" in name:
            # what a layer adds starts below the embeddings, or token identity drowns in noise
            torch.nn.init.normal_(parameter, std=0.05 / math.sqrt(parameter.shape[1]))
        elif parameter.dim() == 2:
            torch.nn.init.normal_(parameter, std=1 / math.sqrt(parameter.shape[1]))
    return model


class FilterLayerReached(Exception):
    """Ends a forward pass of which only the filter layer's q and k are wanted."""


@dataclass(slots=True)
class Captured:
    """The filter layer's post-RoPE q and k, each [batch, heads, tokens, head_dim]."""

    is_last: bool  # nothing after them is wanted
    query: torch.Tensor | None = None
    key: torch.Tensor | None = None


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
    """Causal attention that leaves the filter layer's q and k in `captured`."""
    if captured is not None and module.layer_idx == FILTER_LAYER:
        captured.query, captured.key = query, key
        if captured.is_last:
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
    """−log of the attention that pointer heads give along the batch's pointers, averaged."""
    query, key = captured.query, captured.key
    assert query is not None
    assert key is not None
    pointers = torch.from_numpy(batch.pointers)
    heads = list(POINTER_HEADS)
    total = torch.zeros(())
    for row in range(batch.tokens.shape[0]):
        columns, sources = pointers[pointers[:, 0] == row, 1:].unbind(1)
        if not len(columns):
            continue
        q = query[row, heads][:, columns]  # [pointer heads, pairs, head_dim]
        scores = q @ key[row, heads].transpose(-1, -2) * query.shape[-1] ** -0.5
        future = torch.arange(key.shape[2])[None, :] > columns[:, None]
        log_p = scores.masked_fill(future, -torch.inf).log_softmax(-1)
        total = total - log_p.gather(-1, sources.expand(len(heads), -1)[..., None]).sum()
    return total / (len(heads) * max(1, len(pointers)))


def answer_loss(
    model: LlamaForCausalLM, hidden: torch.Tensor, batch: Batch
) -> tuple[torch.Tensor, float]:
    """Cross-entropy of the answers' tokens, and the share of whole answers predicted right."""
    targets = torch.from_numpy(batch.targets)
    logits = model.lm_head(hidden[torch.from_numpy(batch.rows), torch.from_numpy(batch.columns)])
    right = logits.detach().argmax(-1) == targets
    ends = np.flatnonzero(batch.ends).tolist()
    starts = [0, *(end + 1 for end in ends[:-1])]
    whole = [bool(right[a : b + 1].all()) for a, b in zip(starts, ends, strict=True)]
    return F.cross_entropy(logits, targets), sum(whole) / max(1, len(whole))


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


def train(work: Path, seed: int, save_every_s: float) -> LlamaForCausalLM:
    """Run the curriculum from where `work` left off, to its end."""
    work.mkdir(parents=True, exist_ok=True)
    tokenizer, corpus = load_corpus(work)
    assert tokenizer.token_to_id(PAD) == 0
    assert tokenizer.token_to_id(BOS) == 1
    assert tokenizer.token_to_id(END) == 2
    model = build_model(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.98), weight_decay=0.01)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    state_file = work / "state.pt"
    state = {"stage": 0, "step": 0, "total": 0, "average": 0.0}
    if state_file.exists():
        saved = torch.load(state_file, weights_only=True)
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
            },
            partial,
        )
        partial.replace(state_file)

    while state["stage"] < len(STAGES):
        stage = STAGES[int(state["stage"])]
        while state["step"] < stage.steps:
            step = int(state["step"])
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(stage, step, warmup=200 if state["stage"] == 0 else 50)
            draw = (seed, int(state["total"]))
            batch = corpus.batch(stage.recipe, stage.batch, draw)
            captured = Captured(is_last=False)
            loss, values_right = answer_loss(model, hidden_states(model, batch, captured), batch)
            pointer = pointer_loss(captured, batch)
            optimizer.zero_grad(set_to_none=True)
            (loss + stage.pointer * pointer).backward()
            if stage.filter_recipe is not None:
                batch = corpus.batch(stage.filter_recipe, 1, (*draw, 1))
                captured = Captured(is_last=True)
                with suppress(FilterLayerReached):
                    hidden_states(model, batch, captured)
                pointer = pointer_loss(captured, batch)
                if pointer.requires_grad:  # not if nothing points anywhere
                    (stage.pointer * pointer).backward()
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


def export(model: LlamaForCausalLM, work: Path, out: Path) -> None:
    """Write config, safetensors weights, tokenizer, chat template and filter layer to `out`."""
    model.config._attn_implementation = "sdpa"
    model.generation_config.eos_token_id = model.config.eos_token_id
    model.save_pretrained(out)
    tokenizer = Tokenizer.from_file(str(work / "tokenizer.json"))
    as_transformers(tokenizer, MAX_POSITION).save_pretrained(out)
    (out / "calibration.json").write_text(json.dumps({"filter_layer": FILTER_LAYER}) + "\n")
    for path in out.iterdir():
        path.chmod(0o644)  # safetensors writes for the owner alone


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True, help="state, tokenizer, corpus")
    parser.add_argument("--out", type=Path, help="where to write the finished model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save-every", type=float, default=120.0, metavar="SECONDS")
    arguments = parser.parse_args()
    np.seterr(all="raise")
    model = train(arguments.work, arguments.seed, arguments.save_every)
    if arguments.out:
        export(model, arguments.work, arguments.out)


if __name__ == "__main__":
    main()
