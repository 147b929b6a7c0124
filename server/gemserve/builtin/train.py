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
    lr_end: float | None = None  # cosine to this; None: constant


STAGES: tuple[Stage, ...] = (
    Stage(
        name="bare",
        recipe=Recipe(num_tokens=160, needles=(2, 5), questions=2, wordings=1),
        batch=32,
        steps=4000,
        lr=2e-3,
        goal=0.95,
    ),
    Stage(
        name="wordings",
        recipe=Recipe(num_tokens=256, needles=(3, 8), questions=3, two_words=0.2, letters=0.1),
        batch=24,
        steps=4000,
        lr=2e-3,
        goal=0.93,
    ),
    Stage(
        name="prose",
        recipe=Recipe(
            num_tokens=512,
            needles=(1, 8),
            questions=4,
            two_words=0.3,
            letters=0.15,
            max_position=4096,
            noise=0.1,
        ),
        batch=10,
        steps=3000,
        lr=1.5e-3,
        goal=0.95,
    ),
    Stage(
        name="distance",
        recipe=Recipe(
            num_tokens=1024,
            needles=(1, 8),
            questions=5,
            two_words=0.3,
            letters=0.2,
            max_position=MAX_POSITION,
            noise=0.1,
        ),
        batch=5,
        steps=4000,
        lr=1.2e-3,
    ),
    Stage(
        name="long",
        recipe=Recipe(
            num_tokens=4096,
            needles=(2, 8),
            questions=8,
            two_words=0.3,
            letters=0.2,
            max_position=MAX_POSITION,
            noise=0.1,
        ),
        batch=1,
        steps=4000,
        lr=8e-4,
        lr_end=2e-5,
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


def training_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    captured: dict[int, tuple[torch.Tensor, torch.Tensor]] | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention that leaves the filter layer's q and k in `captured`."""
    if captured is not None and module.layer_idx == FILTER_LAYER:
        captured[FILTER_LAYER] = (query, key)
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register("gemserve_training", training_attention)


@dataclass(frozen=True, slots=True)
class StepResult:
    loss: torch.Tensor
    pointer_loss: float
    values_right: float


def step_loss(model: LlamaForCausalLM, batch: Batch, pointer_weight: float) -> StepResult:
    rows, columns = torch.from_numpy(batch.rows), torch.from_numpy(batch.columns)
    targets, sources = torch.from_numpy(batch.targets), torch.from_numpy(batch.sources)
    captured: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    hidden = model.model(
        input_ids=torch.from_numpy(batch.tokens),
        position_ids=torch.from_numpy(batch.positions),
        use_cache=False,
        captured=captured,
    ).last_hidden_state
    logits = model.lm_head(hidden[rows, columns])  # [answers, vocab]
    loss = F.cross_entropy(logits, targets)

    has_source = sources >= 0
    query, key = captured[FILTER_LAYER]  # [batch, heads, tokens, head_dim]
    heads = list(POINTER_HEADS)
    scale = query.shape[-1] ** -0.5
    pointer = torch.zeros(())
    for row in range(batch.tokens.shape[0]):
        mine = has_source & (rows == row)
        if not bool(mine.any()):
            continue
        q = query[row, heads][:, columns[mine]]  # [pointer heads, answers, head_dim]
        scores = q @ key[row, heads].transpose(-1, -2) * scale
        future = torch.arange(key.shape[2])[None, :] > columns[mine][:, None]
        log_p = scores.masked_fill(future, -torch.inf).log_softmax(-1)
        pointer = pointer - log_p.gather(-1, sources[mine].expand(len(heads), -1)[..., None]).sum()
    pointer = pointer / (len(heads) * has_source.sum())

    right = logits.detach().argmax(-1) == targets
    ends = torch.nonzero(~has_source).flatten().tolist()
    whole, start = [], 0
    for end in ends:
        whole.append(bool(right[start : end + 1].all()))
        start = end + 1
    return StepResult(
        loss + pointer_weight * pointer, float(pointer.detach()), sum(whole) / max(1, len(whole))
    )


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
    work: Path, seed: int, save_every_s: float, max_stage: str | None = None
) -> LlamaForCausalLM:
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
            batch = corpus.batch(stage.recipe, stage.batch, (seed, int(state["total"])))
            result = step_loss(model, batch, stage.pointer)
            optimizer.zero_grad(set_to_none=True)
            result.loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            state["average"] += 0.02 * (result.values_right - state["average"])
            state["step"] += 1
            state["total"] += 1
            if step % 50 == 0:
                now = time.monotonic()
                print(
                    f"{stage.name} {step}/{stage.steps} loss {float(result.loss.detach()):.3f}"
                    f" pointer {result.pointer_loss:.3f} right {state['average']:.3f}"
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
        if stage.name == max_stage:
            break
    return model


def export(model: LlamaForCausalLM, work: Path, out: Path) -> None:
    """Write config, safetensors weights, tokenizer and chat template to `out`."""
    model.config._attn_implementation = "sdpa"
    model.generation_config.eos_token_id = model.config.eos_token_id
    model.save_pretrained(out)
    tokenizer = Tokenizer.from_file(str(work / "tokenizer.json"))
    as_transformers(tokenizer, MAX_POSITION).save_pretrained(out)


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
