"""`gemserve-client documents`: store documents, list and show them, delete them."""

from __future__ import annotations

import argparse
import sys
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gemserve_client.cli.connection import add_server_options, connected
from gemserve_client.cli.errors import Failed, Misused
from gemserve_client.cli.spinner import waiting
from gemserve_client.cli.text_files import read_text

if TYPE_CHECKING:
    from gemserve_client.replies import Document


def add_command(commands: Any) -> None:
    parser = commands.add_parser("documents", help="store documents, list, show or delete them")
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    adding = actions.add_parser("add", help="store files; prints one id a line", allow_abbrev=False)
    adding.add_argument("files", nargs="+", metavar="FILE", help="text files; - is standard input")
    adding.add_argument("--name", help="default: the file's name")
    adding.add_argument("--ttl", type=int, metavar="SECONDS", help="default: the server's")
    adding.add_argument("--pin", action="store_true", help="keep it in the server's cache")
    adding.add_argument("--system", help="the system message of the questions to come")
    adding.add_argument("--adapter", metavar="NAME", help="the adapter of the questions to come")
    adding.add_argument("--wait", action="store_true", help="until the server has read it")
    adding.set_defaults(run=add)
    listing = actions.add_parser("list", help="one document a line", allow_abbrev=False)
    listing.set_defaults(run=list_all)
    showing = actions.add_parser("show", help="what the server says about one", allow_abbrev=False)
    showing.add_argument("id", metavar="ID")
    showing.set_defaults(run=show)
    deleting = actions.add_parser("delete", help="delete documents", allow_abbrev=False)
    deleting.add_argument("ids", nargs="+", metavar="ID")
    deleting.set_defaults(run=delete)
    for action in (adding, listing, showing, deleting):
        add_server_options(action)


def add(arguments: argparse.Namespace) -> None:
    if arguments.name is not None and len(arguments.files) > 1:
        raise Misused("--name: only with one FILE")
    texts = [(name, read_text(name)) for name in arguments.files]
    for name, text in texts:
        if not text.strip():
            raise Misused(f"{name}: must not be empty")
    with connected(arguments) as client:
        for file_name, text in texts:
            with waiting("reading" if arguments.wait else "sending"):
                document = client.documents.create(
                    text,
                    name=arguments.name or (None if file_name == "-" else Path(file_name).name),
                    ttl=arguments.ttl,
                    pin=arguments.pin,
                    system=arguments.system,
                    adapter=arguments.adapter,
                    wait=arguments.wait,
                )
            print(document.id, flush=True)
            print(_summary(document), file=sys.stderr)
            if document.status == "failed":
                raise Failed(f"{document.id}: {document.error}")


def list_all(arguments: argparse.Namespace) -> None:
    with connected(arguments) as client:
        for document in client.documents.list():
            print(document.id, _summary(document), sep="\t")


def show(arguments: argparse.Namespace) -> None:
    with connected(arguments) as client:
        print(client.documents.retrieve(arguments.id).to_json())


def delete(arguments: argparse.Namespace) -> None:
    with connected(arguments) as client:
        for document_id in arguments.ids:
            client.documents.delete(document_id)


def _summary(document: Document) -> str:
    expires = datetime.fromtimestamp(document.expires_at).isoformat(" ", "minutes")
    pinned = ", pinned" if document.pinned else ""
    # on a server without keys anybody may have chosen the name: it must not steer the terminal
    name = "".join(c if c.isprintable() else "?" for c in document.name or "(no name)")
    return (
        f"{name}: {document.tokens:,} tokens, {document.status}, "
        f"{document.cached_tokens:,} cached{pinned}, until {expires}"
    )
