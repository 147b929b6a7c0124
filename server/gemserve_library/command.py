"""`gemserve library ACTION`: collections of files that `gemserve ask --library` answers from."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gemserve.cli.options import ENGINE_OPTIONS, MODEL_OPTIONS, add_options, read_options
from gemserve.config import EngineConfig, ModelConfig
from gemserve.errors import LibraryError
from gemserve_library.folders import add_place, existing_folder, folder_of, names_in

if TYPE_CHECKING:
    from gemserve.llm import LLM
    from gemserve_library.adding import Added
    from gemserve_library.finding import LeftOut
    from gemserve_library.library import Library

_CLEAR = "\r\x1b[K"
_SHOWN_SKIPPED = 20
_TIMED_TOKENS = 4096  # with fewer, the time is that of opening and storing
_TERMINAL_S, _ELSEWHERE_S = 0.5, 30.0  # between two lines of progress


def add_command(commands: Any) -> None:
    parser = commands.add_parser("library", help="add files to a library, or list and remove them")
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    add = actions.add_parser("add", help="add files, or what has changed of them")
    add.add_argument("name", metavar="NAME", help="the library; a new one is made")
    add.add_argument("paths", nargs="+", metavar="PATH", help="files, folders and patterns")
    add.add_argument(
        "--anew", action="store_true", help="forget what another model has read of the library"
    )
    add_options(add, MODEL_OPTIONS, ENGINE_OPTIONS)
    add.set_defaults(run=run_add)
    show = actions.add_parser("list", help="list libraries, or the files of one")
    show.add_argument("name", nargs="?", metavar="NAME")
    show.set_defaults(run=run_list)
    remove = actions.add_parser("remove", help="remove files, or a library")
    remove.add_argument("name", metavar="NAME")
    remove.add_argument("paths", nargs="*", metavar="PATH", help="files and folders; none: all")
    remove.set_defaults(run=run_remove)
    for action in (add, show, remove):
        add_place(action)


def run_add(arguments: argparse.Namespace) -> int:
    folder = folder_of(arguments.name, arguments.library_dir)
    from gemserve_library.finding import LeftOut, find_files

    left_out = LeftOut()
    files = list(find_files(arguments.paths, left_out))  # before a model is loaded
    for said in left_out.lines(_SHOWN_SKIPPED):
        print(f"left out: {said}", file=sys.stderr)
    if not files:
        raise LibraryError(f"{', '.join(arguments.paths)}: there are no files")
    from gemserve.llm import LLM

    model = read_options(arguments, MODEL_OPTIONS, ModelConfig)
    with LLM(model, read_options(arguments, ENGINE_OPTIONS, EngineConfig)) as llm:
        _add(llm, arguments, folder, files, left_out)
    return 0


def _add(
    llm: LLM, arguments: argparse.Namespace, folder: Path, files: list[Path], left_out: LeftOut
) -> None:
    """Read what is new in the files into the library in `folder`, and say what was done."""
    from gemserve_library.in_process import LibrariesOf
    from gemserve_library.library import DATABASE, remove_library
    from gemserve_library.reading_time import expect

    if arguments.anew and os.path.lexists(folder / DATABASE):
        remove_library(folder)
    libraries = LibrariesOf(llm)
    library = libraries.open(folder, is_new=not os.path.lexists(folder / DATABASE))
    expected = expect(files, library, llm.tokenizer)
    if expected.tokens or expected.others:
        print(expected.line(), file=sys.stderr)
    started_s = shown_s = time.monotonic()
    is_terminal = sys.stderr.isatty()
    done: Added | None = None
    try:
        for done in libraries.add_files(library, arguments.paths):
            now_s = time.monotonic()
            if now_s - shown_s >= (_TERMINAL_S if is_terminal else _ELSEWHERE_S):
                shown_s = now_s
                end = "" if is_terminal else "\n"
                start = _CLEAR if is_terminal else ""
                line = progress_of(done, now_s - started_s, expected.tokens)
                print(f"{start}{line}", end=end, file=sys.stderr)
                sys.stderr.flush()
    except (KeyboardInterrupt, LibraryError):
        print("what was stored stays; the same command goes on behind it", file=sys.stderr)
        raise
    assert done is not None
    gone = gone_files(library, arguments.paths, left_out, files)
    seconds = time.monotonic() - started_s
    with library.writing():
        if gone:
            library.remove_files(gone)
        if done.read_tokens >= _TIMED_TOKENS:
            library.note_speed(max(1, round(done.read_tokens / seconds)))
    if is_terminal:
        print(_CLEAR, end="", file=sys.stderr)
    for path, reason in done.skipped[:_SHOWN_SKIPPED]:
        print(f"left out: {path}: {reason}", file=sys.stderr)
    if len(done.skipped) > _SHOWN_SKIPPED:
        print(f"left out: {len(done.skipped) - _SHOWN_SKIPPED:,} more", file=sys.stderr)
    print(
        f"{done.files:,} files added or changed, {done.unchanged:,} unchanged, "
        f"{len(gone):,} gone, {len(done.skipped):,} left out; {done.read_tokens:,} tokens read in "
        f"{seconds:,.0f} s"
    )
    print(describe(library))


def gone_files(
    library: Library, paths: list[str], left_out: LeftOut, files: Iterable[Path]
) -> list[str]:
    """The files of a library that were in one of these folders, and are there no more.

    Also those that are left out now, unless they are among `files`, because they are named.
    """
    from gemserve_library.finding import absolute_path

    found = set(map(str, files))
    folders = [f"{absolute_path(path)}/" for path in paths if os.path.isdir(path)]
    return [
        file.path
        for file in library.files()
        if file.path.startswith(tuple(folders))
        and (_is_gone(file.path) or (file.path not in found and left_out.has(file.path)))
    ]


def _is_gone(path: str) -> bool:
    """False if nobody may look."""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        pass
    return False


def progress_of(done: Added, seconds: float, expected: int = 0) -> str:
    """`expected`: the tokens that there probably are to read, all in all."""
    from gemserve_library.reading_time import duration

    rate = done.read_tokens / max(seconds, 1e-9)
    known = f", {done.known_tokens:,} known" if done.known_tokens else ""
    read = f"{done.read_tokens:,} tokens read ({rate:,.0f} a second){known}"
    left = max(0, expected - done.read_tokens - done.known_tokens)
    time_left = f", {duration(left / rate)} left" if done.read_tokens and left else ""
    return f"{done.files:,} files, {read}{time_left}: {done.at}"


def describe(library: Library) -> str:
    """One line about a library."""
    files, segments, tokens = library.totals()
    size = library.num_bytes / (1 << 20)
    return (
        f"{library.folder.name}: {files:,} files, {tokens:,} tokens in {segments:,} windows, "
        f"{size:,.1f} MiB, for {library.identity.shown}"
    )


def run_list(arguments: argparse.Namespace) -> int:
    from gemserve_library.library import Library

    parent = arguments.library_dir
    if arguments.name is not None:
        library = Library(existing_folder(arguments.name, parent))
        print(describe(library))
        for file in library.files():
            print(f"{file.num_tokens:>10,}  {file.path}")
        return 0
    names = names_in(parent)
    if not names:
        print(f"there are no libraries in {parent}", file=sys.stderr)
    for name in names:
        try:
            print(describe(Library(parent / name)))
        except LibraryError as error:  # the others are listed all the same
            print(f"{name}: {error}", file=sys.stderr)
    return 0


def run_remove(arguments: argparse.Namespace) -> int:
    from gemserve_library.finding import absolute_path
    from gemserve_library.library import Library, remove_library

    folder = existing_folder(arguments.name, arguments.library_dir)
    if not arguments.paths:
        remove_library(folder)
        print(f"{arguments.name}: removed")
        return 0
    library = Library(folder)
    known = [file.path for file in library.files()]
    removed: dict[str, None] = {}
    for given in arguments.paths:
        path = str(absolute_path(given))
        within = [each for each in known if each in (given, path) or each.startswith(f"{path}/")]
        if not within:
            raise LibraryError(f"{given}: the library {arguments.name} has no such file")
        removed |= dict.fromkeys(within)
    with library.writing():
        library.remove_files(list(removed))
    print(f"{len(removed):,} files removed")
    print(describe(library))
    return 0
