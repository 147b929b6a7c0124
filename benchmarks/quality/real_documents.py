"""Writes questions about real documents, as lines for `gemserve eval jsonl --data`.

The questions are our own and stand in `real_questions.json`, and those about other documents in
`held_out_questions.json` (`--questions`); the documents are manuals, licences, changelogs, READMEs
and source files that lie on the machine already. Each context is cut out of its document at
paragraph borders, 3,000 to 7,000 tokens of SmolLM2 long, with the paragraph that holds the answer
at its beginning, in its middle or at its end. What a machine does not have, or has in another
version, is left out and counted.

SmolLM2-135M-Instruct (Q4_1 weights in float32, greedy, 32 tokens) answers 55 of the 60 if it is
given their gold paragraphs alone: most of those it could not answer even so were replaced while the
questions were written. No question was chosen or changed for an answer from a whole context.

The held-out questions were written in the same way, without asking any filter: the model answers 55
of the 60 from their gold paragraphs. Nothing may be tuned on them, and none of them be changed for
what a filter does with it.
"""

from __future__ import annotations

import argparse
import gzip
import importlib.metadata
import importlib.util
import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository root

from benchmarks.shared import results

QUESTIONS = Path(__file__).with_name("real_questions.json")
HELD_OUT = Path(__file__).with_name("held_out_questions.json")
MAX_TOKENS = 32
# The length of a context, in tokens as `count_tokens` estimates them, and the share of it that is
# to stand before the gold paragraph. Most say "late", because many paragraphs stand early in their
# documents and can be nowhere else. The two have no common factor, so that every pair occurs.
LENGTHS = (3500, 4400, 5200, 5900)
PLACES = (0.5, 0.95, 0.95, 0.95, 0.95)
SHORTEST = 3000
# A token of SmolLM2, roughly: it splits numbers into digits and long words into pieces.
_TOKEN = re.compile(r"[^\W\d_]{1,7}|\d|(?P<sign>[^\w\s]|_)(?P=sign)*|\n+ *")
_BORDER = re.compile(r"\n(?:[^\S\n]*\n)+|\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """`gold`: what the answer's paragraph says, or what its first and its last paragraph say."""

    source: str
    gold: tuple[str, ...]
    question: str
    answers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Paragraph:
    """A half-open range of characters without blank lines, and its tokens, estimated."""

    start: int
    stop: int
    num_tokens: int


class LeftOut(Exception):
    """Why a question cannot be asked here."""


def read_manual(name: str) -> str:
    """A chapter of Python's manual, as `help()` shows it."""
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    return topics[name]


def read_source(name: str) -> str:
    """The source file of a module of the standard library."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise FileNotFoundError(name)
    return Path(spec.origin).read_text(encoding="utf-8")


def read_licence(name: str) -> str:
    """A licence as Debian ships it."""
    return Path("/usr/share/common-licenses", name).read_text(encoding="utf-8")


def read_changelog(name: str) -> str:
    """The packagers' changelog of a Debian package."""
    path = Path("/usr/share/doc", name, "changelog.Debian.gz")
    return gzip.decompress(path.read_bytes()).decode(errors="replace")


def read_readme(name: str) -> str:
    """The description that an installed Python package carries."""
    text: Any = importlib.metadata.metadata(name).get_payload()
    return str(text)


READERS: dict[str, Callable[[str], str]] = {
    "manual": read_manual,
    "source": read_source,
    "licence": read_licence,
    "changelog": read_changelog,
    "readme": read_readme,
}


def read_document(source: str) -> str:
    """The text of a source such as "licence/GPL-3". Raises `LeftOut` if it is not here."""
    kind, _, name = source.partition("/")
    try:
        text = READERS[kind](name)
    except (OSError, LookupError, ImportError) as error:
        raise LeftOut(f"{source} is not on this machine") from error
    return "\n".join(line.rstrip() for line in text.splitlines())


def read_questions(path: Path = QUESTIONS) -> list[Question]:
    entries: dict[str, list[dict[str, Any]]] = json.loads(path.read_text(encoding="utf-8"))
    return [
        Question(
            source=source,
            gold=tuple(entry["gold"]),
            question=entry["question"],
            answers=tuple(entry["answers"]),
        )
        for source, asked in entries.items()
        for entry in asked
    ]


def count_tokens(text: str) -> int:
    """Tokens as SmolLM2 counts them, within about a fifth."""
    return sum(1 for _ in _TOKEN.finditer(text))


def split_paragraphs(text: str) -> list[Paragraph]:
    paragraphs: list[Paragraph] = []
    start = 0
    for border in _BORDER.finditer(text):
        if text[start : border.start()].strip():
            num_tokens = count_tokens(text[start : border.start()])
            paragraphs.append(Paragraph(start, border.start(), num_tokens))
        start = border.end()
    return paragraphs


def find_gold(text: str, paragraphs: Sequence[Paragraph], gold: Sequence[str]) -> tuple[int, int]:
    """The first and the last of the paragraphs that a question is about. Raises `LeftOut`.

    The first quotation must stand in the text once; the last is the next one from there on.
    """
    found = list(_loosely(gold[0]).finditer(text))
    if len(found) != 1:
        raise LeftOut(f"its text stands there {len(found)} times: {gold[0]!r}")
    first = last = found[0]
    if len(gold) > 1:
        after = _loosely(gold[-1]).search(text, first.end())
        if after is None:
            raise LeftOut(f"its text does not stand there: {gold[-1]!r}")
        last = after
    within = [
        i for i, p in enumerate(paragraphs) if first.start() < p.stop and p.start < last.end()
    ]
    return within[0], within[-1]


def _loosely(quotation: str) -> re.Pattern[str]:
    """Finds a quotation wherever its lines are broken."""
    return re.compile(r"\s+".join(map(re.escape, quotation.split())))


def cut(
    paragraphs: Sequence[Paragraph], first: int, last: int, length: int, place: float
) -> tuple[int, int]:
    """The first and the last paragraph of a context of `length` tokens.

    `place`: the share of the rest that stands before the gold paragraphs, as far as the document
    goes that way.
    """
    sizes = [p.num_tokens for p in paragraphs]
    left = length - sum(sizes[first : last + 1])
    start, room = _grow(sizes, first, -1, round(left * place))
    stop, room = _grow(sizes, last, 1, left - round(left * place) + room)
    start, _ = _grow(sizes, start, -1, room)
    return start, stop


def _grow(sizes: Sequence[int], at: int, step: int, room: int) -> tuple[int, int]:
    """How far one gets from paragraph `at` in `room` tokens, and what is left of them."""
    while 0 <= at + step < len(sizes) and sizes[at + step] <= room:
        at += step
        room -= sizes[at]
    return at, room


def make_line(question: Question, text: str, length: int, place: float) -> dict[str, Any]:
    """One line of the file. Raises `LeftOut` if the document does not say that any more."""
    paragraphs = split_paragraphs(text)
    first, last = find_gold(text, paragraphs, question.gold)
    gold = text[paragraphs[first].start : paragraphs[last].stop].strip()
    folded = " ".join(gold.casefold().split())
    for answer in question.answers:
        if answer.casefold() not in folded:
            raise LeftOut(f"the answer does not stand there: {answer!r}")
    start, stop = cut(paragraphs, first, last, length, place)
    context = text[paragraphs[start].start : paragraphs[stop].stop]
    if context.count(gold) != 1:
        raise LeftOut(f"its paragraph stands there twice: {question.gold[0]!r}")
    num_tokens = count_tokens(context)
    if num_tokens < SHORTEST:
        raise LeftOut(f"the document is too short: about {num_tokens} tokens")
    return {
        "context": context,
        "question": question.question,
        "answers": list(question.answers),
        "metric": "contains",
        "max_tokens": MAX_TOKENS,
        "gold": gold,
    }


def make_lines(questions: Sequence[Question]) -> tuple[list[tuple[str, dict[str, Any]]], list[str]]:
    """Each source with a line about it, and what is said about the questions left out.

    Lengths and places follow a question's number, so that they are the same on every machine.
    """
    lines: list[tuple[str, dict[str, Any]]] = []
    left_out: list[str] = []
    texts: dict[str, str] = {}
    for i, question in enumerate(questions):
        source = question.source
        try:
            if source not in texts:
                texts[source] = read_document(source)
            length, place = LENGTHS[i % len(LENGTHS)], PLACES[i % len(PLACES)]
            lines.append((source, make_line(question, texts[source], length, place)))
        except LeftOut as error:
            left_out.append(f"{source}: {question.question!r} is left out: {error}")
    return lines, left_out


def summarize(
    lines: Sequence[tuple[str, dict[str, Any]]], sources: Sequence[str]
) -> list[dict[str, Any]]:
    """A row for each source: its questions, and its contexts' lengths, estimated."""
    rows: list[dict[str, Any]] = []
    for source in dict.fromkeys(sources):
        sizes = [count_tokens(line["context"]) for name, line in lines if name == source]
        rows.append(
            {
                "source": source,
                "questions": len(sizes),
                "left_out": sources.count(source) - len(sizes),
                "shortest": min(sizes, default=None),
                "longest": max(sizes, default=None),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="the file of questions to write")
    parser.add_argument(
        "--questions", type=Path, default=QUESTIONS, help="what is asked (default: %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="only the result line")
    arguments = parser.parse_args()
    questions = read_questions(arguments.questions)
    lines, left_out = make_lines(questions)
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for _, line in lines)
    arguments.out.write_text(text, encoding="utf-8")
    for message in left_out:
        print(message, file=sys.stderr)
    print(f"{len(lines)} of {len(questions)} questions are in {arguments.out}", file=sys.stderr)
    rows = summarize(lines, [question.source for question in questions])
    results.finish("real_documents", "cpu", rows, arguments.json)


if __name__ == "__main__":
    main()
