"""Says at the end of `make test-docs` how many blocks of each page are run, and which are not."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.pages.commands import DOCS, PAGES, RUN, blocks_of
from tests.pages.test_commands import RUNS_ALL


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not RUNS_ALL:
        return
    terminalreporter.section("blocks of commands and programs, by page")
    for page in PAGES:
        blocks = [block for block in blocks_of(page) if block.language in RUN]
        reasons = Counter(block.reason for block in blocks if block.reason is not None)
        left = ", ".join(f"{count} not run: {reason}" for reason, count in reasons.items())
        num_run = len(blocks) - reasons.total()
        terminalreporter.line(f"{page.relative_to(DOCS)!s:45} {num_run:3} run  {left}")
