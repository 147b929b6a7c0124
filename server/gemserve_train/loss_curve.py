"""A run's losses as a picture, which needs no package: two lines in an SVG file."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

_WIDTH, _HEIGHT = 640, 360
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 16, 28, 40
_LINES = (("loss", "training", "#1f77b4"), ("eval_loss", "evaluation", "#d62728"))


def history_of(log: Sequence[Mapping[str, Any]]) -> tuple[dict[str, float], ...]:
    """The losses in a `Trainer`'s log: each entry has `step` and `loss` or `eval_loss`."""
    names = ("step", "loss", "eval_loss")
    entries = ({name: float(entry[name]) for name in names if name in entry} for entry in log)
    return tuple(entry for entry in entries if len(entry) > 1)


def loss_curve(history: Sequence[Mapping[str, float]]) -> str:
    """An SVG picture of training and evaluation loss by step. Losses that are no numbers are left
    out.
    """
    lines = {name: _points(history, name) for name, _, _ in _LINES}
    points = [point for line in lines.values() for point in line]
    last = max((step for step, _ in points), default=1.0)
    most = 1.05 * max((loss for _, loss in points), default=1.0) or 1.0

    def x(step: float) -> float:
        return _LEFT + step / last * (_WIDTH - _LEFT - _RIGHT)

    def y(loss: float) -> float:
        return _HEIGHT - _BOTTOM - loss / most * (_HEIGHT - _TOP - _BOTTOM)

    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
    ]
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        level, step = share * most, share * last
        drawn += [
            f'<path d="M{_LEFT} {y(level):.1f}H{_WIDTH - _RIGHT}" stroke="#ddd"/>',
            f'<text x="{_LEFT - 6}" y="{y(level) + 4:.1f}" text-anchor="end">{level:.2f}</text>',
            f'<text x="{x(step):.1f}" y="{_HEIGHT - _BOTTOM + 16}" text-anchor="middle">'
            f"{step:.0f}</text>",
        ]
    drawn.append(
        f'<text x="{(_LEFT + _WIDTH) / 2}" y="{_HEIGHT - 6}" text-anchor="middle">step</text>'
    )
    for at, (name, label, color) in enumerate(_LINES):
        path = " ".join(f"{x(step):.1f},{y(loss):.1f}" for step, loss in lines[name])
        drawn += [
            f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>',
            f'<text x="{_LEFT + 8 + 110 * at}" y="18" fill="{color}">{label} loss</text>',
        ]
    return "\n".join([*drawn, "</svg>"]) + "\n"


def _points(history: Sequence[Mapping[str, float]], name: str) -> list[tuple[float, float]]:
    return [
        (entry["step"], entry[name])
        for entry in history
        if name in entry and math.isfinite(entry[name])
    ]
