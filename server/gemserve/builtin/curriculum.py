"""The built-in model's curriculum: documents and questions that grow longer and harder."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gemserve.builtin.corpus import Recipe

MAX_POSITION = 32768
SINGLE = (1.0, 0.0, 0.0, 0.0, 0.0)  # weights of `corpus.KINDS`
SKILLS = (0.15, 0.35, 0.2, 0.2, 0.1)


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
        recipe=Recipe(
            num_tokens=224,
            problems=(2, 4),
            questions=2,
            weights=SKILLS,
            two_words=0.2,
            letters=0.1,
            words=0.3,
            max_position=1024,
            noise=0.1,
        ),
        batch=22,
        steps=2000,
        lr=1.5e-3,
        goal=0.9,
    ),
    Stage(
        name="prose",
        recipe=Recipe(
            num_tokens=512,
            problems=(2, 5),
            questions=4,
            weights=SKILLS,
            two_words=0.2,
            letters=0.15,
            words=0.2,
            max_position=4096,
            noise=0.1,
        ),
        batch=10,
        steps=1800,
        lr=1e-3,
        lr_end=3e-4,
        goal=0.95,
    ),
    Stage(
        name="distance",
        recipe=Recipe(
            num_tokens=1024,
            problems=(1, 6),
            questions=5,
            weights=SKILLS,
            two_words=0.2,
            letters=0.15,
            words=0.1,
            max_position=MAX_POSITION,
            noise=0.1,
        ),
        batch=5,
        steps=2400,
        lr=6e-4,
        lr_end=1e-4,
    ),
    Stage(
        name="long",
        recipe=Recipe(
            num_tokens=4096,
            problems=(2, 8),
            questions=8,
            weights=SKILLS,
            two_words=0.2,
            letters=0.15,
            words=0.1,
            max_position=MAX_POSITION,
            noise=0.1,
        ),
        batch=1,
        steps=350,
        lr=5e-4,
        lr_end=2e-5,
        filter_recipe=Recipe(
            num_tokens=8192,
            problems=(4, 12),
            questions=12,
            weights=SKILLS,
            two_words=0.2,
            letters=0.15,
            words=0.1,
            max_position=MAX_POSITION,
            noise=0.1,
        ),
    ),
)


def choose_stages(last: str | None, *, is_single: bool) -> tuple[Stage, ...]:
    """The stages up to `last`, or all; with single facts only, if that is asked for."""
    names = [stage.name for stage in STAGES]
    stages = STAGES if last is None else STAGES[: names.index(last) + 1]
    return tuple(map(_with_single_facts, stages)) if is_single else stages


def _with_single_facts(stage: Stage) -> Stage:
    def simplified(recipe: Recipe) -> Recipe:
        return replace(recipe, weights=SINGLE)

    longer = stage.filter_recipe
    return replace(
        stage,
        recipe=simplified(stage.recipe),
        filter_recipe=None if longer is None else simplified(longer),
    )
