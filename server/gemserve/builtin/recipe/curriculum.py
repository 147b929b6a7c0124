"""The built-in model's curriculum: documents and questions that grow longer and harder."""

from __future__ import annotations

from dataclasses import dataclass, replace

KINDS = ("single", "multi_value", "multi_query", "tracking", "common_words")


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceRecipe:
    """What one training stage's sequences look like.

    `problems`: how many a document holds, at most `questions` of them asked; `weights`: how often
    each of `KINDS` is drawn (a list of common words fills a document of its own).
    """

    num_tokens: int
    problems: tuple[int, int]
    questions: int
    weights: tuple[float, ...] = (1.0, 0.0, 0.0, 0.0, 0.0)
    items: int = 4  # at most, of an answer with several
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
    """Of one step's sequences: how long, how many, how many problems each, how far they reach."""

    num_tokens: int
    batch: int
    problems: tuple[int, int]
    max_position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage of the curriculum: ends at `steps`, or once `goal` answers in all are right."""

    name: str
    recipe: SequenceRecipe
    sizes: tuple[Size, ...]  # of step after step, in turn
    steps: int
    lr: float
    goal: float = 1.1  # share of whole values right, moving average; above 1: never
    pointer: float = 1.0  # weight of the auxiliary loss
    filter_size: Size | None = None  # beside the longest size, for the auxiliary loss alone
    lr_end: float | None = None  # cosine to this; None: constant

    def at(self, step: int) -> list[tuple[SequenceRecipe, int]]:
        """What a step trains on and how many of it; second, what only the filter layer sees."""
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
    num_tokens=512,  # this and what follows it is a `Size`'s
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
_NEAR = Size(256, 20, (1, 3), 4096)  # as short as what a filter leaves
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
    # Long documents alone would unlearn what short ones taught.
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
    """The stages up to `last`, or all; with single facts only, if that is asked for."""
    names = [stage.name for stage in STAGES]
    stages = STAGES if last is None else STAGES[: names.index(last) + 1]
    if not is_single:
        return stages
    return tuple(replace(s, recipe=replace(s.recipe, weights=SINGLE)) for s in stages)
