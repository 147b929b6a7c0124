"""Train the built-in model on a CPU: `python -m recipes.builtin_model.train --work DIR`.

The curriculum lengthens step by step: bare facts, then prose, then long documents with skipped
positions. Beside the loss on answers there is a loss on attention, which teaches guided heads where
to look at each step of a skill (`guides.Guide`). The heads of the filter layer learn to look at all
that an answer needs, because a filter sees only that layer's queries and keys. The data of a step
follow from (seed, step), and the state is saved every few minutes: a stopped run resumes.
"""

from __future__ import annotations

import argparse
import json
import math
import sysconfig
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from gemserve.synthetic.prose import docstring_sentences
from gemserve.synthetic.words import ADJECTIVES, ATTRIBUTES, NOUNS
from recipes.builtin_model.corpus import Corpus, TrainingBatch
from recipes.builtin_model.curriculum import MAX_POSITION, STAGES, Stage, choose_stages
from recipes.builtin_model.guides import GuidedShape
from recipes.builtin_model.losses import (
    CapturedLayers,
    FilterLayerReached,
    answer_loss,
    hidden_states,
    pointer_loss,
)
from recipes.builtin_model.network import HEAD_DIM, VOCAB_SIZE, build_model
from recipes.builtin_model.tokenizer import BOS, END, PAD, as_transformers, train_tokenizer

PACKAGES = ("torch", "numpy", "networkx", "sympy", "matplotlib", "pydantic", "transformers")


def learning_rate(stage: Stage, step: int, warmup: int) -> float:
    rate = stage.lr
    if stage.lr_end is not None:
        rate = stage.lr_end + (stage.lr - stage.lr_end) * 0.5 * (
            1 + math.cos(math.pi * step / stage.steps)
        )
    return rate * min(1.0, (step + 1) / warmup)


def package_sentences(names: tuple[str, ...]) -> tuple[str, ...]:
    """Sentences of the documentation strings of installed third-party packages, in file order."""
    root = Path(sysconfig.get_paths()["purelib"])
    files = [p for name in names for p in sorted((root / name).rglob("*.py"))]
    return tuple(docstring_sentences(files))


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


class Run:
    """One run of the curriculum: the model, its optimizer, and its progress.

    `run`: settings that a saved state must share to be resumed.
    """

    def __init__(
        self, work: Path, seed: int, shape: GuidedShape, stages: Sequence[Stage], corpus: Corpus
    ) -> None:
        self._file = work / "state.pt"
        self._seed, self._shape, self._stages, self._corpus = seed, shape, stages, corpus
        self.model = build_model(seed, shape)
        self._optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=1e-3, betas=(0.9, 0.98), weight_decay=0.1
        )
        self.state = {"stage": 0, "step": 0, "total": 0, "average": 0.0}
        self._run = {"seed": seed, "shape": asdict(shape), "stages": [s.name for s in stages]}

    def resume(self) -> None:
        """Load the saved state, if there is one. Raises `SystemExit` if another run saved it."""
        if not self._file.exists():
            return
        saved = torch.load(self._file, weights_only=True)
        if saved["run"] != self._run:
            raise SystemExit(f"{self._file}: of another run, {saved['run']}, not {self._run}")
        self.model.load_state_dict(saved["model"])
        self._optimizer.load_state_dict(saved["optimizer"])
        self.state = saved["state"]
        print(f"resumed at {self.state}", flush=True)

    def save(self) -> None:
        partial = self._file.with_suffix(".partial")
        torch.save(
            {
                "model": self.model.state_dict(),
                "optimizer": self._optimizer.state_dict(),
                "state": dict(self.state),
                "run": self._run,
            },
            partial,
        )
        partial.replace(self._file)

    def step(self, stage: Stage) -> tuple[float, float]:
        """Do one optimizer step. Returns the losses of answers and pointers before it."""
        step = int(self.state["step"])
        for group in self._optimizer.param_groups:
            warmup = 200 if self.state["stage"] == 0 else 50
            group["lr"] = learning_rate(stage, step, warmup=warmup)
        draw = (self._seed, int(self.state["total"]))
        (recipe, size), *filtered = stage.at(step)
        batch = self._corpus.batch(recipe, size, draw)
        captured = CapturedLayers(self._shape, is_last=False)
        hidden = hidden_states(self.model, batch, captured)
        loss, values_right = answer_loss(self.model, hidden, batch)
        pointer = pointer_loss(captured, batch)
        self._optimizer.zero_grad(set_to_none=True)
        (loss + stage.pointer * pointer).backward()
        for recipe, size in filtered:
            self._train_filter_layer(stage, self._corpus.batch(recipe, size, (*draw, 1)))
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        self.state["average"] += 0.02 * (values_right - self.state["average"])
        self.state["step"] += 1
        self.state["total"] += 1
        return float(loss.detach()), float(pointer.detach())

    def _train_filter_layer(self, stage: Stage, batch: TrainingBatch) -> None:
        """Add the gradients of the pointer loss of a pass that ends at the filter layer."""
        captured = CapturedLayers(self._shape, is_last=True)
        with suppress(FilterLayerReached):
            hidden_states(self.model, batch, captured)
        loss = pointer_loss(captured, batch)
        if loss.requires_grad:  # skipped if the batch has no pointers
            (stage.pointer * loss).backward()


def train(
    work: Path, seed: int, save_every_s: float, shape: GuidedShape, stages: Sequence[Stage]
) -> LlamaForCausalLM:
    """Run the curriculum from the state in `work` to its end."""
    work.mkdir(parents=True, exist_ok=True)
    tokenizer, corpus = load_corpus(work)
    assert tokenizer.token_to_id(PAD) == 0
    assert tokenizer.token_to_id(BOS) == 1
    assert tokenizer.token_to_id(END) == 2
    run = Run(work, seed, shape, stages, corpus)
    print(f"{sum(p.numel() for p in run.model.parameters()):,} parameters", flush=True)
    run.resume()
    saved_at = logged_at = time.monotonic()
    while run.state["stage"] < len(stages):
        stage = stages[int(run.state["stage"])]
        while run.state["step"] < stage.steps:
            step = int(run.state["step"])
            loss, pointer = run.step(stage)
            if step % 50 == 0:
                now = time.monotonic()
                print(
                    f"{stage.name} {step}/{stage.steps} loss {loss:.3f}"
                    f" pointer {pointer:.3f} right {run.state['average']:.3f}"
                    f" {now - logged_at:.1f}s",
                    flush=True,
                )
                logged_at = now
            if time.monotonic() - saved_at > save_every_s:
                run.save()
                saved_at = time.monotonic()
            if run.state["average"] >= stage.goal:
                break
        run.state.update(stage=run.state["stage"] + 1, step=0, average=0.0)
        run.save()
    return run.model


def export(model: LlamaForCausalLM, shape: GuidedShape, work: Path, out: Path) -> None:
    """Write config, safetensors weights, tokenizer, chat template and filter layer to `out`."""
    model.config._attn_implementation = "sdpa"
    model.generation_config.eos_token_id = model.config.eos_token_id
    model.save_pretrained(out)
    tokenizer = Tokenizer.from_file(str(work / "tokenizer.json"))
    as_transformers(tokenizer, MAX_POSITION).save_pretrained(out)
    (out / "calibration.json").write_text(json.dumps({"filter_layer": shape.filter_layer}) + "\n")
    for path in out.iterdir():
        path.chmod(0o644)  # safetensors lets the owner alone read the file


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
