"""Training sequences for the built-in model: needles in prose, then questions and answers."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np

from gemserve.builtin.tokenizer import ASSISTANT, BOS, END, USER
from gemserve.evaluation.recall import Needle, draw_needles


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What one training stage's sequences look like."""

    num_tokens: int
    needles: tuple[int, int]
    questions: int
    two_words: float = 0.0
    letters: float = 0.0
    wordings: int = 10
    max_position: int = 0  # 0: positions are not skipped
    noise: float = 0.0  # share of documents whose filler is random tokens


@dataclass(frozen=True, slots=True)
class Batch:
    """Token ids and targets of one step; every array is int64.

    `tokens`, `positions`: [batch, num_tokens]. `rows`, `columns`: [answers] index the positions
    whose next token is scored, `targets`: [answers] that token, `sources`: [answers] where in the
    document it stands (−1: nowhere, as for the end token).
    """

    tokens: np.ndarray
    positions: np.ndarray
    rows: np.ndarray
    columns: np.ndarray
    targets: np.ndarray
    sources: np.ndarray


class Corpus:
    """Pre-tokenized filler sentences and the encoder for everything else."""

    def __init__(self, tokenizer: Any, sentences: tuple[str, ...]) -> None:
        self._tokenizer = tokenizer
        encoded = tokenizer.encode_batch([" " + s for s in sentences], add_special_tokens=False)
        lengths = np.array([len(e.ids) for e in encoded])
        self._tokens = np.concatenate([np.array(e.ids, dtype=np.int64) for e in encoded])
        self._starts = np.concatenate([[0], np.cumsum(lengths)])[:-1]
        self._vocab_size = tokenizer.get_vocab_size()

    def batch(self, recipe: Recipe, size: int, seed: tuple[int, ...]) -> Batch:
        rng = Random(repr(seed))
        sequences = [self._sequence(recipe, rng) for _ in range(size)]
        rows, columns, targets, sources = [], [], [], []
        for row, (_, _, scored) in enumerate(sequences):
            for column, target, source in scored:
                rows.append(row)
                columns.append(column)
                targets.append(target)
                sources.append(source)
        return Batch(
            np.stack([tokens for tokens, _, _ in sequences]),
            np.stack([positions for _, positions, _ in sequences]),
            np.array(rows),
            np.array(columns),
            np.array(targets),
            np.array(sources),
        )

    def _sequence(
        self, recipe: Recipe, rng: Random
    ) -> tuple[np.ndarray, np.ndarray, list[tuple[int, int, int]]]:
        special = self._tokenizer.token_to_id
        needles = draw_needles(
            rng,
            rng.randint(*recipe.needles),
            two_words=recipe.two_words,
            letters=recipe.letters,
            wordings=recipe.wordings,
        )
        asked = rng.sample(needles, min(recipe.questions, len(needles)))
        is_chat = rng.random() < 0.5

        tail: list[int] = []  # questions and answers
        answers: list[tuple[int, list[int], Needle]] = []  # (offset in tail, value ids, needle)
        for turn, needle in enumerate(asked):
            if is_chat:
                opening = "\n\n" if turn == 0 else USER
                text = f"{opening}{needle.question}{END}{ASSISTANT}"
            else:
                text = f"\n\n{needle.question}\nAnswer:"
            tail += self._encode(text)
            value = self._encode(needle.value)
            answers.append((len(tail), value, needle))
            tail += [*value, special(END)]

        statements = [self._statement(needle) for needle in needles]
        head = [special(BOS), special(USER)] if is_chat else [special(BOS)]
        used = len(head) + len(tail) + sum(len(ids) for ids, _ in statements)
        body, placed = self._document(statements, max(0, recipe.num_tokens - used), recipe, rng)

        tokens = np.array([*head, *body, *tail][: recipe.num_tokens], dtype=np.int64)
        tokens = np.pad(tokens, (0, recipe.num_tokens - len(tokens)))
        scored: list[tuple[int, int, int]] = []
        tail_start = len(head) + len(body)
        source_of = {id(n): start for n, start in zip(needles, placed, strict=True)}
        for offset, value, needle in answers:
            source = len(head) + source_of[id(needle)]
            column = tail_start + offset - 1
            for index, token in enumerate(value):
                scored.append((column + index, token, source + index))
            scored.append((column + len(value), special(END), -1))
        scored = [s for s in scored if s[0] + 1 < recipe.num_tokens]
        spans = [
            (len(head) + start - index, len(head) + start - index + len(ids))
            for start, (ids, index) in zip(placed, statements, strict=True)
        ]
        return tokens, self._positions(recipe, len(head), len(body), spans, rng), scored

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def _statement(self, needle: Needle) -> tuple[list[int], int]:
        """Token ids of the statement and the index of its value's first token."""
        text = " " + needle.statement
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        start = text.rindex(needle.value)
        index = next(i for i, (low, _) in enumerate(encoding.offsets) if low >= start)
        return encoding.ids, index

    def _document(
        self, statements: list[tuple[list[int], int]], num_filler: int, recipe: Recipe, rng: Random
    ) -> tuple[list[int], list[int]]:
        """Statements spread over `num_filler` tokens of filler, and where each value starts."""
        filler, boundaries = self._filler(num_filler, rng.random() < recipe.noise, rng)
        order = list(range(len(statements)))
        rng.shuffle(order)
        spots = sorted(rng.choice(boundaries) for _ in statements)
        body: list[int] = []
        placed = [0] * len(statements)
        done = 0
        for spot, which in zip(spots, order, strict=True):
            body += filler[done:spot]
            done = spot
            ids, value_index = statements[which]
            placed[which] = len(body) + value_index
            body += ids
        return body + filler[done:], placed

    def _filler(self, count: int, is_noise: bool, rng: Random) -> tuple[list[int], list[int]]:
        """`count` filler tokens and the offsets at which a sentence may be put."""
        if count <= 0:
            return [], [0]
        if is_noise:
            noise = np.random.default_rng(rng.getrandbits(63))
            return noise.integers(6, self._vocab_size, count).tolist(), list(range(count + 1))
        first = rng.randrange(len(self._starts))
        start = int(self._starts[first])
        if start + count > len(self._tokens):
            first, start = 0, 0
        window = self._tokens[start : start + count].tolist()
        boundaries = [0]
        for index in range(first + 1, len(self._starts)):
            offset = int(self._starts[index]) - start
            if offset >= count:
                break
            boundaries.append(offset)
        return window, boundaries

    def _positions(
        self, recipe: Recipe, head: int, body: int, whole: list[tuple[int, int]], rng: Random
    ) -> np.ndarray:
        """Position ids with gaps inside the document, so that short sequences teach distances.

        No gap opens inside a statement (the spans `whole`) or a question.
        """
        positions = np.arange(recipe.num_tokens, dtype=np.int64)
        slack = recipe.max_position - recipe.num_tokens
        if slack <= 0 or rng.random() < 0.3:
            return positions
        # log-uniform reach: every distance scale is seen, not only the longest
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
