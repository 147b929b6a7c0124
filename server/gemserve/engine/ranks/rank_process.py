"""The process of a rank other than 0: it loads its part of the model, and runs what it is sent."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from transformers.utils import logging as transformers_logging

from gemserve.decoding.grammar import Grammars
from gemserve.engine.ranks.group import join_group
from gemserve.engine.ranks.lockstep import Follower
from gemserve.engine.ranks.pipe import receive, send
from gemserve.engine.ranks.summary import summary_of
from gemserve.engine.running.runner import Runner
from gemserve.model.adapter import NO_ADAPTER, Adapter
from gemserve.model.loading.loader import load, resolve_device


def main(pipe_file: int, lifeline: int) -> None:
    # rank 0 says when it is over; it may still have requests to finish
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_rank_0, args=(lifeline,), daemon=True).start()
    logging.disable(logging.WARNING)  # rank 0 says it
    pipe = Connection(pipe_file)
    status = 1
    try:
        _serve(pipe)
        status = 0
    except EOFError:
        status = 0  # rank 0 has ended
    except Exception:
        traceback.print_exc()
    sys.stderr.flush()
    os._exit(status)  # a group that has lost a rank cannot be left in order


def _end_with_rank_0(lifeline: int) -> None:
    """End this process when rank 0 has closed the pipe or has ended, whatever else is under way."""
    os.read(lifeline, 1)
    os._exit(0)


def _serve(pipe: Connection) -> None:
    transformers_logging.disable_progress_bar()  # rank 0 shows one
    config, store, rank, num_ranks = receive(pipe)
    join_group(Path(store), rank, num_ranks, resolve_device(config.device))
    loaded = load(config, rank=rank, num_ranks=num_ranks)
    name, num_units = receive(pipe)
    assert name == "start"
    runner = Runner(
        loaded.model,
        num_units,
        grammars=Grammars(
            loaded.tokenizer, vocab_size=loaded.model.vocab_size, end_ids=loaded.eos_ids
        ),
        end_ids=loaded.eos_ids,
        cuda_graphs="off",
        lockstep=Follower(pipe),
    )
    adapters: dict[int, Adapter] = {0: NO_ADAPTER}
    while True:
        message = receive(pipe)
        if message[0] == "run":
            send(pipe, summary_of(runner.run(*message[1:])))
        else:
            _note(runner, adapters, *message)


def _note(runner: Runner, adapters: dict[int, Adapter], name: str, *arguments: Any) -> None:
    """Carry out a message that has no answer."""
    if name == "begin":
        task, number = arguments
        runner.begin(task, adapters[number])
    elif name == "forget":
        runner.forget(*arguments)
    elif name == "change_memory":
        runner.change_memory(*arguments)
    elif name == "keep_adapter":
        number, adapter = arguments
        adapters[number] = adapter.moved(runner.memory.rows.device)
    else:
        assert name == "drop_adapter"
        (number,) = arguments
        del adapters[number]


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
