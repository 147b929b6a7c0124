"""The trainer of the built-in model: its data say what they mean, and a stopped run resumes."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from gemserve.model.loading.loader import BUILTIN_PATH
from recipes.builtin_model import train as training
from recipes.builtin_model.corpus import Corpus, TrainingBatch
from recipes.builtin_model.curriculum import STAGES, SequenceRecipe, Size, choose_stages
from recipes.builtin_model.guides import Guide, GuidedShape

SHAPE = GuidedShape(num_layers=7, hidden_size=96, filter_layer=3)
SENTENCES = tuple(f"Sentence {i} says that the river runs past {i} houses." for i in range(200))
RECIPE = SequenceRecipe(
    num_tokens=600,
    problems=(2, 4),
    questions=3,
    weights=(1, 1, 1, 1, 1),
    two_words=0.3,
    letters=0.2,
    words=0.2,
    max_position=32768,
)


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return Corpus(Tokenizer.from_file(str(BUILTIN_PATH / "tokenizer.json")), SENTENCES)


def pairs(batch: TrainingBatch, guide: Guide) -> dict[tuple[int, int], set[int]]:
    """The earlier positions that (row, position) is guided to."""
    found: dict[tuple[int, int], set[int]] = {}
    for _, row, column, source in batch.pointers[batch.pointers[:, 0] == guide].tolist():
        found.setdefault((row, column), set()).add(source)
    return found


def test_targets_are_the_next_tokens(corpus: Corpus) -> None:
    """An offset by one here trains a model that copies the wrong token."""
    batch = corpus.batch(RECIPE, 20, (0,))
    assert np.array_equal(batch.tokens[batch.rows, batch.columns + 1], batch.targets)
    assert (batch.pointers[:, 3] < batch.pointers[:, 2]).all()


def test_guides_lead_to_where_an_answer_stands(corpus: Corpus) -> None:
    """Before each character of a value to that character; of a variable by way of its statement."""
    tokenizer = Tokenizer.from_file(str(BUILTIN_PATH / "tokenizer.json"))
    between = {tokenizer.token_to_id(token) for token in (",", "Ġ", "<|end|>")}
    for kind in range(4):
        weights = tuple(float(i == kind) for i in range(5))
        batch = corpus.batch(replace(RECIPE, weights=weights), 10, (kind,))
        copied, kept, linked = (pairs(batch, g) for g in (Guide.COPY, Guide.FILTER, Guide.LINK))
        num_checked = 0
        for row, column, target in zip(
            batch.rows.tolist(), batch.columns.tolist(), batch.targets.tolist(), strict=True
        ):
            if target in between:
                continue
            num_checked += 1
            (source,) = copied[row, column]
            if kind == 3:
                assert {source, *linked[row, source]} <= kept[row, column]
                (source,) = linked[row, source]
            assert batch.tokens[row, source] == target
            assert source in kept[row, column]
        assert num_checked > 50


def test_positions_only_grow_and_stay_in_range(corpus: Corpus) -> None:
    batch = corpus.batch(RECIPE, 50, (1,))
    assert (np.diff(batch.positions, axis=1) >= 1).all()
    assert batch.positions.max() < RECIPE.max_position
    assert (batch.positions[:, -1] > RECIPE.num_tokens).any()


def test_a_step_s_data_follow_from_its_seed(corpus: Corpus) -> None:
    first, again, other = (corpus.batch(RECIPE, 4, (seed, 7)) for seed in (3, 3, 4))
    assert np.array_equal(first.tokens, again.tokens)
    assert not np.array_equal(first.tokens, other.tokens)


def test_a_stopped_run_resumes_where_it_was(tmp_path: Path) -> None:
    """Three steps at once, or two and then one, end in the same weights."""

    def prepared(name: str) -> Path:
        work = tmp_path / name
        work.mkdir()
        (work / "tokenizer.json").write_text((BUILTIN_PATH / "tokenizer.json").read_text())
        (work / "sentences.json").write_text(json.dumps(SENTENCES))
        return work

    stage = replace(
        STAGES[-1],
        recipe=RECIPE,
        sizes=(Size(600, 2, (2, 4), 32768), Size(256, 2, (1, 2), 4096)),
        filter_size=Size(512, 1, (2, 4), 32768),
        steps=3,
        goal=2.0,
    )
    run = partial(training.train, seed=0, save_every_s=1e9, shape=SHAPE)
    whole = run(prepared("whole"), stages=[stage])
    parts = prepared("parts")
    run(parts, stages=[replace(stage, steps=2)])
    state = torch.load(parts / "state.pt", weights_only=True)
    state["state"].update(stage=0, step=2)
    torch.save(state, parts / "state.pt")
    resumed = run(parts, stages=[stage])
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(resumed.state_dict()[name], value, atol=1e-6, rtol=1e-5)
    training.export(resumed, SHAPE, parts, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "calibration.json").read_text()) == {"filter_layer": 3}


def test_sizes_come_in_turn_and_the_filter_s_beside_the_longest() -> None:
    mixed = next(stage for stage in STAGES if stage.name == "mixed")
    steps = [mixed.at(step) for step in range(len(mixed.sizes) + 1)]
    assert steps[0] == steps[-1]
    lengths = [[recipe.num_tokens for recipe, _ in step] for step in steps]
    assert lengths[:3] == [[1024], [256], [4096, 8192]]


def test_stages_end_where_asked_and_can_do_without_other_skills() -> None:
    first, second = choose_stages(STAGES[1].name, is_single=True)
    assert (first.name, second.name) == (STAGES[0].name, STAGES[1].name)
    assert first.recipe.weights[1:] == (0, 0, 0, 0)
    assert choose_stages(None, is_single=False) == STAGES
