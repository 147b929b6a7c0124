"""Hides statements in filler text of a given length."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from gemserve.calibration.search.example import Example, ExampleDraw, make_example, question_prompt
from gemserve.synthetic.problems import Problem
from gemserve.synthetic.prose import stdlib_sentences

_OVERHEAD = 32  # tokens reserved for the template
_BATCH = 64  # sentences encoded at once
_LOOK_AHEAD = 256  # sentences
_FEW = 8  # tokens


@dataclass(frozen=True, slots=True)
class Placed:
    """A problem, and where in a document its statements stand: depths from 0 to 1, ascending.

    `others`: further statements with their depths. `linked`: the number of the statement that
    shares no name with the question, if there is one.
    """

    problem: Problem
    depths: tuple[float, ...]
    others: tuple[tuple[float, str], ...] = ()
    linked: int | None = None

    @property
    def statements(self) -> list[tuple[float, str]]:
        return [*zip(self.depths, self.problem.statements, strict=True), *self.others]


def hide(
    tokenizer: Any,
    subtask: str,
    draw: ExampleDraw,
    rng: Random,
    problem: Problem,
    *,
    others: Sequence[str] = (),
    depth: float | None = None,
    sentences: tuple[str, ...] | None = None,
    is_question_first: bool = False,
    max_tokens: int = 48,
) -> Example:
    """Hide a problem's statements and `others` in filler.

    They are at random depths, or all at `depth`. A problem's statements keep their order. The
    filler comes from the standard library, or from the `sentences` given. Given sentences fill the
    length up to a few tokens.
    """
    filler = _filler_around(
        tokenizer, draw, rng, (*problem.statements, *others, problem.question), sentences
    )
    depths = [depth if depth is not None else rng.random() for _ in problem.statements]
    by_depth = [*zip(sorted(depths), problem.statements, strict=True)]
    by_depth += [(rng.random(), other) for other in others]
    return make_example(
        tokenizer,
        subtask,
        draw,
        document=scatter(filler, by_depth),
        problem=problem,
        depth=depth,
        is_question_first=is_question_first,
        max_tokens=max_tokens,
    )


def hide_placed(
    tokenizer: Any,
    subtask: str,
    draw: ExampleDraw,
    rng: Random,
    placed: Placed,
    *,
    sentences: tuple[str, ...],
    max_tokens: int = 48,
) -> Example:
    """Hide statements in filler from `sentences`, at their own depths."""
    texts = [text for _, text in placed.statements]
    filler = _filler_around(tokenizer, draw, rng, (*texts, placed.problem.question), sentences)
    document = scatter(filler, placed.statements)
    return example_of(tokenizer, subtask, draw, placed, document, max_tokens=max_tokens)


def example_of(
    tokenizer: Any,
    subtask: str,
    draw: ExampleDraw,
    placed: Placed,
    document: str,
    *,
    max_tokens: int = 48,
) -> Example:
    """The example of a problem whose statements stand in `document`, perhaps beside others'."""
    example = make_example(
        tokenizer,
        subtask,
        draw,
        document=document,
        problem=placed.problem,
        depth=placed.depths[0] if len(placed.depths) == 1 else None,
        max_tokens=max_tokens,
    )
    if placed.linked is None:
        return example
    return replace(example, linked=example.gold[placed.linked : placed.linked + 1])


def scatter(filler: Sequence[str], statements: Iterable[tuple[float, str]]) -> str:
    """Filler with statements at their depths. Those of one depth keep their order."""
    pieces: list[str] = []
    start = 0
    for at, statement in sorted(statements, key=lambda pair: pair[0]):
        stop = round(at * len(filler))
        pieces += [*filler[start:stop], statement]
        start = stop
    return " ".join([*pieces, *filler[start:]])


def _filler_around(
    tokenizer: Any,
    draw: ExampleDraw,
    rng: Random,
    texts: Sequence[str],
    sentences: tuple[str, ...] | None,
) -> list[str]:
    """Filler for a prompt of the nominal length that also has `texts` and the template."""
    is_tight = sentences is not None
    frame = len(question_prompt(tokenizer, "", "").ids)
    used = (frame if is_tight else max(frame, _OVERHEAD)) + sum(
        len(tokenizer.backend_tokenizer.encode(s, add_special_tokens=False).ids) + 2 for s in texts
    )
    room = draw.num_tokens - used
    return draw_filler(tokenizer, sentences or stdlib_sentences(), room, rng, is_tight=is_tight)


def draw_filler(
    tokenizer: Any,
    sentences: tuple[str, ...],
    num_tokens: int,
    rng: Random,
    *,
    is_tight: bool = False,
) -> list[str]:
    """Consecutive sentences from a random place on, at most `num_tokens` tokens of them.

    `is_tight`: a sentence that is too long is skipped, and so on for a while, until only a few
    tokens are left.
    """
    start = rng.randrange(len(sentences))
    chosen: list[str] = []
    num_tried = total = 0
    stop: int | None = None  # the last sentence to try
    while True:
        picked = [sentences[(start + num_tried + i) % len(sentences)] for i in range(_BATCH)]
        encoded = tokenizer.backend_tokenizer.encode_batch(
            [" " + s for s in picked], add_special_tokens=False
        )
        for sentence, encoding in zip(picked, encoded, strict=True):
            if total + len(encoding.ids) <= num_tokens:
                total += len(encoding.ids)
                chosen.append(sentence)
            elif not is_tight:
                return chosen
            elif stop is None:
                stop = num_tried + _LOOK_AHEAD
            num_tried += 1
            if stop is not None and (num_tried >= stop or total + _FEW >= num_tokens):
                return chosen
