"""SECURITY.md names a test for each claim; a test that was renamed would leave a claim alone."""

from __future__ import annotations

import re

from tests.distribution.test_docs import ROOT, wrong_links

PAGE = ROOT / "SECURITY.md"


def test_every_test_named_exists() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE.read_text("utf-8"))
    assert len(named) > 30
    missing = [
        f"{path}::{name}"
        for path, name in named
        if f"def {name}(" not in (ROOT / path).read_text("utf-8")
    ]
    assert missing == []


def test_links_lead_somewhere() -> None:
    assert wrong_links(PAGE) == []
