"""A server that begins an answer and never ends it. It prints its address; a test kills it."""

from __future__ import annotations

import threading
import time

from transformers import AutoTokenizer

from gemserve.model.loading.loader import BUILTIN_PATH
from tests.fakes import FILTERED, FakeCore, live_server, serving_over


def main() -> None:
    tokenizer = AutoTokenizer.from_pretrained(BUILTIN_PATH)
    core = FakeCore(FILTERED, "It hangs ", threading.Event())
    with live_server(serving_over(core, tokenizer)) as url:
        print(url, flush=True)
        time.sleep(600)


if __name__ == "__main__":
    main()
