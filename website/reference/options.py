"""The page of options: every command, flag, environment variable and default."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from functools import cache

from gemserve.cli.main import make_parser
from gemserve.cli.options import variable_of
from gemserve_client.cli.main import make_parser as make_client_parser
from gemserve_client.load_test.options import make_parser as make_load_parser
from website.reference.markdown import NOTE, code, prose, table

OF_SERVER = "reference/options.md"
_SERVER = "gemserve serve"

INTRODUCTION = """\
# Options

Every option of every command, from the parsers of this release. A setting of `gemserve` that has an
environment variable may be given by either; the flag counts before the variable. In variables, an
option without a value is `true` or `false`, and commas separate the values of one that may be
repeated (line ends for `--also`). Sizes are written as `4GiB`, `512MiB` or `8GB`. [Running
gemserve](../serving.md) says which of them matter.
"""


def write_page() -> str:
    load = make_load_parser("gemserve-client load")
    parsers = [make_parser(), make_client_parser()]
    lines = [NOTE, "", INTRODUCTION]
    for parser in parsers:
        for name, help_text, command in commands_of(parser):
            lines += section(name, help_text, load if name == load.prog else command)
    return "\n".join(lines)


def commands_of(
    parser: argparse.ArgumentParser,
) -> Iterator[tuple[str, str, argparse.ArgumentParser]]:
    """Name, help and parser of each command that does something, subcommands included."""
    for action in parser._actions:
        if not isinstance(action, argparse._SubParsersAction):
            continue
        helps = {choice.dest: choice.help or "" for choice in action._choices_actions}
        for name, command in action.choices.items():
            inner = list(commands_of(command))
            yield from inner or [(f"{parser.prog} {name}", helps.get(name, ""), command)]


@cache
def server_flags() -> frozenset[str]:
    """The options of `gemserve serve`."""
    found = {name: command for name, _, command in commands_of(make_parser())}[_SERVER]
    actions = [action for action in found._actions if action.dest != "help"]
    return frozenset(flag for action in actions for flag in action.option_strings)


def anchor_of(flag: str) -> str:
    """Where the page has an option of `gemserve serve`."""
    return f"serve{flag}"


def section(name: str, help_text: str, parser: argparse.ArgumentParser) -> list[str]:
    options = []
    for action in parser._actions:
        if action.dest != "help":
            shown, *rest = row(parser, action)
            options.append((anchors(action) + shown if name == _SERVER else shown, *rest))
    lines = [f"## {name}", ""]
    said = parser.description or help_text
    if said:
        lines += [prose(sentence(said)), ""]
    if options:
        lines += [*table(("option", "meaning", "default", "variable"), options), ""]
    return lines


def anchors(action: argparse.Action) -> str:
    return "".join(f'<span id="{anchor_of(flag)}"></span>' for flag in action.option_strings)


def written_size(default: str, name: str) -> str:
    """A default; of a size in bytes as one would write it."""
    if (
        default.isdecimal()
        and int(default) >= 1 << 20
        and name.endswith(("memory", "disk", "bytes"))
    ):
        size = int(default)
        for unit, base in (("GiB", 1 << 30), ("MiB", 1 << 20)):
            if size % base == 0:
                return f"{size // base}{unit}"
    return default


def row(parser: argparse.ArgumentParser, action: argparse.Action) -> tuple[str, str, str, str]:
    """One option. Defaults and variables that its help ends with get columns of their own."""
    help_text = parser._get_formatter()._expand_help(action) if action.help else ""
    default = ""
    found = re.search(r"\(default: (.*?)\)$|^default: (.*)$", help_text)
    if found:
        help_text = help_text[: found.start()].strip()
        default = found.group(1) or found.group(2)
        default = default.partition("; GEMSERVE_")[0]
    name = variable_of(parser, action) if parser.prog.startswith("gemserve ") else None
    variable = code(name) if name else ""  # the client's flags have none
    flags = ", ".join(code(flag) for flag in action.option_strings)
    values = shown_values(action)
    shown = f"{flags} {code(values)}".strip() if values else flags
    default = written_size(default, action.dest)
    return shown, prose(help_text), code(default) if default else "", variable


def shown_values(action: argparse.Action) -> str:
    """What stands for the value, unless it would be the flag's name again."""
    if action.nargs == 0:
        return ""
    if action.choices:
        return "|".join(map(str, action.choices))
    given = action.metavar or action.dest
    name = " ".join(given) if isinstance(given, tuple) else given.upper()
    return "" if name in (flag_as_value(flag) for flag in action.option_strings) else name


def flag_as_value(flag: str) -> str:
    return flag.lstrip("-").replace("-", "_").upper()


def sentence(text: str) -> str:
    text = text.strip()
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")
