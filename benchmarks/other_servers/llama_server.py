"""llama.cpp's own HTTP server, started from Python, for `peers.py`.

It runs in the environment that `make peers` makes for it, not in gemserve's.

    .venv-peers/llama/bin/python benchmarks/other_servers/llama_server.py \
        MODEL.gguf NAME PORT STREAMS CONTEXT THREADS
"""

import signal
import sys

import xllamacpp


def main() -> None:
    model, name, *numbers = sys.argv[1:]
    port, streams, context, threads = map(int, numbers)
    parameters = xllamacpp.CommonParams()
    parameters.model.path = model
    parameters.model_alias = {name}
    parameters.port = port
    parameters.n_parallel, parameters.n_ctx = streams, streams * context
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = threads
    parameters.cache_prompt, parameters.use_jinja = False, True
    parameters.cache_ram_mib = 0
    server = xllamacpp.Server(parameters)
    print(f"listening at {server.listening_address}", flush=True)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})


if __name__ == "__main__":
    main()
