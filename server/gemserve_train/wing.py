"""What training adds to gemserve: `gemserve adapter train`, `eval` and `convert`."""

from __future__ import annotations

from gemserve.wings import CommandLine, Wing
from gemserve_train.commands import adapter_convert, adapter_eval, adapter_train


class Training(Wing):
    def add_commands(self, line: CommandLine) -> None:
        for action in (adapter_train, adapter_eval, adapter_convert):
            action.add_command(line.adapter_actions)


TRAINING = Training()
