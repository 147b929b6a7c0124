"""`gemserve adapter ACTION`: work on adapters without a server. Each action is a file."""

from __future__ import annotations

from typing import Any

from gemserve.cli import adapter_convert, adapter_eval, adapter_inspect, adapter_train

ACTIONS = (adapter_train, adapter_eval, adapter_convert, adapter_inspect)


def add_command(commands: Any) -> None:
    parser = commands.add_parser("adapter", help="train, evaluate, convert or inspect adapters")
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    for action in ACTIONS:
        action.add_command(actions)
