"""Draws a calibration: recall by layer, and against the work up to the layer."""

from __future__ import annotations

from pathlib import Path

from gemserve.calibration.search.result import CalibrationResult


def draw_layers(path: Path, result: CalibrationResult) -> None:
    """Draw recall by layer and by work, for the best head and the best set of heads."""
    from matplotlib.figure import Figure

    rows = result.layers
    layers, chosen = [row.layer for row in rows], result.chosen
    figure = Figure(figsize=(7.5, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    left.bar(layers, [row.own_recall for row in rows], color="lightgrey", label="its best head")
    left.plot(layers, [row.recall for row in rows], marker="o", ms=3, label="best heads up to it")
    left.axvline(chosen.layer, color="tab:red", linestyle=":", label="chosen")
    left.set_xlabel("layer")
    left.set_ylabel("recall of the needed tokens")
    right.plot([row.work for row in rows], [row.recall for row in rows], marker="o", ms=3)
    right.axvline(chosen.work, color="tab:red", linestyle=":")
    right.set_xlabel("work up to the first token (whole prompt: 1)")
    scored = [row for row in rows if row.score is not None]
    if scored:
        right.plot([r.work for r in scored], [r.score for r in scored], "s", label="answers")
        right.axhline(
            result.full_score, color="grey", linestyle="--", label="answers, whole prompt"
        )
        right.legend(fontsize=8, loc="lower right")
    left.set_ylim(-0.05, 1.05)
    left.legend(fontsize=8, loc="upper left")
    figure.savefig(path, dpi=110)
