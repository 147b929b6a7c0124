"""Scores the answers to a file of chats, with an adapter and without."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gemserve.contract.adapters import LoadedAdapter
from gemserve.contract.events import Finished, TextDelta
from gemserve.contract.filter_options import FilterParams
from gemserve.contract.requests import Request
from gemserve.contract.sampling import SamplingParams
from gemserve.engine.core import Core
from gemserve.model.adapter import NO_ADAPTER, Adapter
from gemserve.model.passes.causal_model import CausalModel
from gemserve_train.evaluation.answer_rules import Rule
from gemserve_train.evaluation.chats import Question, behind_prefix
from gemserve_train.forward import answer_logits


def answer_all(
    core: Core,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    adapter: LoadedAdapter | None = None,
) -> list[str]:
    """Greedy answers to prompts that are read whole. They share the engine's steps."""
    assert core.is_idle
    jobs: dict[Any, int] = {}
    texts = ["" for _ in prompts]
    for index, ids in enumerate(prompts):
        request = Request(
            request_id=f"answer-{index}",
            prompt_ids=ids,
            sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0),
            filter=FilterParams(method="none", keep=16),
            adapter=adapter,
        )
        jobs[core.add(request)] = index
    while not core.is_idle:
        for job, event in core.step():
            if isinstance(event, TextDelta):
                texts[jobs[job]] += event.text
            elif isinstance(event, Finished):
                assert event.error is None, event.error
    return texts


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
