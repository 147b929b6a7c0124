"""A reader can type what the pages for users say: every command runs.

Pages of `IN_SECONDS` are run by `make test`, without the blocks that take minutes. All pages and
blocks are run by `make test-docs`, which sets `GEMSERVE_TEST_DOCS`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.pages.commands import DOCS, PAGES, RUN, Block, Reader, blocks_of, split_server

RUNS_ALL = os.environ.get("GEMSERVE_TEST_DOCS") == "1"
IN_SECONDS = ("start.md", "guides/when-something-is-wrong.md")


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    opened = Reader(tmp_path)
    try:
        yield opened
    finally:
        opened.close()


def blocks_to_run(page: Path) -> list[Block]:
    return [
        block
        for block in blocks_of(page)
        if block.language in RUN and block.reason is None and (RUNS_ALL or not block.takes_minutes)
    ]


def run_pages() -> list[Path]:
    return [
        page
        for page in PAGES
        if blocks_to_run(page) and (RUNS_ALL or str(page.relative_to(DOCS)) in IN_SECONDS)
    ]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("page", run_pages(), ids=lambda page: str(page.relative_to(DOCS)))
def test_every_command_of_a_page_runs(page: Path, reader: Reader) -> None:
    for block in blocks_to_run(page):
        try:
            reader.run(block)
        except AssertionError as error:
            raise AssertionError(f"{page.name}:{block.line}: {error}") from error


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_every_block_is_run_or_says_why_not(page: Path) -> None:
    """A block without a language, or with a reason of its own, would be left out in silence."""
    assert isinstance(blocks_of(page), list)


def test_pages_of_make_test_are_there() -> None:
    assert {str(page.relative_to(DOCS)) for page in PAGES}.issuperset(IN_SECONDS)
    assert all(blocks_to_run(DOCS / name) for name in IN_SECONDS)


def test_marks_and_what_they_stand_above(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.pages.commands.ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- not run: Docker -->\n```sh\ndocker ps\n```\n\n"
        "```sh\necho 1\n```\n\n```text\n1\n2\n```\n"
        "<!-- minutes -->\n```python\nprint(1)\n```\n"
    )
    docker, echo, shown, python = blocks_of(page)
    assert (docker.reason, docker.line) == ("Docker", 2)
    assert (echo.reason, echo.shown, echo.text) == (None, "1", "echo 1")
    assert (shown.language, python.takes_minutes) == ("text", True)
    page.write_text("<!-- not run: no time -->\n```sh\necho 1\n```\n")
    with pytest.raises(
        ValueError, match=r"page\.md:2: 'no time': must be one of the package index"
    ):
        blocks_of(page)
    page.write_text("```\necho 1\n```\n")
    with pytest.raises(ValueError, match=r"page\.md:1: '': must be one of sh, python"):
        blocks_of(page)


def test_a_server_is_the_last_command_of_its_block() -> None:
    assert split_server("echo 1\ngemserve serve --model a \\\n  --port 1") == (
        "echo 1",
        "gemserve serve --model a \\\n  --port 1",
    )
    assert split_server("gemserve serve --port 1 || true\n")[1] is None
    assert split_server("gemserve ask a b")[1] is None


def test_a_failing_command_is_noticed(reader: Reader) -> None:
    """Otherwise the test of the pages could pass because it runs nothing."""
    with pytest.raises(AssertionError, match="status 3"):
        reader.run(Block(line=1, language="sh", text="exit 3"))
    with pytest.raises(AssertionError, match="'2' is not in"):
        reader.run(Block(line=1, language="sh", text="echo 1", shown="2"))
    refusal = 'echo \'{"error": {"message": "no"}}\''
    with pytest.raises(AssertionError, match="the server refused"):
        reader.run(Block(line=1, language="sh", text=refusal))
    assert "no" in reader.run(Block(line=1, language="sh", text=refusal, may_fail=True))
