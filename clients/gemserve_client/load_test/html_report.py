"""Writes a load test as one HTML file that needs no other file."""

from __future__ import annotations

import base64
import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gemserve_client.load_test import pictures
from gemserve_client.load_test.metrics import error_lines, point_name, table
from gemserve_client.load_test.pictures import Curve, Draw
from gemserve_client.load_test.text_table import cell

STYLE = """
:root { color-scheme: light dark; --paper: #ffffff; --ink: #1f2328; --soft: #59636e;
  --line: #d8dee4; --panel: #f6f8fa; }
@media (prefers-color-scheme: dark) { :root { --paper: #14181e; --ink: #e6edf3; --soft: #9aa4af;
  --line: #39414b; --panel: #1c2229; } }
body { margin: 2rem auto; max-width: 66rem; padding: 0 1rem; background: var(--paper);
  color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin-bottom: 0.2rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
p.soft, figcaption { color: var(--soft); } figure { margin: 0; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: 0.2rem 0.9rem; border-bottom: 1px solid var(--line); text-align: right;
  white-space: nowrap; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
pre { background: var(--panel); padding: 0.7rem 1rem; border-radius: 6px; white-space: pre-wrap;
  overflow-wrap: anywhere; font-size: 13px; }
img { max-width: 100%; height: auto; display: block; }
"""
CDF_CAPTION = "Completed requests; logarithmic where values differ much."


def write_report(folder: Path, result: Mapping[str, Any], command: str) -> None:
    """Write report.html and its pictures as PNG files into `folder`."""
    points = result["points"]
    rows = [point["row"] for point in points]
    shown = [Curve(point_name(point["row"]), [point]) for point in pictures.some(points)]
    sections = [
        ("Summary", html_table(table([point_name(row) for row in rows], rows))),
        *([("Errors", html_table(error_lines(points)))] if any(r["errors"] for r in rows) else []),
        ("Latency", figure(folder, "latency_cdf", pictures.cdfs([("", shown)]), CDF_CAPTION)),
    ]
    if len(points) > 1:
        draw = pictures.throughput([Curve("", points)])
        caption = "Each marker is one point, named by its concurrency or rate."
        sections.append(("Throughput", figure(folder, "throughput_latency", draw, caption)))
    caption = "Requests sent and not yet ended; a cross is a request that failed."
    draw = pictures.timeline(points)
    sections.append(("Timeline", figure(folder, "timeline", draw, caption)))
    sections.append(("Settings", html_table(_settings(result))))
    sections.append(("Command", f"<pre>{text(command)}</pre>"))
    title = f"Load test: {result['label'] or result['settings']['model']}"
    write_page(folder, title, f"{result['started_at']}, {result['settings']['url']}", sections)


def write_page(folder: Path, title: str, lead: str, sections: Sequence[tuple[str, str]]) -> None:
    parts = [f"<h2>{text(heading)}</h2>\n{body}" for heading, body in sections]
    page = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{text(title)}</title><style>{STYLE}</style></head>\n<body>"
        f'<h1>{text(title)}</h1><p class="soft">{text(lead)}</p>\n'
        + "\n".join(parts)
        + "\n</body></html>\n"
    )
    (folder / "report.html").write_text(page, encoding="utf-8", errors="replace")


def figure(folder: Path, name: str, draw: Draw, caption: str) -> str:
    """Draw a picture for the light and the dark theme, and write the light one to NAME.png."""
    light, dark = (pictures.png(draw, theme) for theme in (pictures.LIGHT, pictures.DARK))
    (folder / f"{name}.png").write_bytes(light)
    return (
        '<figure><picture><source media="(prefers-color-scheme: dark)" '
        f'srcset="{_data_url(dark)}"><img alt="{text(caption)}" src="{_data_url(light)}">'
        f"</picture><figcaption>{text(caption)}</figcaption></figure>"
    )


def html_table(lines: Sequence[Sequence[str]]) -> str:
    """An HTML table. The first of `lines` becomes its head."""
    head, *body = (
        "".join(f"<{tag}>{text(value)}</{tag}>" for value in line)
        for tag, line in zip(["th"] + ["td"] * len(lines), lines, strict=False)
    )
    rows = "".join(f"<tr>{line}</tr>\n" for line in body)
    return f'<div class="scroll"><table><tr>{head}</tr>\n{rows}</table></div>'


def text(content: str) -> str:
    """Escape a text for HTML. "//" is escaped too, so that no text looks like a reference."""
    return html.escape(content).replace("://", ":&#47;&#47;")


def _settings(result: Mapping[str, Any]) -> list[list[str]]:
    lines = [["", ""], *([key, cell(value)] for key, value in result["settings"].items())]
    lines.append(["device", cell(result["device"])])
    lines.append(["commit", result["commit"]])
    versions = [f"{name} {version}" for name, version in result["versions"].items() if version]
    return [*lines, ["versions", ", ".join(versions)]]


def _data_url(content: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(content).decode()
