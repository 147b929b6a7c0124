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
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from gemserve.builtin.recipe.corpus import Corpus
from gemserve.builtin.recipe.curriculum import MAX_POSITION, STAGES, Stage, choose_stages
from gemserve.builtin.recipe.guides import GuidedShape
from gemserve.builtin.recipe.losses import (
    CapturedLayers,
    FilterLayerReached,
    answer_loss,
    hidden_states,
    pointer_loss,
)
from gemserve.builtin.recipe.network import HEAD_DIM, VOCAB_SIZE, build_model
from gemserve.builtin.recipe.tokenizer import BOS, END, PAD, as_transformers, train_tokenizer
from gemserve.synthetic.prose import package_sentences
from gemserve.synthetic.words import ADJECTIVES, ATTRIBUTES, NOUNS

PACKAGES = ("torch", "numpy", "networkx", "sympy", "matplotlib", "pydantic", "transformers")


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
    work: Path, seed: int, save_every_s: float, shape: GuidedShape, stages: Sequence[Stage]
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
            captured = CapturedLayers(shape, is_last=False)
            loss, values_right = answer_loss(model, hidden_states(model, batch, captured), batch)
            pointer = pointer_loss(captured, batch)
            optimizer.zero_grad(set_to_none=True)
            (loss + stage.pointer * pointer).backward()
            for recipe, size in filtered:
                batch = corpus.batch(recipe, size, (*draw, 1))
                captured = CapturedLayers(shape, is_last=True)
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


def export(model: LlamaForCausalLM, shape: GuidedShape, work: Path, out: Path) -> None:
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
    shape = GuidedShape(
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
