"""The generated pages, by their path in the site."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from website.reference import endpoints, errors, metrics, options, python_api
from website.reference.example_server import stop_example_server

PAGES: dict[str, Callable[[], str]] = {
    "reference/options.md": options.write_page,
    "reference/endpoints.md": endpoints.write_page,
    "reference/objects.md": endpoints.write_objects,
    "reference/metrics.md": metrics.write_page,
    "reference/errors.md": errors.write_page,
    "reference/python.md": python_api.write_page,
}


def write_pages(folder: Path) -> None:
    """Write all generated pages below `folder`."""
    try:
        for name, write in PAGES.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(write().rstrip() + "\n", encoding="utf-8")
    finally:
        stop_example_server()
