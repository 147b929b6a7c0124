"""The table that `gemserve eval` prints of its results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from gemserve.cli.tables import aligned

if TYPE_CHECKING:  # imported for types only: a command that runs no model loads no torch
    from gemserve_lab.run import Row

_HEADS = ("subtask", "tokens", "n", "method", "kept", "score", "recall", "whole")
_TEXTS = ("subtask", "method")
_NOTE = "whole: examples read as none reads them, for --keep is not below their prompt's length"


def outcome_table(rows: Sequence[Row], whole: Mapping[tuple[str, int, str], int]) -> list[str]:
    """What `eval` prints: the methods one below the other, under a heading that they share.

    `whole`: by subtask, tokens and method, how many prompts were too short to leave something out.
    Columns without a value are not shown.
    """
    lines: list[tuple[str, ...]] = []
    above: tuple[str, ...] = ()
    for row in rows:
        shared = (row.subtask, str(row.prompt_tokens), str(row.n))
        recall = "" if row.recall is None else f"{row.recall:.2f}"
        count = whole.get((row.subtask, row.prompt_tokens, row.method), 0)
        unfiltered = f"{count}/{row.n}" if count else ""
        of_method = (row.method, f"{row.kept_tokens:.0f}", f"{row.score:.2f}", recall, unfiltered)
        lines.append(("", "", "", *of_method) if shared == above else (*shared, *of_method))
        above = shared
    kept = [i for i in range(len(_HEADS)) if any(line[i] for line in lines)]
    texts = [place for place, i in enumerate(kept) if _HEADS[i] in _TEXTS]
    shown = aligned([[line[i] for i in kept] for line in (_HEADS, *lines)], texts)
    return [*shown, _NOTE] if any(whole.values()) else shown
