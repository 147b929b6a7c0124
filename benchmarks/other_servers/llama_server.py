"""llama.cpp's own HTTP server, started from Python, for `peers.py`.

It runs in the environment that `make peers` makes for it, not in gemserve's.

    .venv-peers/llama/bin/python benchmarks/other_servers/llama_server.py \
        MODEL.gguf PORT STREAMS CONTEXT THREADS
"""

import signal
import sys

import xllamacpp


def main() -> None:
    model, *numbers = sys.argv[1:]
    port, streams, context, threads = map(int, numbers)
    parameters = xllamacpp.CommonParams()
    parameters.model.path = model
    parameters.model_alias = {"smollm2"}
    parameters.port = port
    parameters.n_parallel, parameters.n_ctx = streams, streams * context
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = threads
    parameters.cache_prompt, parameters.use_jinja = False, True
    server = xllamacpp.Server(parameters)
    print(f"listening at {server.listening_address}", flush=True)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})


if __name__ == "__main__":
    main()
