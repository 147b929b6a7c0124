"""The built-in model's curriculum: documents and questions that grow longer and harder."""

from __future__ import annotations

from dataclasses import dataclass, replace

KINDS = ("single", "multi_value", "multi_query", "tracking", "common_words")


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceRecipe:
    """The sequences of one training stage.

    `problems`: the least and the most problems in a document; at most `questions` of them get a
    question. `weights`: how often each of `KINDS` is drawn. A list of common words is always alone
    in its document.
    """

    num_tokens: int
    problems: tuple[int, int]
    questions: int
    weights: tuple[float, ...] = (1.0, 0.0, 0.0, 0.0, 0.0)
    items: int = 4  # most items of an answer
    two_words: float = 0.0
    letters: float = 0.0
    words: float = 0.0
    wordings: int = 10
    max_position: int = 0  # 0: positions are not skipped
    noise: float = 0.0  # share of documents whose filler is random tokens


MAX_POSITION = 32768
SINGLE = (1.0, 0.0, 0.0, 0.0, 0.0)  # weights of `KINDS`
SKILLS = (0.15, 0.35, 0.2, 0.2, 0.1)
LISTS = (0.1, 0.4, 0.3, 0.1, 0.1)


@dataclass(frozen=True, slots=True)
class Size:
    """The sequences of one step: length, number, problems in each, and largest position."""

    num_tokens: int
    batch: int
    problems: tuple[int, int]
    max_position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage of the curriculum. It ends at `steps`, or once `goal` of all answers are right."""

    name: str
    recipe: SequenceRecipe
    sizes: tuple[Size, ...]  # the sizes of successive steps, in turn
    steps: int
    lr: float
    goal: float = 1.1  # moving average of the share of right answers; above 1: never reached
    pointer: float = 1.0  # weight of the auxiliary loss
    # further sequences for the auxiliary loss, in steps of the longest size
    filter_size: Size | None = None
    lr_end: float | None = None  # the rate falls to this as a cosine; None: constant rate

    def at(self, step: int) -> list[tuple[SequenceRecipe, int]]:
        """The sequences of a step and their number.

        A second entry is for the filter layer alone.
        """
        size = self.sizes[step % len(self.sizes)]
        wanted = [self._of(size)]
        longest = max(s.num_tokens for s in self.sizes)
        if self.filter_size is not None and size.num_tokens == longest:
            wanted.append(self._of(self.filter_size))
        return wanted

    def _of(self, size: Size) -> tuple[SequenceRecipe, int]:
        recipe = replace(
            self.recipe,
            num_tokens=size.num_tokens,
            problems=size.problems,
            max_position=size.max_position,
        )
        return recipe, size.batch


_PROSE = SequenceRecipe(
    num_tokens=512,  # a `Size` replaces this, `problems` and `max_position`
    problems=(2, 5),
    max_position=4096,
    questions=4,
    weights=SKILLS,
    two_words=0.2,
    letters=0.15,
    words=0.2,
    noise=0.1,
)
_LISTS = replace(_PROSE, questions=8, weights=LISTS, words=0.1)
_NEAR = Size(256, 20, (1, 3), 4096)  # as short as a prompt after filtering
_HALF = Size(512, 10, (1, 4), 4096)
_FULL = Size(1024, 5, (1, 6), MAX_POSITION)
_LONG = Size(2048, 2, (2, 8), MAX_POSITION)
_LONGEST = Size(4096, 1, (4, 12), MAX_POSITION)
_FILTERED = Size(8192, 1, (4, 12), MAX_POSITION)

STAGES: tuple[Stage, ...] = (
    Stage(
        name="bare",
        recipe=replace(_PROSE, questions=2, letters=0.1, words=0.3),
        sizes=(Size(224, 22, (2, 4), 1024),),
        steps=2000,
        lr=1.5e-3,
        goal=0.9,
    ),
    Stage(
        name="prose",
        recipe=_PROSE,
        sizes=(Size(512, 10, (2, 5), 4096),),
        steps=1800,
        lr=1e-3,
        lr_end=3e-4,
        goal=0.95,
    ),
    Stage(
        name="distance",
        recipe=replace(_PROSE, questions=5, words=0.1),
        sizes=(_FULL,),
        steps=2400,
        lr=6e-4,
        lr_end=1e-4,
    ),
    # With long documents alone the model would forget what short ones taught.
    Stage(
        name="mixed",
        recipe=_LISTS,
        sizes=(_FULL, _NEAR, _LONGEST, _HALF, _FULL, _LONG),
        filter_size=_FILTERED,
        steps=700,
        lr=5e-4,
        lr_end=2e-5,
    ),
    Stage(
        name="again",
        recipe=_LISTS,
        sizes=(_FULL, _NEAR, _LONGEST, _FULL, _HALF, _LONGEST, _LONG),
        filter_size=_FILTERED,
        steps=600,
        lr=4e-4,
        lr_end=1e-5,
    ),
)


def choose_stages(last: str | None, *, is_single: bool) -> tuple[Stage, ...]:
    """The stages up to `last`, or all of them. `is_single`: with single facts only."""
    names = [stage.name for stage in STAGES]
    stages = STAGES if last is None else STAGES[: names.index(last) + 1]
    if not is_single:
        return stages
    return tuple(replace(s, recipe=replace(s.recipe, weights=SINGLE)) for s in stages)
