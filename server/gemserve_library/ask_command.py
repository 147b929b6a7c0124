"""`gemserve ask --library NAME`: answer questions from libraries, without a server."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from gemserve.cli import ask
from gemserve.cli.options import number
from gemserve.contract.filter_options import CANDIDATES, MOST_CANDIDATES
from gemserve_library.folders import add_place, existing_folder

if TYPE_CHECKING:
    from gemserve.llm import LLM
    from gemserve.prompting.prompt import Prompt


def extend(parser: argparse.ArgumentParser) -> None:
    """Add the options of libraries to `gemserve ask`."""
    parser.add_argument(
        "--library",
        dest="libraries",
        metavar="NAME",
        action="append",
        default=[],
        help="answer from a library; may be repeated",
    )
    parser.add_argument(
        "--candidates",
        type=number(1, MOST_CANDIDATES),
        default=CANDIDATES,
        help="windows of libraries that are found and read for a question (default: %(default)s)",
    )
    add_place(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if not arguments.libraries:
        return ask.run(arguments)
    folders = [existing_folder(name, arguments.library_dir) for name in arguments.libraries]
    return ask.run(arguments, lambda llm: _prompts(llm, folders, arguments.candidates))


def _prompts(llm: LLM, folders: list[Path], candidates: int) -> Callable[[str], Prompt]:
    """Makes the prompt of a question: with what the libraries have of it."""
    from gemserve_library.in_process import LibrariesOf

    libraries = LibrariesOf(llm)
    opened = [libraries.open(folder) for folder in folders]
    return lambda text: libraries.prompt(text, opened, candidates=candidates)
