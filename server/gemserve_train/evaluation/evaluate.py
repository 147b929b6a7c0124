"""Scores the answers to a file of chats, with an adapter and without."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from gemserve.engine.answers import answer_all
from gemserve.engine.core import Core
from gemserve.model.adapter import NO_ADAPTER, Adapter
from gemserve.model.causal_model import CausalModel
from gemserve_train.evaluation.answer_rules import Rule
from gemserve_train.evaluation.chats import Question, behind_prefix
from gemserve_train.forward import answer_logits

_BATCH = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """`scores`: by rule, one for each question. `loss`: per token of the expected answers.

    `prompt_tokens`: the mean length of a prompt, with examples. `seconds`: the time of all answers.
    """

    name: str
    scores: Mapping[str, tuple[float, ...]]
    loss: float
    prompt_tokens: float
    seconds: float
    answers: tuple[str, ...]


def evaluate(
    core: Core,
    name: str,
    adapter: Adapter | None,
    questions: Sequence[Question],
    rules: Mapping[str, Rule],
    max_tokens: int,
) -> Evaluation:
    """Answer all questions greedily, and score them by each rule.

    Without an adapter, what all prompts begin with is read once.
    """
    lengths = [question.example.num_prompt for question in questions]
    started_s = time.perf_counter()
    used: Adapter | None = adapter
    if adapter is None:
        used, questions = behind_prefix(core.model, questions)
    prompts = [q.example.ids[: q.example.num_prompt] for q in questions]
    answers = answer_all(core, prompts, max_tokens, adapter=used)
    seconds = time.perf_counter() - started_s
    pairs = [(answer, q.expected) for answer, q in zip(answers, questions, strict=True)]
    return Evaluation(
        name=name,
        scores={rule: tuple(score(*pair) for pair in pairs) for rule, score in rules.items()},
        loss=answer_loss(core.model, used or NO_ADAPTER, questions),
        prompt_tokens=statistics.fmean(lengths),
        seconds=seconds,
        answers=tuple(answers),
    )


@torch.no_grad()
def answer_loss(model: CausalModel, adapter: Adapter, questions: Sequence[Question]) -> float:
    """The mean loss per token of the expected answers, with the token that ends them."""
    runs: CausalModel = adapter.replacement or model
    total, count = 0.0, 0
    for low in range(0, len(questions), _BATCH):
        examples = [question.example for question in questions[low : low + _BATCH]]
        found = answer_logits(runs, adapter, examples)
        for example, logits in zip(examples, found, strict=True):
            answer = torch.tensor(example.ids[example.num_prompt :], device=logits.device)
            total += float(torch.nn.functional.cross_entropy(logits, answer, reduction="sum"))
            count += len(answer)
    return total / count
