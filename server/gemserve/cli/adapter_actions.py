"""`gemserve adapter ACTION`: work on adapters without a server. Wings add further actions."""

from __future__ import annotations

from typing import Any

from gemserve.cli import adapter_inspect


def add_command(commands: Any) -> Any:
    """Add the command. Returns what takes further actions."""
    parser = commands.add_parser("adapter", help="train, evaluate, convert or inspect adapters")
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    adapter_inspect.add_command(actions)
    return actions
