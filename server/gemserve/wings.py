"""What other packages add to the server and to the commands, and where they say so.

A *wing* is a package with an object of a subclass of `Wing`, which the package's metadata names
under the group `gemserve.wings`:

    [project.entry-points."gemserve.wings"]
    library = "gemserve_library.wing:LIBRARY"

The core never imports a wing, and a wing never imports another one. A wing may import all of the
core. Its module is imported by every command, so what takes long is imported where it is used.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gemserve.api.error_forms import ErrorForm
    from gemserve.api.requests.model_names import ModelNames
    from gemserve.api.routes.operation import Routes
    from gemserve.api.routes.submission import ExcerptFinder, Submitter
    from gemserve.api.serving import Serving

GROUP = "gemserve.wings"
log = logging.getLogger("gemserve")


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandLine:
    """The parsers that a wing may add to.

    `commands` and `adapter_actions` take further commands with `add_parser`. The parsers of the
    core's commands take further options; a wing that does more for them replaces their default
    `run`.
    """

    commands: Any
    adapter_actions: Any
    serve: argparse.ArgumentParser
    ask: argparse.ArgumentParser
    plan: argparse.ArgumentParser


@dataclass(frozen=True, slots=True, kw_only=True)
class AppParts:
    """What the routes of a wing are made of."""

    serving: Serving
    submitter: Submitter
    models: ModelNames


class OpenedWing:
    """What a wing adds to one application. The application closes it when it ends.

    `excerpts`: what finds text for `filter.library`. At most one wing has it.
    """

    excerpts: ExcerptFinder | None = None

    def routes(self, parts: AppParts) -> Sequence[Routes]:
        """Further endpoints."""
        return ()

    def close(self) -> None:
        """Called in a thread, after the engine has stopped."""


class Wing:
    """Adds nothing. A subclass overrides what it adds."""

    def add_commands(self, line: CommandLine) -> None:
        """Add commands and options."""

    def error_forms(self) -> Sequence[type[ErrorForm]]:
        """Middleware that gives errors below a path the form of another protocol."""
        return ()

    def last_words(
        self, path: str, *, message: str, code: str, request_id: str, last_body: bytes
    ) -> bytes | None:
        """The last event of a stream that another process cannot end; None: not a path of ours.

        `last_body`: what the stream has sent before.
        """
        return None

    def open(self, serving: Serving) -> OpenedWing:
        """What this wing adds to an application. Raises `ConfigError`."""
        return OpenedWing()


@cache
def wings() -> tuple[Wing, ...]:
    """The wings that are installed, by name. What misses its package is logged, and left out."""
    found: list[Wing] = []
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        package = entry.module.partition(".")[0]
        if find_spec(package) is None:
            log.warning("the package %s is missing: what it adds is left out", package)
        else:
            found.append(entry.load())
    return tuple(found)
