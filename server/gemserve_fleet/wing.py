"""What fleets add to gemserve: `gemserve serve --replicas` and `gemserve plan --fleet`."""

from __future__ import annotations

from gemserve.wings import CommandLine, Wing
from gemserve_fleet import plan_fleet, serve_command


class Fleets(Wing):
    def add_commands(self, line: CommandLine) -> None:
        serve_command.extend(line.serve)
        plan_fleet.extend(line.plan)


FLEETS = Fleets()
