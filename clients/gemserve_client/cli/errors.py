"""The two errors that end a command early, with one line and an exit status."""

from __future__ import annotations


class Failed(Exception):
    """The server cannot be reached, refuses the request, or breaks down."""

    status = 1


class Misused(Failed):
    """The command's arguments are wrong."""

    status = 2
