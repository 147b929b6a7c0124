"""Prompt-lookup decoding: a step tries what followed the same words elsewhere in the text.

Answers over documents repeat them. If the newest tokens of a sequence stand in its text already,
what follows them there is proposed: it goes into the decode step behind the newest token, and the
step computes all of these rows at once. The sampler then draws as always, and goes on to the next
row for as long as it draws what was proposed. So every token is drawn from the same logits as
without proposals, and they change nothing but the time (Saxena, 2023, "Prompt Lookup Decoding").

A row more makes a step longer, so tokens are proposed only as long as they are likely enough to
be drawn. Both are measured. How often the text was right is known of tokens that were not proposed,
too: whoever proposes nothing learns from what was drawn when it would pay.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from gemserve.engine.scheduling.time_shares import StepTimes
from gemserve.engine.sequence.sequence import LiveSequence
from gemserve.engine.sequence.step_plan import DecodeRow
from gemserve.engine.sequence.text_index import TextIndex

MOST_PROPOSED = 15  # behind one token
MOST_ROWS = 32  # of a step with proposals; with more, the products are no longer cheap
_ROW_SHARE = 0.1  # of a row's part of a step that one more takes, until it has been measured


class PromptLookup:
    """Adds proposals to a step's rows, and learns how long steps take."""

    def __init__(self, end_ids: Collection[int], *, is_forced: bool = False) -> None:
        """`is_forced`: everything that is found is proposed, whether that pays or not."""
        self._end_ids, self._is_forced = end_ids, is_forced
        self._step_times = StepTimes(row_share=_ROW_SHARE)

    def propose(
        self, rows: Sequence[DecodeRow], decoding: Sequence[LiveSequence]
    ) -> tuple[DecodeRow, ...]:
        """The rows of these sequences, with what is worth trying behind them."""
        num_rows, num_tokens = len(rows), float(len(rows))
        proposing = []
        for row, sequence in zip(rows, decoding, strict=True):
            index = sequence.text_index
            room = sequence.request.sampling.max_tokens - len(sequence.generated) - 1
            most = min(MOST_PROPOSED, room, MOST_ROWS - num_rows)
            if index is not None and most >= 0:
                # also where nothing may be proposed, to learn whether it would have been right
                index.look(sequence.ids, sequence.generated, max(1, most), self._end_ids)
                count, expected = self._num_worth(index, most, num_rows, num_tokens)
                row = row._replace(proposed=index.found[:count])
                num_rows, num_tokens = num_rows + count, num_tokens + expected
            proposing.append(row)
        return tuple(proposing)

    def learn(
        self,
        rows: Sequence[DecodeRow],
        drawn: Mapping[int, Sequence[int]],
        sequences: Mapping[int, LiveSequence],
        seconds: float,
    ) -> None:
        """Note what was drawn in a step with these rows, and how long it took."""
        self._step_times.observe(sum(1 + len(row.proposed) for row in rows), seconds)
        for row in rows:
            if row.sequence in drawn:
                index = sequences[row.sequence].text_index
                if index is not None:
                    index.learn(drawn[row.sequence], len(row.proposed))

    def _num_worth(
        self, index: TextIndex, most: int, num_rows: int, num_tokens: float
    ) -> tuple[int, float]:
        """How many of the tokens found should be proposed, and how many of them will be drawn.

        The most tokens in a second count. `num_rows`, `num_tokens`: what the step has without them,
        and how many tokens that is expected to give.
        """
        most = max(0, min(most, len(index.found)))
        if self._is_forced:
            return most, 0.0
        best, likely, expected = (0, 0.0), 1.0, 0.0
        without_s = self._step_times.seconds_of(num_rows)
        if not without_s:
            return best
        best_pace = num_tokens / without_s
        for count in range(1, most + 1):
            likely *= index.rate
            expected += likely
            pace = (num_tokens + expected) / self._step_times.seconds_of(num_rows + count)
            if pace > best_pace:
                best, best_pace = (count, expected), pace
        return best
