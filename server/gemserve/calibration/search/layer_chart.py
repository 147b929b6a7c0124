"""Draws a calibration: recall by layer, and against the work up to the layer."""

from __future__ import annotations

from pathlib import Path

from gemserve.calibration.search.result import CalibrationResult


def draw_layers(path: Path, result: CalibrationResult) -> None:
    """Draw recall by words and by meaning of the best heads up to each layer, and over the work."""
    from matplotlib.figure import Figure

    rows = result.layers
    layers, chosen = [row.layer for row in rows], result.chosen
    figure = Figure(figsize=(7.5, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    left.bar(layers, [row.own_recall for row in rows], color="lightgrey", label="its best head")
    shares = {
        "questions with the fact's words": [row.words for row in rows],
        "questions in other words": [row.meaning for row in rows],
    }
    for (label, recalls), color in zip(shares.items(), ("tab:blue", "tab:orange"), strict=True):
        if any(recall is not None for recall in recalls):
            for axes, places in ((left, layers), (right, [row.work for row in rows])):
                axes.plot(places, recalls, marker="o", ms=3, color=color, label=label)
    left.axvline(chosen.layer, color="tab:red", linestyle=":", label="chosen")
    left.set_xlabel("layer")
    left.set_ylabel("recall of the needed tokens")
    right.set_xlabel("work up to the first token (whole prompt: 1)")
    right.axvline(chosen.work, color="tab:red", linestyle=":")
    left.set_ylim(-0.05, 1.05)
    left.legend(fontsize=8, loc="lower right")
    figure.savefig(path, dpi=110)
