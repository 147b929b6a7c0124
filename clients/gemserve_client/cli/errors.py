"""How a command ends early: with one line, and a status."""

from __future__ import annotations


class Failed(Exception):
    """The server is not there, refused, or broke down."""

    status = 1


class Misused(Failed):
    """The command cannot be done as it was given."""

    status = 2
