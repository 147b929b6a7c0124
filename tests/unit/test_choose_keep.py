"""How many tokens `keep: "auto"` keeps: as many as the model answers best from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from gemserve.calibration.files import Calibration
from gemserve.calibration.search import choose_keep as search
from gemserve.calibration.search.choose_keep import KEEPS, choose_keep
from gemserve.calibration.search.example import Example
from gemserve.calibration.search.probes import draw_probes
from gemserve.calibration.search.result import KeepResult
from gemserve.types import Event, Finished, Request, TextDelta
from tests.unit.test_filter_plan import FULL

FOUND = Calibration(layer=3, heads=((1, 0),), is_measured=True, window=512)
RIGHT, WRONG = "right", "wrong"
WHOLE = 1 << 20  # stands for a budget of everything


@dataclass
class Answering:
    """A core that answers some probes from each budget: `share(keep, looks_twice)` of them."""

    share: Callable[[int, bool], float]
    num_probes: int
    planner: Any = FULL

    def __post_init__(self) -> None:
        self.asked: list[tuple[int, bool]] = []

    def run_alone(self, request: Request) -> Iterator[Event]:
        calibration, params = self.planner.calibration, request.filter
        assert calibration.second_look
        assert (calibration.layer, calibration.window) == (FOUND.layer, FOUND.window)
        assert request.sampling.temperature == 0
        looks_twice = params.second_look == "auto" and params.keep == "auto"
        keep = calibration.auto_keep if looks_twice else params.keep
        if params.method == "none":
            keep = WHOLE
        number = sum(asked == (keep, looks_twice) for asked in self.asked)
        self.asked.append((keep, looks_twice))
        share = self.share(keep, looks_twice)
        text = RIGHT if number < share * self.num_probes else WRONG
        yield TextDelta(text=text, token_ids=(7,), drawn_s=0.0)
        yield Finished(reason="stop", completion_tokens=1)


@pytest.fixture
def probes(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> list[Example]:
    """20, whose right answer is the word "right"."""
    monkeypatch.setattr(search, "contains", lambda text, _: float(text == RIGHT))
    drawn = draw_probes(tokenizer, "confirmation", (600,), 4, seed=1)
    return [example for probe in drawn for example in probe.examples][:20]


def choose(
    probes: list[Example], share: Callable[[int, bool], float]
) -> tuple[tuple[KeepResult, ...], Answering]:
    core: Any = Answering(share, len(probes))
    rows, whole = choose_keep(core, FOUND, probes, lambda *_: None)
    assert core.planner is FULL
    assert whole == pytest.approx(share(WHOLE, False))
    return rows, core


def shares(*once: float, twice: float = 0.0) -> Callable[[int, bool], float]:
    """The share of right answers from each size, and from the smallest after a second look."""

    def share(keep: int, looks_twice: bool) -> float:
        if looks_twice:
            return twice if keep == KEEPS[0] else 0.0
        if keep == WHOLE:
            return 0.3
        return once[KEEPS.index(keep)]

    return share


@pytest.mark.parametrize(
    ("once", "keep"),
    [
        ((0.8, 0.6, 0.4, 0.2), 128),
        ((0.8, 0.8, 0.4, 0.2), 256),  # so small a budget must be better
        ((0.8, 0.75, 0.4, 0.2), 256),  # an answer less is as good
        ((0.8, 0.7, 0.4, 0.2), 128),
        ((0.7, 0.8, 0.4, 0.2), 256),
        ((0.7, 0.75, 0.8, 0.8), 256),
        ((0.2, 0.4, 0.6, 0.8), 1024),
        ((0.0, 0.0, 0.0, 0.0), 1024),  # that tells nothing,
        ((0.1, 0.1, 0.1, 0.05), 1024),  # and so does that
    ],
)
def test_the_smallest_that_is_about_as_good_as_the_best_is_chosen(
    once: tuple[float, ...], keep: int, probes: list[Example]
) -> None:
    """A 1.5B model answered as well from 256 tokens, and read 1,024 for as long as its filter."""
    rows, _ = choose(probes, shares(*once))
    assert (rows[0].keep, rows[0].second_look) == (keep, False)
    assert rows[0].score == pytest.approx(once[KEEPS.index(keep)])
    assert {row.keep for row in rows} == set(KEEPS)


@pytest.mark.parametrize(("twice", "is_chosen"), [(0.9, True), (0.85, False), (0.2, False)])
def test_a_second_look_must_be_worth_its_time(
    twice: float, is_chosen: bool, probes: list[Example]
) -> None:
    rows, _ = choose(probes, shares(0.8, 0.5, 0.4, 0.2, twice=twice))
    assert (rows[0].keep, rows[0].second_look) == (128, is_chosen)


def test_a_large_budget_has_room_for_what_would_be_looked_at(probes: list[Example]) -> None:
    _, core = choose(probes, shares(0.8, 0.5, 0.4, 0.2))
    assert {keep for keep, looks_twice in core.asked if looks_twice} == {128}
    _, core = choose(probes, shares(0.2, 0.5, 0.8, 0.2))
    assert not any(looks_twice for _, looks_twice in core.asked)


def test_the_planner_is_the_servers_again_after_an_error(probes: list[Example]) -> None:
    """An interrupted calibration left a core that filtered with a budget that was being tried."""

    def fail(keep: int, _: bool) -> float:
        if keep == KEEPS[1]:
            raise KeyboardInterrupt
        return 1.0

    core: Any = Answering(fail, len(probes))
    with pytest.raises(KeyboardInterrupt):
        choose_keep(core, FOUND, probes, lambda *_: None)
    assert core.planner is FULL
    assert {keep for keep, _ in core.asked} == {KEEPS[0], KEEPS[1]}
