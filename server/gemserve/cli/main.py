"""The `gemserve` command."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import gemserve
from gemserve.cli import adapter, ask, calibrate, evaluate, plan, serve
from gemserve.cli.options import apply_environment
from gemserve.errors import GemserveError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; errors meant for the user end as one line on stderr and status 2."""
    parser = argparse.ArgumentParser(prog="gemserve", description=gemserve.__doc__)
    parser.add_argument("--version", action="version", version=gemserve.__version__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in (serve, ask, plan, evaluate, calibrate, adapter):
        command.add_command(commands)
    for subparser in commands.choices.values():
        subparser.allow_abbrev = False
        apply_environment(subparser)
    parsed = parser.parse_args(arguments)
    try:
        return int(parsed.run(parsed))
    except GemserveError as error:
        print(f"gemserve: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
