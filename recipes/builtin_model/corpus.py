"""Training sequences for the built-in model: facts in prose, then questions and answers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random
from typing import Any

import numpy as np

from gemserve.synthetic.problems import MANY_WORDINGS, SEPARATOR, Problem, ProblemMaker
from recipes.builtin_model.curriculum import KINDS, SequenceRecipe
from recipes.builtin_model.guides import (
    Pair,
    Source,
    Turn,
    answer_pairs,
    within_document,
)
from recipes.builtin_model.tokenizer import ASSISTANT, BOS, END, USER


@dataclass(frozen=True, slots=True)
class TrainingBatch:
    """Token ids and targets of one step. Integers are int64.

    `tokens`, `positions`: [batch, num_tokens]. `rows`, `columns`: [answers], the positions whose
    next token is scored. `targets`: [answers], that token. `ends`: [answers], bool, whether it is
    the last token of an answer. `pointers`: [pairs, 4], a `Guide`, a row, a position in it, and the
    earlier position that it should attend to.
    """

    tokens: np.ndarray
    positions: np.ndarray
    rows: np.ndarray
    columns: np.ndarray
    targets: np.ndarray
    ends: np.ndarray
    pointers: np.ndarray


@dataclass(frozen=True, slots=True)
class _Sequence:
    tokens: np.ndarray
    positions: np.ndarray
    scored: list[tuple[int, int, bool]]  # column, target, is the answer's end
    pointers: list[Pair]


def _item_bounds(problem: Problem, statement: int) -> tuple[int, int, int]:
    """First and last character of a statement's item, whether or not a question needs it.

    The third number is the last character of the subject's name; -1 if there is none.
    """
    if problem.kind == "tracking":  # "VAR name = …"
        return len("VAR "), problem.statements[statement].index(" =") - 1, -1
    for answer in problem.answers:
        if answer.statement == statement and answer.start >= 0:
            return answer.start, answer.start + len(answer.text) - 1, answer.statement_name_end - 1
    return 0, len(problem.statements[statement]) - 1, -1


class Corpus:
    """Pre-tokenized filler sentences and the encoder for everything else."""

    def __init__(self, tokenizer: Any, sentences: tuple[str, ...]) -> None:
        self._tokenizer = tokenizer
        encoded = tokenizer.encode_batch([" " + s for s in sentences], add_special_tokens=False)
        lengths = np.array([len(e.ids) for e in encoded])
        self._tokens = np.concatenate([np.array(e.ids, dtype=np.int64) for e in encoded])
        self._starts = np.concatenate([[0], np.cumsum(lengths)])[:-1]
        self._vocab_size = tokenizer.get_vocab_size()

    def batch(self, recipe: SequenceRecipe, size: int, seed: tuple[int, ...]) -> TrainingBatch:
        rng = Random(repr(seed))
        sequences = [self._sequence(recipe, rng) for _ in range(size)]
        scored = [(row, *s) for row, sequence in enumerate(sequences) for s in sequence.scored]
        pairs = [
            (guide, row, *pair)
            for row, sequence in enumerate(sequences)
            for guide, *pair in sequence.pointers
        ]
        rows, columns, targets, ends = (np.array(c) for c in zip(*scored, strict=True))
        return TrainingBatch(
            tokens=np.stack([sequence.tokens for sequence in sequences]),
            positions=np.stack([sequence.positions for sequence in sequences]),
            rows=rows,
            columns=columns,
            targets=targets,
            ends=ends,
            pointers=np.array(pairs, dtype=np.int64).reshape(-1, 4),
        )

    def _sequence(self, recipe: SequenceRecipe, rng: Random) -> _Sequence:
        special = self._tokenizer.token_to_id
        problems = self._problems(recipe, rng)
        questions = rng.sample(problems, min(recipe.questions, len(problems)))
        is_chat = rng.random() < 0.5
        tail, turns = self._tail(questions, is_chat)
        head = [special(BOS), special(USER)] if is_chat else [special(BOS)]
        room = recipe.num_tokens - len(head) - len(tail)
        body, sources, spans = self._document(problems, len(head), room, recipe, rng)
        tokens = np.array([*head, *body, *tail][: recipe.num_tokens], dtype=np.int64)
        tokens = np.pad(tokens, (0, recipe.num_tokens - len(tokens)))

        start = len(head) + len(body)
        scored: list[tuple[int, int, bool]] = []
        pointers: list[Pair] = []
        for turn in turns:
            answer = [*(token for item in turn.items for token in item), special(END)]
            first = start + turn.first - 1
            if first + len(answer) >= recipe.num_tokens:
                break  # the document's statements left no room
            scored += [(first + i, token, i == len(answer) - 1) for i, token in enumerate(answer)]
            pointers += answer_pairs(turn, sources, problems, spans, start)
        for problem in problems:
            pointers += within_document(problem, sources[id(problem)])
        return _Sequence(
            tokens=tokens,
            positions=self._positions(recipe, len(head), len(body), spans, rng),
            scored=scored,
            pointers=[p for p in pointers if p[1] + 1 < recipe.num_tokens],
        )

    def _tail(self, questions: list[Problem], is_chat: bool) -> tuple[list[int], list[Turn]]:
        """The tokens of questions and their answers, and where each is among them."""
        tail: list[int] = []
        turns: list[Turn] = []
        for index, problem in enumerate(questions):
            if is_chat:
                opening = "\n\n" if index == 0 else USER
                text = f"{opening}{problem.question}{END}{ASSISTANT}"
            else:
                text = f"\n\n{problem.question}\nAnswer:"
            encoding = self._tokenizer.encode(text, add_special_tokens=False)
            lead = text.index(problem.question)
            names = [
                next(
                    len(tail) + i
                    for i, (_, high) in enumerate(encoding.offsets)
                    if high >= lead + answer.question_name_end
                )
                if answer.question_name_end >= 0
                else -1
                for answer in problem.answers
            ]
            tail += encoding.ids
            items = [self._item(a.text, i == 0) for i, a in enumerate(problem.answers)]
            turns.append(Turn(problem, len(tail), items, names))
            end = self._tokenizer.token_to_id(END)
            tail += [*(token for item in items for token in item), end]
        return tail, turns

    def _problems(self, recipe: SequenceRecipe, rng: Random) -> list[Problem]:
        wording = replace(
            MANY_WORDINGS,
            statements=MANY_WORDINGS.statements[: recipe.wordings],
            questions=MANY_WORDINGS.questions[: recipe.wordings],
        )
        maker = ProblemMaker(
            rng,
            two_words=recipe.two_words,
            letters=recipe.letters,
            words=recipe.words,
            wording=wording,
        )
        (kind,) = rng.choices(KINDS, recipe.weights)
        if kind == "common_words":
            # a word is one token; question and answer take about 40
            num_words = max(40, recipe.num_tokens - 60) * rng.randint(5, 10) // 10
            return [
                maker.common_words(
                    num_words,
                    count=rng.randint(1, 3),
                    common_share=rng.uniform(0.3, 0.7),
                    decay=rng.uniform(0.5, 0.95),
                )
            ]
        many = rng.randint(2, recipe.items)
        problems: list[Problem] = []
        for _ in range(rng.randint(*recipe.problems)):
            if kind == "single" or kind == "common_words":
                problems.append(maker.single())
            elif kind == "multi_value":
                problems.append(maker.multi_value(many))
            elif kind == "multi_query":
                problems.append(maker.multi_query(many))
            else:
                problems.append(maker.tracking(many, chains=rng.randint(1, 2)))
            (kind,) = rng.choices(KINDS, recipe.weights)
        return problems

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def _item_core(self, text: str) -> list[int]:
        """An answer's tokens as the document has them: a word includes its leading space."""
        return self._encode(f" {text}" if text[0].islower() else text)

    def _item(self, text: str, is_first: bool) -> list[int]:
        if is_first:
            return self._item_core(text)
        return self._encode(f"{SEPARATOR}{text}")

    def _document(
        self, problems: list[Problem], head: int, room: int, recipe: SequenceRecipe, rng: Random
    ) -> tuple[list[int], dict[int, list[Source]], list[tuple[int, int]]]:
        """All statements among filler: `room` tokens in all, if the statements fit.

        Also returns the places of each problem's items, and every statement's first token and the
        token after its last, counted from `head` tokens before the document. Problems keep their
        statements' order.
        """
        encodings = [
            [self._tokenizer.encode(" " + s, add_special_tokens=False) for s in p.statements]
            for p in problems
        ]
        used = sum(len(e.ids) for group in encodings for e in group)
        filler, boundaries = self._filler(room - used, rng.random() < recipe.noise, rng)
        turn = [index for index, group in enumerate(encodings) for _ in group]
        rng.shuffle(turn)
        spots = sorted(rng.choice(boundaries) for _ in turn)
        body: list[int] = []
        sources: dict[int, list[Source]] = {id(p): [] for p in problems}
        spans: list[tuple[int, int]] = []
        done = 0
        for spot, which in zip(spots, turn, strict=True):
            body += filler[done:spot]
            done = spot
            problem = problems[which]
            statement = len(sources[id(problem)])
            encoding = encodings[which][statement]
            low = head + len(body)
            high = low + len(encoding.ids)
            first, last, name = (
                low + encoding.char_to_token(character + 1) if character >= 0 else -1
                for character in _item_bounds(problem, statement)  # a space precedes the statement
            )
            sources[id(problem)].append(Source(first, last, high - 1, name))
            spans.append((low, high))
            body += encoding.ids
        return body + filler[done:], sources, spans

    def _filler(self, count: int, is_noise: bool, rng: Random) -> tuple[list[int], list[int]]:
        """`count` filler tokens, and the offsets at which a sentence may be inserted."""
        if count <= 0:
            return [], [0]
        if is_noise:
            noise = np.random.default_rng(rng.getrandbits(63))
            return noise.integers(6, self._vocab_size, count).tolist(), list(range(count + 1))
        first = rng.randrange(len(self._starts))
        start = int(self._starts[first])
        if start + count > len(self._tokens):
            first, start = 0, 0
        tokens = self._tokens[start : start + count].tolist()
        boundaries = [0]
        for index in range(first + 1, len(self._starts)):
            offset = int(self._starts[index]) - start
            if offset >= count:
                break
            boundaries.append(offset)
        return tokens, boundaries

    def _positions(
        self,
        recipe: SequenceRecipe,
        head: int,
        body: int,
        whole: list[tuple[int, int]],
        rng: Random,
    ) -> np.ndarray:
        """Position ids with gaps inside the document, so that short sequences teach distances.

        No gap opens inside a statement (the spans `whole`) or a question.
        """
        positions = np.arange(recipe.num_tokens, dtype=np.int64)
        slack = recipe.max_position - recipe.num_tokens
        if slack <= 0 or rng.random() < 0.3:
            return positions
        # log-uniform reach, so that training has distances of every scale
        reach = int(slack ** rng.random())
        count = max(1, body // rng.choice((16, 64, 256)))
        drawn = sorted(rng.randrange(head, head + body + 1) for _ in range(count))
        cuts = [c for c in drawn if not any(low < c < high for low, high in whole)]
        sizes = sorted(rng.randrange(reach + 1) for _ in cuts)
        previous = 0
        for cut, total in zip(cuts, sizes, strict=True):
            positions[cut:] += total - previous
            previous = total
        return positions
