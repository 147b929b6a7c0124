"""Ctrl-C and SIGTERM as exceptions: where they are raised, and what they do not cut in two."""

from __future__ import annotations

import signal

import pytest

from gemserve.ending_signals import EndedBySignal, ending_signals_held, ending_signals_raised

both = pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])


@both
def test_a_signal_is_raised_and_handlers_are_put_back(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with pytest.raises(EndedBySignal) as raised, ending_signals_raised():
        signal.raise_signal(number)
    assert raised.value.number == number
    assert signal.getsignal(number) is before


@both
def test_a_held_signal_is_raised_behind_the_block(number: signal.Signals) -> None:
    """A process that was started, and not yet assigned to anything, used to be left behind."""
    done = []

    def hold() -> None:
        with ending_signals_held():
            signal.raise_signal(number)
            done.append("in the block")
        done.append("behind the block")

    with ending_signals_raised(), pytest.raises(EndedBySignal):
        hold()
    assert done == ["in the block"]
