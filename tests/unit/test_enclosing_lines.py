"""The lines around a kept passage: `class …` and `def …`, a YAML key, a heading."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gemserve.contract.filter_options import FilterParams
from gemserve.contract.filter_plan import Budget
from gemserve.contract.prompt_parts import Priority, ProtectedRange, Separators, TextBreaks
from gemserve.filtering.joined_text import join_text
from gemserve.filtering.kept_ranges import KeptRanges
from gemserve.filtering.protected_budget import count_always_read
from gemserve.filtering.selector import SegmentEvidence
from gemserve.filtering.sieve import Sieve
from gemserve.filtering.word_ranks import RankedPassages
from gemserve.prompting import text_lines
from gemserve.prompting.prompt import chat_prompt, ids_prompt, text_prompt
from gemserve.prompting.text_breaks import find_breaks

ROOT = Path(__file__).parents[2]
# as GPT-2's tokenizers split: a line end and all but one blank of the indentation are one token
GPT2 = re.compile(r" ?[^\W_]+| ?[^\s\w]+|_|\s+(?!\S)|\s+")
# as Llama's do: a line end is no part of the indentation
LLAMA = re.compile(r" ?[^\W_]+| ?[^\s\w]+|_|\s*\n|\s+(?!\S)|\s+")
PLAIN = re.compile(r"[^\W_]+|[^\s\w]|_|\n|[^\S\n]+")


def tokens_of(text: str, pattern: re.Pattern[str]) -> list[str]:
    tokens = pattern.findall(text)
    assert "".join(tokens) == text
    return tokens


def breaks_of(tokens: Sequence[str]) -> TextBreaks:
    starts = np.cumsum([0, *map(len, tokens)])[:-1]
    return find_breaks([(0, "".join(tokens))], starts)


def lines_around(text: str, number: int | None = None, within: str = "") -> list[str]:
    """The lines that enclose one, by its number or a text in it, in the order of the text."""
    at = text.index(within) if number is None else sum(map(len, text.splitlines(True)[:number]))
    tokens = tokens_of(text, PLAIN)
    starts = np.cumsum([0, *map(len, tokens)])
    around = breaks_of(tokens).enclosing.around(int(starts.searchsorted(at, side="right")) - 1)
    return [text[starts[start] : starts[stop]].strip() for start, stop in reversed(around)]


CODE = '''\
import os

class Shelf:
    """What is on it."""

    def add(self, book):
        if book.is_new:
            self.new.append(book)

        self.books.append(book)

    def find(
        self,
        name: str,
    ) -> Book:
        return self.by_name[name]

TOTAL = 1
'''


@pytest.mark.parametrize(
    ("within", "around"),
    [
        ("append(book)\n\n", ["class Shelf:", "def add(self, book):", "if book.is_new:"]),
        ("books.append", ["class Shelf:", "def add(self, book):"]),
        ("def find", ["class Shelf:"]),
        ("return", ["class Shelf:", "def find(", ") -> Book:"]),
        ("TOTAL", []),
        ("import", []),
    ],
)
def test_code_has_its_class_and_function(within: str, around: list[str]) -> None:
    assert lines_around(CODE, within=within) == around
    by_tabs = CODE.replace("    ", "\t")
    assert lines_around(by_tabs, within=within.replace("    ", "\t")) == around


def test_a_blank_line_belongs_to_what_follows_it() -> None:
    lines = CODE.splitlines()
    assert lines_around(CODE, number=lines.index("TOTAL = 1") - 1) == []
    assert lines_around(CODE, number=lines.index("        self.books.append(book)") - 1) == [
        "class Shelf:",
        "def add(self, book):",
    ]


def test_braces_belong_to_the_line_before_them() -> None:
    text = "int f(int x)\n{\n\tif (x) {\n\t\ta();\n\t} else {\n\t\tb();\n\t}\n}\nint g;\n"
    assert lines_around(text, within="a()") == ["int f(int x)", "if (x) {"]
    assert lines_around(text, within="b()") == ["int f(int x)", "if (x) {", "} else {"]
    assert lines_around(text, within="int g") == []


def test_yaml_and_json_have_their_keys() -> None:
    yaml = "services:\n  web:\n    ports:\n      - 80\n      - 443\n  db:\n    image: pg\nend: 1\n"
    assert lines_around(yaml, within="443") == ["services:", "web:", "ports:"]
    assert lines_around(yaml, within="image") == ["services:", "db:"]
    assert lines_around(yaml, within="end") == []
    json = '{\n  "a": [\n    {\n      "b": 1\n    },\n    {\n      "c": 2\n    }\n  ]\n}\n'
    for key in ('"b"', '"c"'):
        assert lines_around(json, within=key) == ['"a": [']  # a brace alone says nothing


def test_list_items_may_stand_right_below_their_key() -> None:
    yaml = "on: push\nsteps:\n- name: Build\n  run: make\n- name: Test\n  run: test\n"
    assert lines_around(yaml, within="- name: Test") == ["steps:"]
    assert lines_around(yaml, within="run: test") == ["steps:", "- name: Test"]
    # what does not announce them does not enclose them
    assert lines_around("One line\n- an item\n", within="item") == []


MARKDOWN = """\
# Guide

Some words.

## Install
One more.

```sh
# not a heading
make all
```

### On a Mac?

Text.

## Use

Text again.
"""


@pytest.mark.parametrize(
    ("within", "around"),
    [
        ("Some", ["# Guide"]),
        ("## Install", ["# Guide"]),
        ("One more", ["# Guide", "## Install"]),
        ("make all", ["# Guide", "## Install"]),
        ("Text.", ["# Guide", "## Install", "### On a Mac?"]),
        ("Text again", ["# Guide", "## Use"]),
    ],
)
def test_markdown_has_its_headings(within: str, around: list[str]) -> None:
    assert lines_around(MARKDOWN, within=within) == around


@pytest.mark.parametrize(
    ("fenced", "is_fenced"),
    [
        ("```\n## a\n\nx\n```\n", True),
        ("~~~~ text\n```\n## a\n\nx\n~~~~\n", True),
        ("````\n## a\n```\nx\n````\n", True),
        ("  ```\n## a\n\nx\n  ```\n", True),
        ("```\n## a\n\nx", True),  # without an end
        ("```one```\n## a\n\nx\n", False),
        ("```\ny\n```\n## a\n\nx\n", False),
    ],
)
def test_a_heading_in_a_fence_is_a_comment(fenced: str, is_fenced: bool) -> None:
    text = f"# Top\n\n{fenced}"
    assert lines_around(text, within="x") == (["# Top"] if is_fenced else ["# Top", "## a"])


def test_comments_of_programs_are_no_headings() -> None:
    text = "# Copyright\n# All rights\n\nimport os\n\n# The total.\nTOTAL = 1\n\nx = 2\n"
    assert lines_around(text, within="import") == []
    assert lines_around(text, within="x = 2") == []


def test_what_says_nothing_is_left_out() -> None:
    long = "a long line of prose " * 20
    assert lines_around(f"key:\n  {long}:\n    x\n", within="x\n") == ["key:"]
    assert lines_around("It ended there.\n    A new one began\nand went on\n", within="A new") == []


def test_at_most_four_are_found_however_deep() -> None:
    text = "".join(f"{'  ' * depth}key{depth}:\n" for depth in range(300))
    assert lines_around(text, number=299) == [f"key{depth}:" for depth in (295, 296, 297, 298)]


def test_messages_enclose_nothing_of_each_other() -> None:
    texts = ["# One\n\na\n", "", "  b\n", "c\n"]
    starts = [sum(len(text) + 3 for text in texts[:i]) for i in range(4)]
    placed = list(zip(starts, texts, strict=True))
    whole = "###".join(texts)
    enclosing = find_breaks(placed, range(len(whole))).enclosing
    assert [whole[slice(*at)] for at in enclosing.around(whole.index("a\n"))] == ["# One\n"]
    for other in ("b\n", "c\n"):
        assert enclosing.around(whole.rindex(other)) == ()


@pytest.mark.parametrize("piece", [1, 7, 64])
def test_lines_of_pieces_are_those_of_the_whole(
    piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(piece)
    noise = "".join(rng.choices("a.\n\t #`{}:-", k=3000))
    texts = [(0, CODE), (1000, MARKDOWN), (5000, noise), (9000, "")]
    whole = text_lines.find_lines(texts)
    monkeypatch.setattr(text_lines, "_PIECE", piece)
    pieces = text_lines.find_lines(texts)
    short = whole.stops - whole.starts <= piece  # of a longer line only the beginning is read
    for name in ("starts", "stops", "texts"):
        assert (getattr(whole, name) == getattr(pieces, name)).all()
    for name in ("firsts", "columns", "levels", "fences", "is_blank", "has_word"):
        assert (getattr(whole, name)[short] == getattr(pieces, name)[short]).all()


TEXTS = {
    "newlines": "\n" * 1_000_000,
    "short lines": "a\n b\n" * 500_000,
    "fences": "```\n" * 1_000_000,
    "code": CODE * 30_000,
    "one line": "word " * 2_000_000,
}


@pytest.mark.parametrize("name", TEXTS)
def test_long_texts_take_little_time(name: str) -> None:
    text = TEXTS[name]
    starts = np.arange(0, len(text), 3)
    begin = time.perf_counter()
    breaks = find_breaks([(0, text)], starts)
    assert time.perf_counter() - begin < 20  # a second on an idle machine
    assert len(breaks.enclosing.starts) <= text.count("\n")


# What is kept


def kept_text(tokens: Sequence[str], within: str, most: int) -> str:
    """The text that is read if the line with these words is the only passage that is kept."""
    breaks = breaks_of(tokens)
    lines = [0, *breaks.lines, len(tokens)]
    passage = next(line for line in pairwise(lines) if within in "".join(tokens[slice(*line)]))
    starts, stops = (np.array([edge]) for edge in passage)
    one = np.ones(1, dtype=np.int64)
    passages = RankedPassages(starts, stops, one, np.ones(1), np.zeros(1), 0 * one)
    kept = KeptRanges()
    passages.fill(kept, most, breaks)
    positions = [p for a, b in kept.ranges for p in range(a, b)]
    evidence = evidence_of(len(tokens), breaks)
    ids = join_text(np.arange(len(tokens)), positions, evidence.gaps).ids
    return "".join(tokens[i] if i < SEPARATOR else "\n" for i in ids)


SEPARATOR = 1 << 20  # a token id of a line end


def evidence_of(
    num_tokens: int, breaks: TextBreaks, protected: tuple[ProtectedRange, ...] = ()
) -> SegmentEvidence:
    return SegmentEvidence(
        num_tokens=num_tokens,
        scores=torch.zeros(num_tokens),
        shares=torch.zeros(2, num_tokens),
        protected=protected,
        breaks=breaks,
        separators=Separators(blank_line=(SEPARATOR,) * 2, line_end=(SEPARATOR,)),
    )


@pytest.mark.parametrize("pattern", [GPT2, LLAMA], ids=["GPT-2", "Llama"])
@pytest.mark.parametrize("indentation", ["    ", "  ", " ", "\t"])
def test_a_kept_line_has_its_indentation_and_those_around_it(
    pattern: re.Pattern[str], indentation: str
) -> None:
    """The first line of a passage lost its indentation where it is a token with a line end."""
    text = CODE.replace("    ", indentation)
    tokens = tokens_of(text, pattern)
    kept = kept_text(tokens, "self.books.append", 40).rstrip()  # no room for the function
    code = ["class Shelf:", "    def add(self, book):", "        self.books.append(book)"]
    lines = [line.rstrip() for line in kept.split("\n")]
    assert [line for line in lines if line] == [c.replace("    ", indentation) for c in code]
    # in front of both lines there was a blank one, which may be part of their indentation's token
    assert len(lines) <= 5


def test_headings_stand_on_their_lines() -> None:
    tokens = tokens_of(MARKDOWN, GPT2)
    assert kept_text(tokens, "Text.", 100).split() == (
        ["#", "Guide", "##", "Install", "###", "On", "a", "Mac?", "Text."]
    )
    assert kept_text(tokens, "One more", 100).rstrip() in (
        "# Guide\n\n## Install\nOne more.",
        "# Guide\n## Install\nOne more.",
    )


def test_a_passage_is_kept_alone_where_the_lines_around_it_do_not_fit() -> None:
    tokens = tokens_of(CODE, GPT2)
    with_others = kept_text(tokens, "self.books.append", 24)
    alone = kept_text(tokens, "self.books.append", 16)
    assert "class Shelf" in with_others
    assert alone.strip() == "self.books.append(book)"
    assert kept_text(tokens, "self.books.append", 4) == ""


def test_no_budget_is_exceeded() -> None:
    """Neither by enclosing lines, nor by indentation, nor by what is added between passages."""
    rng = random.Random(0)
    generator = torch.Generator().manual_seed(0)
    source = (ROOT / "server/gemserve/filtering/sieve.py").read_text()
    readme = (ROOT / "README.md").read_text()
    for trial in range(60):
        pattern = rng.choice([GPT2, LLAMA])
        tokens = tokens_of(rng.choice([source, readme, CODE * 20, MARKDOWN * 20]), pattern)
        breaks, num_tokens = breaks_of(tokens), len(tokens)
        protected = tuple(
            ProtectedRange(start, start + rng.randint(1, 30), priority)
            for priority in rng.choices(list(Priority), k=rng.randint(0, 6))
            for start in [rng.randrange(num_tokens - 30)]
        )
        keep = rng.choice([16, 40, 100, 256, 700])
        always = count_always_read(protected, num_tokens)
        high = min(num_tokens, keep + always)
        low = high if trial % 3 else always + min(16, high - always)
        budget = Budget(low=low, high=high, limit=high, protected=always)
        evidence = evidence_of(num_tokens, breaks, protected)
        evidence.scores.copy_(torch.rand(num_tokens, generator=generator) ** 8)
        choice = Sieve().choose(evidence, budget, FilterParams(method="sieve", keep=keep))
        positions = choice.positions.tolist()
        joined = join_text(np.arange(num_tokens), positions, evidence.gaps)
        assert len(joined.ids) <= high
        assert len(joined.ids) == len(positions) + len(joined.added)
        assert positions == sorted(set(positions))


def test_prompts_of_token_ids_have_the_lines_of_their_text(tokenizer: Any) -> None:
    by_text = text_prompt(tokenizer, f"{MARKDOWN}\n{CODE}\nWhat is found?")
    by_ids = ids_prompt(tokenizer, by_text.ids)
    assert len(by_text.breaks.enclosing.starts) > 8
    for name in ("starts", "line_starts", "line_stops"):
        one, other = (getattr(each.breaks.enclosing, name) for each in (by_text, by_ids))
        assert one.tolist() == other.tolist()
    assert by_text.breaks.with_line_end.tolist() == by_ids.breaks.with_line_end.tolist()


def test_a_chat_has_the_lines_of_its_messages(tokenizer: Any) -> None:
    prompt = chat_prompt(tokenizer, [{"role": "user", "content": f"{CODE}\n\nWhat is found?"}])
    text = prompt.text
    line = text.index("return")
    token = next(i for i, (_, stop) in enumerate(prompt.offsets) if stop > line)
    around = prompt.breaks.enclosing.around(token)
    found = [text[prompt.offsets[a][0] : prompt.offsets[b - 1][1]].strip() for a, b in around]
    assert found == [") -> Book:", "def find(", "class Shelf:"]
