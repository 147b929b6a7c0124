"""Hides statements in filler text of a given length."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

from gemserve.evaluation.tasks.example import Example, ExampleDraw, make_example, question_prompt
from gemserve.synthetic.problems import Problem
from gemserve.synthetic.prose import stdlib_sentences

_OVERHEAD = 32  # tokens reserved for the template
_BATCH = 64  # sentences encoded at once
_LOOK_AHEAD = 256  # sentences
_FEW = 8  # tokens


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
    is_tight = sentences is not None
    frame = len(question_prompt(tokenizer, "", "").ids)
    used = (frame if is_tight else max(frame, _OVERHEAD)) + sum(
        len(tokenizer.backend_tokenizer.encode(s, add_special_tokens=False).ids) + 2
        for s in (*problem.statements, *others, problem.question)
    )
    room = draw.num_tokens - used
    filler = draw_filler(tokenizer, sentences or stdlib_sentences(), room, rng, is_tight=is_tight)
    depths = [depth if depth is not None else rng.random() for _ in problem.statements]
    by_depth = [*zip(sorted(depths), problem.statements, strict=True)]
    by_depth += [(rng.random(), other) for other in others]
    by_depth.sort(key=lambda pair: pair[0])
    pieces: list[str] = []
    start = 0
    for at, statement in by_depth:
        stop = round(at * len(filler))
        pieces += [*filler[start:stop], statement]
        start = stop
    pieces += filler[start:]
    return make_example(
        tokenizer,
        subtask,
        draw,
        document=" ".join(pieces),
        problem=problem,
        depth=depth,
        is_question_first=is_question_first,
        max_tokens=max_tokens,
    )


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
