"""Finds passages by a question's words: BM25 in SQLite's full-text index.

A word is what `prompting.word_places` takes for one: letters and digits, in any case. Scripts that
put no spaces between words are indexed by pairs of characters. The index has no texts, only terms.
"""

from __future__ import annotations

import math
import re
import sqlite3
from collections.abc import Iterator, Sequence
from itertools import islice, pairwise

from gemserve.prompting.question_words import UNSPACED
from gemserve.prompting.word_places import find_terms

SCHEMA = """
CREATE VIRTUAL TABLE words USING fts5(terms, content='', tokenize='unicode61 remove_diacritics 0');
CREATE VIRTUAL TABLE word_counts USING fts5vocab(words, row);
"""
# A word that more than this share of the passages has, and more than a few, says nothing.
_COMMON, _FEW = 0.2, 3
_MOST_PASSAGES = 4096  # of a segment: as many numbers has each
_PASSAGE_CHARS = 800  # a passage is as many whole paragraphs, or a longer one
_MOST_CHARS = 1600  # a longer paragraph is cut
_MOST_FOUND = 4000  # passages
_SATURATION = 1.2  # k1 of SQLite's BM25
_PARAGRAPH = re.compile(r"\n(?:[^\S\n]*\n)+")


def add_segment(connection: sqlite3.Connection, segment: int, text: str) -> None:
    """Add the passages of the segment with this number."""
    connection.executemany("INSERT INTO words(rowid, terms) VALUES (?, ?)", _rows(segment, text))


def remove_segment(connection: sqlite3.Connection, segment: int, text: str) -> None:
    """Remove the passages of a segment that was added with this text."""
    connection.executemany(
        "INSERT INTO words(words, rowid, terms) VALUES ('delete', ?, ?)", _rows(segment, text)
    )


def forget_removed(connection: sqlite3.Connection) -> None:
    """Drop what the index still has of passages that were removed."""
    connection.execute("INSERT INTO words(words) VALUES ('optimize')")


def find_segments(
    connection: sqlite3.Connection, question: str, num_passages: int
) -> dict[int, float]:
    """How well segments answer by words, above 0: the BM25 of the best passage of each.

    `num_passages`: of the whole index.
    """
    rare = [
        term
        for term in _question_terms(question)
        if 0 < _count(connection, term) <= max(_FEW, _COMMON * num_passages)
    ]
    if not rare:
        return {}
    query = " OR ".join(f'"{term}"' for term in rare)
    found: dict[int, float] = {}
    for row, rank in connection.execute(
        "SELECT rowid, rank FROM words WHERE words MATCH ? ORDER BY rank LIMIT ?",
        (query, _MOST_FOUND),
    ):
        segment = row // _MOST_PASSAGES
        found[segment] = max(found.get(segment, 0.0), -rank)
    return found


def most_possible(connection: sqlite3.Connection, question: str, num_passages: int) -> float:
    """What `find_segments` would give a passage that has nothing but all words of the question."""
    counts = [_count(connection, term) for term in _question_terms(question)]
    rarities = [math.log1p((num_passages - n + 0.5) / (n + 0.5)) for n in counts]
    return sum(rarities) * (_SATURATION + 1)


def count_passages(text: str) -> int:
    return sum(1 for _ in islice(_passages(text), _MOST_PASSAGES))


def _count(connection: sqlite3.Connection, term: str) -> int:
    row = connection.execute("SELECT doc FROM word_counts WHERE term = ?", (term,)).fetchone()
    return 0 if row is None else row[0]


def _question_terms(question: str) -> list[str]:
    words, pairs = find_terms([question])
    return [*words, *pairs]


def _rows(segment: int, text: str) -> Iterator[tuple[int, str]]:
    for number, passage in enumerate(islice(_passages(text), _MOST_PASSAGES)):
        yield segment * _MOST_PASSAGES + number, _terms(passage)


def _terms(text: str) -> str:
    return UNSPACED.sub(lambda run: f" {' '.join(_pairs(run[0]))} ", text)


def _pairs(run: str) -> Sequence[str]:
    return [run] if len(run) == 1 else ["".join(pair) for pair in pairwise(run)]


def _passages(text: str) -> Iterator[str]:
    """The text in whole paragraphs that are long enough together; very long ones are cut."""
    start = 0
    for stop in [*(match.end() for match in _PARAGRAPH.finditer(text)), len(text)]:
        while stop - start > _MOST_CHARS:
            cut = text.rfind("\n", start + _PASSAGE_CHARS // 2, start + _PASSAGE_CHARS) + 1
            cut = cut or text.rfind(" ", start, start + _PASSAGE_CHARS) + 1
            cut = cut or start + _PASSAGE_CHARS
            yield text[start:cut]
            start = cut
        if stop - start >= _PASSAGE_CHARS or (stop == len(text) and stop > start):
            yield text[start:stop]
            start = stop
