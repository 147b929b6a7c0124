"""What libraries add to gemserve: endpoints, reranking among them, `filter.library`, commands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gemserve.wings import AppParts, CommandLine, OpenedWing, Wing
from gemserve_library import ask_command, command

if TYPE_CHECKING:
    from gemserve.api.routes.operation import Routes
    from gemserve.api.serving import Serving
    from gemserve_library.api.shelf import Shelf


class Libraries(Wing):
    def add_commands(self, line: CommandLine) -> None:
        command.add_command(line.commands)
        ask_command.extend(line.ask)

    def open(self, serving: Serving) -> OpenedWing:
        from gemserve_library.api.shelf import shelf_of

        return OpenedLibraries(serving, shelf_of(serving))


class OpenedLibraries(OpenedWing):
    """`shelf` None: the server has no libraries, and says so."""

    def __init__(self, serving: Serving, shelf: Shelf | None) -> None:
        self._serving, self._shelf = serving, shelf
        if shelf is not None:
            from gemserve_library.api.excerpt_finder import LibraryExcerpts

            has_cache = serving.engine_config().cache_memory > 0
            self.excerpts = LibraryExcerpts(shelf, has_cache=has_cache)

    def routes(self, parts: AppParts) -> Sequence[Routes]:
        from gemserve_library.api.routes import library_routes
        from gemserve_library.api.uploads import Uploads
        from gemserve_library.ranking.routes import ranking_routes

        shelf = self._shelf
        uploads = None if shelf is None else Uploads(shelf, self._serving.engine)
        return [
            ranking_routes(parts.submitter, self._serving.builder),
            library_routes(parts.submitter, shelf, uploads),
        ]

    def close(self) -> None:
        if self._shelf is not None:
            self._shelf.close()


LIBRARIES = Libraries()
