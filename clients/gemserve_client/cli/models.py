"""`gemserve-client models`: print the names of the server's models, one a line."""

from __future__ import annotations

import argparse
from typing import Any

from gemserve_client.cli.connection import add_server_options, connected


def add_command(commands: Any) -> None:
    parser = commands.add_parser("models", help="list the server's models", allow_abbrev=False)
    add_server_options(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    with connected(arguments) as client:
        for model in client.models.list():
            print(model.id)
