"""`gemserve-client adapters list | load NAME PATH | unload NAME`."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from gemserve_client.cli.connection import add_server_options, connected


def add_command(commands: Any) -> None:
    parser = commands.add_parser("adapters", help="list, load or unload the server's adapters")
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    listing = actions.add_parser("list", help="one name a line", allow_abbrev=False)
    listing.set_defaults(run=list_all)
    loading = actions.add_parser("load", help="put one on the model", allow_abbrev=False)
    loading.add_argument("name", metavar="NAME")
    loading.add_argument("path", metavar="PATH", help="relative to the server's adapter folder")
    loading.set_defaults(run=load)
    unloading = actions.add_parser("unload", help="take one off", allow_abbrev=False)
    unloading.add_argument("name", metavar="NAME")
    unloading.set_defaults(run=unload)
    for action in (listing, loading, unloading):
        add_server_options(action)


def list_all(arguments: argparse.Namespace) -> None:
    with connected(arguments) as client:
        for adapter in client.adapters.list():
            print(adapter.name)


def load(arguments: argparse.Namespace) -> None:
    with connected(arguments) as client:
        adapter = client.adapters.load(name=arguments.name, path=arguments.path)
    print(
        f"{adapter.name} is loaded: {adapter.type}, version {adapter.version}, "
        f"{adapter.bytes:,} bytes",
        file=sys.stderr,
    )


def unload(arguments: argparse.Namespace) -> None:
    with connected(arguments) as client:
        client.adapters.unload(arguments.name)
