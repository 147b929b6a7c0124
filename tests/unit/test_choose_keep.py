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
from gemserve.contract.events import Event, Finished, TextDelta
from gemserve.contract.requests import Request
from tests.unit.test_filter_plan import FULL

FOUND = Calibration(layer=3, heads=((1, 0),), is_measured=True, window=512)
RIGHT, WRONG = "right", "wrong"
WHOLE = 1 << 20  # stands for a budget of everything


@dataclass
class Answering:
    """A core that answers some probes from each budget: `share(keep)` of them."""

    share: Callable[[int], float]
    num_probes: int
    planner: Any = FULL

    def __post_init__(self) -> None:
        self.asked: list[int] = []

    def run_alone(self, request: Request) -> Iterator[Event]:
        calibration, params = self.planner.calibration, request.filter
        assert (calibration.layer, calibration.window) == (FOUND.layer, FOUND.window)
        assert request.sampling.temperature == 0
        assert isinstance(params.keep, int)
        keep = WHOLE if params.method == "none" else params.keep
        number = self.asked.count(keep)
        self.asked.append(keep)
        text = RIGHT if number < self.share(keep) * self.num_probes else WRONG
        yield TextDelta(text=text, token_ids=(7,), drawn_s=0.0)
        yield Finished(reason="stop", completion_tokens=1)


@pytest.fixture
def probes(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> list[Example]:
    """20, whose right answer is the word "right"."""
    monkeypatch.setattr(search, "contains", lambda text, _: float(text == RIGHT))
    drawn = draw_probes(tokenizer, "confirmation", (600,), 4, seed=1)
    return [example for probe in drawn for example in probe.examples][:20]


@pytest.mark.parametrize(
    ("shares", "keep"),
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
    shares: tuple[float, ...], keep: int, probes: list[Example]
) -> None:
    """A 1.5B model answered as well from 256 tokens, and read 1,024 for as long as its filter."""
    share = dict(zip((*KEEPS, WHOLE), (*shares, 0.3), strict=True))
    core: Any = Answering(share.__getitem__, len(probes))
    rows, whole = choose_keep(core, FOUND, probes, lambda *_: None)
    assert core.planner is FULL
    assert whole == pytest.approx(share[WHOLE])
    assert rows[0].keep == keep
    assert {row.keep: row.score for row in rows} == pytest.approx({k: share[k] for k in KEEPS})


def test_the_planner_is_the_servers_again_after_an_error(probes: list[Example]) -> None:
    """An interrupted calibration left a core that filtered with a budget that was being tried."""

    def fail(keep: int) -> float:
        if keep == KEEPS[1]:
            raise KeyboardInterrupt
        return 1.0

    core: Any = Answering(fail, len(probes))
    with pytest.raises(KeyboardInterrupt):
        choose_keep(core, FOUND, probes, lambda *_: None)
    assert core.planner is FULL
    assert set(core.asked) == {KEEPS[0], KEEPS[1]}
