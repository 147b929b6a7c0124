"""Each example of the clients' guide finds the fact, so the page cannot rot."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients import servers
from tests.guide import examples, run_example

FACT = "48213"
RUN = [
    (heading, language, number)
    for heading, language in (
        ("openai, Python", "python"),
        ("gemserve_client", "python"),
        ("gemserve-client", "sh"),
        ("curl", "sh"),
    )
    for number in range(len(examples(heading, language)))
]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with servers.builtin() as address:
        yield address


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the document that the page begins with."""
    path = tmp_path_factory.mktemp("reader")
    (document,) = examples("", "sh")
    run_example(document, "sh", url="", folder=path)
    return path


def test_the_page_has_examples_to_run() -> None:
    assert len(RUN) >= 8


@pytest.mark.parametrize(("heading", "language", "number"), RUN)
def test_an_example_finds_the_fact(
    heading: str, language: str, number: int, url: str, folder: Path
) -> None:
    code = examples(heading, language)[number]
    assert FACT in run_example(code, language, url=url, folder=folder)
