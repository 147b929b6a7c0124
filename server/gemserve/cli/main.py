"""The `gemserve` command."""

from __future__ import annotations

import argparse
import logging
import os
import re
import sys
from collections.abc import Iterator, Sequence
from difflib import get_close_matches

import gemserve
from gemserve.cli import adapter_actions, ask, calibrate, plan, serve
from gemserve.cli.logs import ToStderr
from gemserve.cli.options import apply_environment, require_no_set_flags
from gemserve.ending_signals import EndedBySignal
from gemserve.errors import ConfigError, GemserveError, shown
from gemserve.wings import CommandLine, wings

# names of options that are followed by what others must not read in a log
_SECRET = re.compile("(?i)key|token|secret|password|auth|credential")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Errors for the user become one line on stderr and status 2."""
    words = sys.argv[1:] if arguments is None else arguments
    if (mistake := _find_mistake(words)) is not None:
        print(f"gemserve: {mistake}", file=sys.stderr)
        return 2
    parsed, unknown = make_parser().parse_known_args(words)
    if unknown:
        parsed.parser.exit(2, f"{_unknown_words(parsed.parser, unknown)}\n")
    _show_loading()
    try:
        apply_environment(parsed, words)
        return int(parsed.run(parsed))
    except ConfigError as error:
        _print_problems(error.problems)
        return 2
    except GemserveError as error:
        print(f"gemserve: {error}", file=sys.stderr)
        return 2
    except EndedBySignal as ended:
        return 128 + ended.number
    except KeyboardInterrupt:
        return 130


def _find_mistake(words: Sequence[str]) -> str | None:
    """What is wrong with the first argument that is not UTF-8, which no prompt can have."""
    for number, word in enumerate(words, start=1):
        try:
            word.encode()
        except UnicodeEncodeError:
            given = shown(os.fsencode(word))
            return (
                f"argument {number}: {given} is not UTF-8; rename the file, or write the text in "
                "UTF-8"
            )
    return None


def make_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = argparse.ArgumentParser(prog="gemserve", description=gemserve.__doc__)
    parser.add_argument("--version", action="version", version=gemserve.__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in (serve, ask, plan, calibrate):
        command.add_command(commands)
    actions = adapter_actions.add_command(commands)
    named = commands.choices
    line = CommandLine(
        commands=commands,
        adapter_actions=actions,
        serve=named["serve"],
        ask=named["ask"],
        plan=named["plan"],
    )
    for wing in wings():
        wing.add_commands(line)
    for command_parser in commands_of(parser):
        command_parser.allow_abbrev = False
        command_parser.set_defaults(parser=command_parser)
        require_no_set_flags(command_parser)
    return parser


def commands_of(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """The parsers of commands that do something: of `library ACTION`, not of `library`."""
    groups = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    for inner in (each for group in groups for each in group.choices.values()):
        yield from commands_of(inner)
    if not groups:
        yield parser


def _unknown_words(parser: argparse.ArgumentParser, unknown: Sequence[str]) -> str:
    """What argparse would say, with the options that may have been meant, and not all others."""
    known = [name for action in parser._actions for name in action.option_strings]
    meant: dict[str, None] = {}
    for given in (word.partition("=")[0] for word in unknown if word.startswith("--")):
        within = [name for name in known if given.removeprefix("--") in name.split("-")]
        meant |= dict.fromkeys(within or get_close_matches(given, known, 2))
    hint = f"; did you mean {', '.join(meant)}?" if meant else ""
    shown_words = " ".join(_without_secrets(unknown))
    return (
        f"{parser.prog}: error: unrecognized arguments: {shown_words}{hint}\n"
        f"{parser.prog} --help lists all options"
    )


def _without_secrets(words: Sequence[str]) -> Iterator[str]:
    """The words, and three dots for what is given to an option such as `--api-key`."""
    is_secret = False
    for word in words:
        if word.startswith("-"):
            name, equals, _ = word.partition("=")
            is_secret = _SECRET.search(name) is not None
            yield f"{name}=…" if is_secret and equals else word
        else:
            yield "…" if is_secret else word


def _print_problems(problems: Sequence[str]) -> None:
    if len(problems) > 1:
        print(f"gemserve: {len(problems)} settings are wrong:", file=sys.stderr)
    for problem in problems:
        print(f"gemserve: {problem}", file=sys.stderr)


def _show_loading() -> None:
    """Print the log messages about a model while it is loaded."""
    log = logging.getLogger("gemserve.loading")
    log.setLevel(logging.INFO)
    handler = ToStderr()
    handler.setFormatter(logging.Formatter("gemserve: %(message)s"))
    log.handlers[:] = [handler]
    log.propagate = False


if __name__ == "__main__":
    sys.exit(main())
