"""Decides what a load test sends and when: times, lengths and prompts, all from one seed."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

MAX_TOKENS = 4_000_000
ArrivalKind = Literal["poisson", "constant"]

# These words are short and common, and each is one token in most vocabularies.
COMMON_WORDS = """\
about above after again air all along also always animal answer any around ask away back base be
because been before began begin being below best better between big bird black blue boat body book
both box boy bring brought build busy but call came can car carry cause center change check children
city class clear close cold color come common complete contain cool could country course cover cross
cut dark day deep did differ direct distance do does dog done door down draw drive dry during each
early earth ease east eat end enough even ever every example eye face fact fall family far farm fast
father feel feet few field figure fill final find fine fire first fish five fly follow food foot for
force form found four free friend from front full game gave general get girl give go gold good got
govern great green ground group grow had half hand happen hard has have he head hear heat help her
here high him his hold home horse hot hour house how hundred idea if inch interest island just keep
kind king knew know land language large last late laugh lay lead learn leave left less let letter
life light like line list listen little live long look love low machine made main make man many map
mark may mean measure men might mile mind minute miss money moon more morning most mother mountain
move much music must name near need never new next night north note notice noun now number object"""


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of token counts: from `low` to `high`, or normal around `mean`."""

    text: str
    low: int
    high: int
    sd: float | None = None

    @property
    def mean(self) -> float:
        return (self.low + self.high) / 2

    def draw(self, rng: random.Random) -> int:
        if self.sd is None:
            return rng.randint(self.low, self.high)
        return min(max(1, round(rng.gauss(self.mean, self.sd))), MAX_TOKENS)


def read_lengths(text: str) -> Lengths:
    """Read `N`, `LOW:HIGH` (uniform) or `MEAN~SD` (normal, never below 1). Raises ValueError."""
    match = re.fullmatch(r"(\d+)(?:(:)(\d+)|[~±](\d+(?:\.\d+)?))?", text.strip())
    if match is None:
        raise ValueError("must be N, LOW:HIGH (uniform) or MEAN~SD (normal)")
    first, uniform, last, sd = match.groups()
    low = int(first)
    high = int(last) if uniform else low
    if not 1 <= low <= high <= MAX_TOKENS:
        raise ValueError(f"must lie in 1 to {MAX_TOKENS}, the lower bound first")
    return Lengths(text.strip(), low, high, None if sd is None else float(sd))


def arrivals(count: int, rate: float, kind: ArrivalKind, seed: int) -> list[float]:
    """The times at which `count` requests are due, in seconds. The first is due at 0."""
    rng = random.Random(f"{seed}/arrivals")
    gaps = (1 / rate if kind == "constant" else rng.expovariate(rate) for _ in range(count - 1))
    return list(itertools.accumulate(gaps, initial=0.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One request to send."""

    index: int
    prompt: str
    max_tokens: int
    due_s: float | None = None


class Prompts:
    """Makes texts of about a given number of tokens: runs of words from a random word on.

    The words are joined once and prompts are slices of that text, so that making a prompt of
    100,000 tokens does not delay the requests that are being timed.
    """

    def __init__(self, words: Sequence[str] | None, *, seed: int) -> None:
        if words is None:
            words = random.Random(f"{seed}/words").choices(COMMON_WORDS.split(), k=50_000)
        self._text = " ".join(words) + " "
        self._round = len(self._text)
        self._starts = [0, *itertools.accumulate(len(word) + 1 for word in words)][:-1]
        self._half_word = round(self._round / len(words) / 2)
        self.chars_per_token = 5.0  # used until the server has counted a prompt

    def make(self, num_tokens: int, rng: random.Random) -> str:
        """A text of about `num_tokens` tokens, in whole words, at least one."""
        start = rng.choice(self._starts)
        wanted = start + round(num_tokens * self.chars_per_token)
        while len(self._text) < wanted + self._round:
            self._text += self._text
        # end at the word end after half a word less, so that prompts are too long as often as too
        # short
        end = self._text.index(" ", max(start + 1, wanted - self._half_word))
        return self._text[start:end]


def jobs(
    count: int,
    prompt_tokens: Lengths,
    max_tokens: Lengths,
    prompts: Prompts,
    *,
    seed: int,
    point: int,
    due_s: Sequence[float] | None = None,
) -> Iterator[Job]:
    """Yield the requests of one point, each made when it is needed.

    Lengths repeat from point to point, so that points can be compared. Texts do not repeat, because
    a server with a prefix cache would then answer the second point from the first.
    """
    lengths = random.Random(f"{seed}/lengths")
    texts = random.Random(f"{seed}/texts/{point}")
    for index in range(count):
        num_tokens = prompt_tokens.draw(lengths)
        limit = max_tokens.draw(lengths)
        yield Job(
            index=index,
            prompt=prompts.make(num_tokens, texts),
            max_tokens=limit,
            due_s=None if due_s is None else due_s[index],
        )
