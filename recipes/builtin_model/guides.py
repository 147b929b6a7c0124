"""Where the built-in model's guided heads should attend, in every step of a skill."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from gemserve.synthetic.problems import Problem


class Guide(IntEnum):
    """What a pair of positions teaches: the later one should attend to the earlier one.

    FILTER: from where answers begin, to all that a filter must keep.
    COPY: from before each token of an answer, to the token that is copied; after the last item, to
        the sequence's first token.
    LINK: from the value of a variable to its name; from a name in a question to the one before.
    ECHO: from the end of an item in the answer, to its end in the document.
    ASK: from the same place, to the name of the next item in the question.
    ORDER: like ECHO, one layer later.
    NAME: from a value to its subject's name; from where an answer begins to the question's names.
    COUNT: from one of several values, to those before it and to the sequence's first token. The
        share of the first token then tells how many there are.
    """

    FILTER = 0
    COPY = 1
    LINK = 2
    ECHO = 3
    ASK = 4
    ORDER = 5
    NAME = 6
    COUNT = 7


Pair = tuple[Guide, int, int]  # a position, and the earlier position that it should attend to


@dataclass(frozen=True, slots=True)
class Turn:
    """A question and its answer in the tail, all offsets in tokens from the tail's start."""

    problem: Problem
    first: int  # the answer's first token
    items: list[list[int]]
    name_ends: list[int]  # the last token of each item's name in the question, -1: none


@dataclass(frozen=True, slots=True)
class Source:
    """Where the document has an item: its first and last token, and its statement's last token.

    `name`: the last token of its subject's name; -1 if there is none.
    """

    first: int
    last: int
    end: int
    name: int


def answer_pairs(
    turn: Turn,
    sources: dict[int, list[Source]],
    problems: list[Problem],
    spans: list[tuple[int, int]],
    start: int,
) -> list[Pair]:
    """The pairs of a turn's answer. The tail begins at `start`; `sources` by problem id."""
    if turn.problem.kind == "common_words":
        low, high = spans[0]
        return [(Guide.FILTER, start + turn.first - 1, token) for token in range(low, high)]
    if turn.problem.kind == "tracking":
        chains = [s for p in problems if p.kind == "tracking" for s in sources[id(p)]]
        return follow(turn, sources[id(turn.problem)], chains, start)
    return retrieve(turn, sources[id(turn.problem)], start)


def retrieve(turn: Turn, sources: list[Source], start: int) -> list[Pair]:
    """The pairs of an answer whose items are each in a statement. `sources` is by statement."""
    pairs: list[Pair] = []
    column = start + turn.first - 1  # predicts the next token of the answer
    names = [start + name for name in turn.name_ends]
    pairs += [(Guide.NAME, column, name) for name in dict.fromkeys(names)]
    is_query = turn.problem.kind == "multi_query"
    if is_query:
        pairs += [(Guide.ASK, column, names[0])]
        pairs += [(Guide.LINK, b, a) for a, b in zip([0, *names], names, strict=False)]
    for index, (item, answer) in enumerate(zip(turn.items, turn.problem.answers, strict=True)):
        source = sources[answer.statement]
        lead = len(item) - (source.last - source.first + 1)  # length of a comma and a space
        for offset in range(len(item)):
            at = column + offset
            if offset <= lead:
                pairs += [(Guide.FILTER, at, s.first) for s in _needed(turn, sources)]
                pairs += [(Guide.COPY, at, source.first)]
                if index and is_query:
                    pairs += [(Guide.ASK, at, names[index])]
                elif index and offset:
                    before = sources[turn.problem.answers[index - 1].statement]
                    pairs += [(Guide.ORDER, at, before.last)]
            else:
                copied = source.first + offset - lead
                pairs += [(Guide.FILTER, at, copied), (Guide.COPY, at, copied)]
        column += len(item)
        if len(turn.items) > 1:
            is_last = index + 1 == len(turn.items)
            after = 0 if is_last else sources[turn.problem.answers[index + 1].statement].first
            pairs += [(Guide.ECHO, column, source.last), (Guide.COPY, column, after)]
            if is_query:
                pairs += [(Guide.ASK, column, 0 if is_last else names[index + 1])]
            else:
                pairs += [(Guide.ORDER, column, source.last)]
    return pairs


def _needed(turn: Turn, sources: list[Source]) -> list[Source]:
    return [sources[answer.statement] for answer in turn.problem.answers]


def follow(turn: Turn, sources: list[Source], chains: list[Source], start: int) -> list[Pair]:
    """The pairs of an answer that follows assignments. A filter must keep all `chains`.

    A variable's value comes after its name, so heads reach the name from the statement's end.
    """
    pairs: list[Pair] = []
    column = start + turn.first - 1
    for index, (item, answer) in enumerate(zip(turn.items, turn.problem.answers, strict=True)):
        for at in range(column, column + len(item)):
            pairs += [(Guide.COPY, at, sources[answer.statement].end - 1)]
            pairs += [(Guide.FILTER, at, s.first) for s in chains]
            pairs += [(Guide.FILTER, at, s.end - 1) for s in chains]
        column += len(item)
        if index + 1 < len(turn.items):
            after = sources[turn.problem.answers[index + 1].statement].end - 1
            pairs += [(Guide.COPY, column, after)]
        else:
            pairs += [(Guide.COPY, column, 0)]
    return pairs


def within_document(problem: Problem, sources: list[Source]) -> list[Pair]:
    """The pairs within a document, which need no question. `sources` is by statement."""
    pairs: list[Pair] = []
    for s in sources:
        if s.name >= 0:
            pairs += [(Guide.NAME, at, s.name) for at in {s.first, s.last}]
    if problem.kind == "tracking":
        pairs += [(Guide.LINK, s.end - 1, s.first) for s in sources]
    elif problem.kind == "multi_value":
        pairs += [
            (Guide.COUNT, at, earlier)
            for index, source in enumerate(sources)
            for at in {source.first, source.last}
            for earlier in (0, *(s.first for s in sources[:index]))
        ]
    return pairs


@dataclass(frozen=True, slots=True, kw_only=True)
class GuidedShape:
    """The size of the model. `filter_layer` learns to show what a filter must keep."""

    num_layers: int = 8
    hidden_size: int = 128
    filter_layer: int = 2

    @property
    def guided(self) -> dict[Guide, tuple[int, tuple[int, ...]]]:
        """The layer and heads that each guide teaches. Later layers use what earlier ones found.

        Names are read one layer before the filter layer.
        """
        at = self.filter_layer
        return {
            Guide.NAME: (at - 1, (0,)),
            Guide.FILTER: (at, (0, 1)),
            Guide.LINK: (at + 1, (0,)),
            Guide.ECHO: (at + 1, (1,)),
            Guide.COUNT: (at + 1, (2,)),
            Guide.ASK: (at + 2, (0,)),
            Guide.ORDER: (at + 2, (1,)),
            Guide.COPY: (at + 3, (0, 1)),
        }
