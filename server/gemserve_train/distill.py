"""Distils a long prefix into an adapter: it learns what the model predicts after the prefix.

The prefix is the teacher. Its predictions for a text are kept while there is room, because it is
long and never changes. Any kind of adapter can be the student.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from gemserve.adapters.prefix import Prefix
from gemserve.model.adapter import NO_ADAPTER, Adapter
from gemserve.model.passes.causal_model import CausalModel
from gemserve_train.conversion_texts import ConversionText
from gemserve_train.examples import TrainingExample
from gemserve_train.forward import answer_logits
from gemserve_train.parameters import Parameters

_WARMUP = 10  # steps
_BATCH = 8  # texts that are packed into a row for measuring
_MOST_BYTES = 1 << 30  # of predictions that are kept: 11,000 tokens of SmolLM2


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillConfig:
    """Adam with half a cosine over `steps`, or over `max_minutes` if that ends first.

    The first ten steps warm up: on SmolLM2-135M terms of NTK-Attention diverge at five times the
    default rate.
    """

    steps: int = 200
    rate: float = 2e-3
    batch_size: int = 8
    max_minutes: float | None = None
    seed: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """How often answers are the same as after the prefix, on held-out texts.

    `top1`: share of an answer's tokens with the same likeliest token; `answers`: share of answers
    in which all tokens agree; `kl`: mean Kullback-Leibler divergence from the prefix's
    distribution, in nats.
    """

    top1: float
    answers: float
    kl: float


@dataclass(frozen=True, slots=True)
class TeacherPrediction:
    """Of each token of an answer: `log_probs`, [tokens, vocab], float16, and the `likeliest`."""

    log_probs: torch.Tensor
    likeliest: torch.Tensor


class Teacher:
    """What the model predicts after a prefix. Up to `most_bytes` of log-probabilities are kept."""

    def __init__(self, model: CausalModel, prefix: Prefix, most_bytes: int = _MOST_BYTES) -> None:
        self.model, self.prefix = model, prefix
        self._left_bytes = most_bytes
        self._known: dict[ConversionText, TeacherPrediction] = {}

    @torch.no_grad()
    def predictions(
        self, texts: Sequence[ConversionText], *, are_kept: bool = True
    ) -> list[TeacherPrediction]:
        """The predictions for the answers of `texts`. `are_kept`: they will be asked for again."""
        found = {text: self._known[text] for text in texts if text in self._known}
        new = [text for text in dict.fromkeys(texts) if text not in found]
        if new:
            examples = [TrainingExample(t.after, t.num_prompt - t.num_lead) for t in new]
            of_new = answer_logits(self.model, self.prefix, examples)
            for text, logits in zip(new, of_new, strict=True):
                # copies, because views would keep all logits in memory
                log_probs = logits.log_softmax(-1).half()
                found[text] = TeacherPrediction(log_probs, logits.argmax(-1))
                if are_kept and log_probs.nbytes <= self._left_bytes:
                    self._left_bytes -= log_probs.nbytes
                    self._known[text] = found[text]
        return [found[text] for text in texts]


def distill(
    teacher: Teacher,
    parameters: Parameters,
    texts: Sequence[ConversionText],
    config: DistillConfig,
) -> int:
    """Minimise the divergence from the teacher's predictions. Returns how many steps were made.

    `texts` are all trained on.
    """
    optimizer = torch.optim.Adam(parameters.parameters(), lr=config.rate)
    generator = torch.Generator().manual_seed(config.seed)
    start_s = time.monotonic()
    limit_s = math.inf if config.max_minutes is None else 60 * config.max_minutes
    for step in range(config.steps):
        done = max(step / config.steps, (time.monotonic() - start_s) / limit_s)
        if done >= 1:
            return step
        for group in optimizer.param_groups:
            warm = min(1.0, (step + 1) / _WARMUP)
            group["lr"] = config.rate * warm * 0.5 * (1 + math.cos(math.pi * done))
        picked = torch.randint(len(texts), (config.batch_size,), generator=generator).tolist()
        loss = divergence(teacher, parameters, [texts[index] for index in picked])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters.parameters(), 1.0)
        optimizer.step()
    return config.steps


def divergence(
    teacher: Teacher, parameters: Parameters, texts: Sequence[ConversionText]
) -> torch.Tensor:
    """The mean over `texts` of each answer's mean divergence from the teacher, with gradients."""
    student = parameters.replacement or teacher.model
    ours = answer_logits(student, parameters.adapter(), _examples(texts))
    wanted = teacher.predictions(texts)
    each = [_kl(w, o).mean() for w, o in zip(wanted, ours, strict=True)]
    return torch.stack(each).mean()


@torch.no_grad()
def agreement(
    teacher: Teacher, other: Adapter | None, texts: Sequence[ConversionText]
) -> Agreement:
    """Compare answers after the prefix with answers after `other` (None: neither)."""
    adapter = NO_ADAPTER if other is None else other
    student = adapter.replacement or teacher.model
    same = total = whole = 0
    kl = 0.0
    for low in range(0, len(texts), _BATCH):
        some = texts[low : low + _BATCH]
        ours = answer_logits(student, adapter, _examples(some))
        predicted = teacher.predictions(some, are_kept=False)
        for wanted, logits in zip(predicted, ours, strict=True):
            agreed = wanted.likeliest == logits.argmax(-1)
            same += int(agreed.sum())
            whole += int(agreed.all())
            kl += float(_kl(wanted, logits).sum())
            total += len(agreed)
    return Agreement(top1=same / total, answers=whole / len(texts), kl=kl / total)


def _examples(texts: Sequence[ConversionText]) -> list[TrainingExample]:
    return [TrainingExample(text.ids, text.num_prompt) for text in texts]


def _kl(wanted: TeacherPrediction, ours: torch.Tensor) -> torch.Tensor:
    """The divergence of the distributions at each token: [tokens]."""
    target = wanted.log_probs.to(ours.dtype)
    return F.kl_div(ours.log_softmax(-1), target, reduction="none", log_target=True).sum(-1)
