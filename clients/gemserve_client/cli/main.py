"""The `gemserve-client` command: the answer goes to stdout, everything else to stderr."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from gemserve_client.cli import adapters, ask, documents, models
from gemserve_client.cli.errors import Failed, Misused

PROGRAM = "gemserve-client"
INTERRUPTED = 130
PIPE_CLOSED = 141  # the status that a shell shows for a program that SIGPIPE has ended


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit status.

    It is 0, 1 if the server failed or refused, 2 for bad arguments, 130 after Ctrl-C, and 141 if
    the reader of the output has gone.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        _check_words(words)
        status = _run(words)
        sys.stdout.flush()
        return status
    except Failed as failed:
        print(f"{PROGRAM}: {failed}", file=sys.stderr)
        return failed.status
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # the reader has gone; without this Python would report an error when it flushes at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED


def _check_words(words: Sequence[str]) -> None:
    """Raise `Misused` if one is not UTF-8, as requests are."""
    for number, word in enumerate(words, start=1):
        try:
            word.encode()
        except UnicodeEncodeError as error:
            given = os.fsencode(word)[:100]
            raise Misused(
                f"argument {number}: {given!r} is not UTF-8; rename the file, or write the text in "
                "UTF-8"
            ) from error


def _run(words: list[str]) -> int:
    if words[:1] == ["load"]:  # the load test parses its own flags
        from gemserve_client.load_test.command import main as load

        return load(words[1:], program=f"{PROGRAM} load")
    parsed = make_parser().parse_args(words)
    parsed.run(parsed)
    return 0


def make_parser() -> argparse.ArgumentParser:
    """The parser of all commands but for the options of the load test, which reads its own."""
    parser = argparse.ArgumentParser(prog=PROGRAM, description="Talk to a running gemserve server.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in (ask, models, adapters, documents):
        command.add_command(commands)
    commands.add_parser("load", help="load test of any OpenAI-compatible server")
    return parser


if __name__ == "__main__":
    sys.exit(main())
