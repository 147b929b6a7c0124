"""Writes the Grafana dashboard from panels.py: `python -m deploy.make_dashboard`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from deploy.panels import ROWS, Panel

TARGET = Path(__file__).parent / "grafana/dashboards/gemserve.json"
WIDTH, HEIGHT, COLUMNS = 8, 8, 24


def panel_json(panel: Panel, number: int, x: int, y: int) -> dict[str, Any]:
    title, unit, text, queries = panel
    return {
        "id": number,
        "type": "timeseries",
        "title": title,
        "description": text,
        "datasource": {"type": "prometheus", "uid": "prometheus"},
        "gridPos": {"h": HEIGHT, "w": WIDTH, "x": x, "y": y},
        "fieldConfig": {
            "defaults": {"unit": unit, "min": 0, "custom": {"fillOpacity": 8, "spanNulls": True}},
            "overrides": [],
        },
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}},
        "targets": [
            {"refId": chr(ord("A") + place), "expr": expr, "legendFormat": legend}
            for place, (expr, legend) in enumerate(queries)
        ],
    }


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana imports it."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS:
        place = {"h": 1, "w": COLUMNS, "x": 0, "y": y}
        panels.append(
            {
                "id": len(panels) + 1,
                "type": "row",
                "title": title,
                "gridPos": place,
                "collapsed": False,
                "panels": [],
            }
        )
        y += 1
        for index, panel in enumerate(row):
            x = WIDTH * index % COLUMNS
            panels.append(panel_json(panel, len(panels) + 1, x, y))
            if x + WIDTH == COLUMNS or index == len(row) - 1:
                y += HEIGHT
    instance = {
        "name": "instance",
        "type": "query",
        "label": "Server",
        "datasource": {"type": "prometheus", "uid": "prometheus"},
        "query": {"query": "label_values(gemserve_engine_up, instance)", "refId": "instance"},
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }
    return {
        "uid": "gemserve",
        "title": "gemserve",
        "tags": ["gemserve"],
        "schemaVersion": 41,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [instance]},
        "panels": panels,
    }


def text() -> str:
    return json.dumps(dashboard(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    TARGET.write_text(text(), encoding="utf-8")
