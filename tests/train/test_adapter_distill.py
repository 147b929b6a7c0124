"""Distilling a long prefix: the teacher's predictions, and students that are not NTK terms."""

from __future__ import annotations

import pytest
import torch

from gemserve.adapters.prefix import Prefix
from gemserve.model.passes.causal_model import CausalModel
from gemserve_train.conversion_texts import ConversionText
from gemserve_train.distill import DistillConfig, Teacher, agreement, distill
from gemserve_train.forward import logits_with_gradients
from gemserve_train.lora_parameters import LoraParameters
from gemserve_train.parameters import Parameters, PrefixParameters, read_prefix
from tests import models
from tests.model.test_adapters import prompt

LONG = prompt(40, seed=3)
TEXTS = [ConversionText(tuple(prompt(12 + i % 5, seed=i)), 6, num_lead=2) for i in range(12)]


@pytest.fixture(scope="module")
def teacher() -> Teacher:
    model = CausalModel(models.build("llama", scale=1.0))
    keys, values = read_prefix(model, LONG)
    return Teacher(model, Prefix("", "", keys=keys, values=values))


def test_predictions_are_those_of_the_text_alone_after_the_prefix(teacher: Teacher) -> None:
    """The lead stays in place of the prefix, and texts of other lengths share the row."""
    for text, found in zip(TEXTS, teacher.predictions(TEXTS), strict=True):
        ids = torch.tensor([text.ids[2:]])
        with torch.no_grad():
            logits = logits_with_gradients(teacher.model, teacher.prefix, ids)[0, 3:-1]
        torch.testing.assert_close(
            found.log_probs.float(), logits.log_softmax(-1), atol=0.01, rtol=0.01
        )
        assert torch.equal(found.likeliest, logits.argmax(-1))


def test_predictions_beyond_a_limit_are_computed_anew(teacher: Teacher) -> None:
    """All were kept: of a thousand answers of 100 tokens, with Qwen's vocabulary, 30 GB."""
    whole = teacher.predictions(TEXTS)
    limit = sum(found.log_probs.nbytes for found in whole[:3])
    small = Teacher(teacher.model, teacher.prefix, most_bytes=limit)
    agreement(small, None, TEXTS)
    assert not small._known
    for _ in range(2):
        for found, expected in zip(small.predictions(TEXTS), whole, strict=True):
            assert torch.equal(found.likeliest, expected.likeliest)
        held = sum(found.log_probs.nbytes for found in small._known.values())
        assert 0 < held <= limit


def test_the_prefix_agrees_with_itself(teacher: Teacher) -> None:
    texts = [ConversionText(text.ids, text.num_prompt) for text in TEXTS]
    same = agreement(teacher, teacher.prefix, texts)
    assert (same.top1, same.answers) == (1.0, 1.0)
    assert abs(same.kl) < 0.01


@pytest.mark.parametrize("kind", ["prefix", "lora"])
def test_students_of_any_kind_learn(teacher: Teacher, kind: str) -> None:
    """A LoRA's changes are in its own model; the base model was trained in its place."""
    student: Parameters
    if kind == "prefix":
        student = PrefixParameters(teacher.model, LONG[:4])
    else:
        student = LoraParameters(teacher.model, 4, ("q_proj", "v_proj"), seed=0)
    before, after = (
        _divergence(teacher, student, config)
        for config in (DistillConfig(steps=0), DistillConfig(steps=40, rate=0.02))
    )
    assert after < 0.7 * before


def _divergence(teacher: Teacher, student: Parameters, config: DistillConfig) -> float:
    assert distill(teacher, student, TEXTS, config) == config.steps
    adapter = student.adapter()
    if student.replacement is not None:
        adapter = type(adapter)()
        adapter.replacement = student.replacement
    return agreement(teacher, adapter, TEXTS).kl


def test_a_limit_of_time_ends_it(teacher: Teacher) -> None:
    student = PrefixParameters(teacher.model, LONG[:2])
    config = DistillConfig(steps=10**6, max_minutes=1e-9)
    assert distill(teacher, student, TEXTS, config) <= 1
