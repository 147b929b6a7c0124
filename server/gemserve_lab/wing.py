"""What the laboratory adds to gemserve: `gemserve eval` and `gemserve demo`."""

from __future__ import annotations

from gemserve.wings import CommandLine, Wing
from gemserve_lab.commands import demo, evaluate


class Laboratory(Wing):
    def add_commands(self, line: CommandLine) -> None:
        demo.add_command(line.commands)
        evaluate.add_command(line.commands)


LABORATORY = Laboratory()
