"""`gemserve serve`: load a model and answer HTTP."""

from __future__ import annotations

import argparse
from typing import Any

from gemserve.cli.options import (
    ENGINE_OPTIONS,
    MODEL_OPTIONS,
    SERVER_OPTIONS,
    add_options,
    read_options,
)
from gemserve.config import EngineConfig, ModelConfig, ServerConfig


def add_command(commands: Any) -> None:
    parser = commands.add_parser("serve", help="serve a model over OpenAI-style HTTP")
    add_options(parser, MODEL_OPTIONS, SERVER_OPTIONS, ENGINE_OPTIONS)
    parser.add_argument("--served-model-name", help="name clients use (default: --model)")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    import uvicorn

    from gemserve.api.app import create_app
    from gemserve.api.serving import build_serving
    from gemserve.engine.assemble import build_pipeline

    model = read_options(arguments, MODEL_OPTIONS, ModelConfig)
    engine = read_options(arguments, ENGINE_OPTIONS, EngineConfig)
    server = read_options(arguments, SERVER_OPTIONS, ServerConfig)
    pipeline = build_pipeline(model, engine)
    name = arguments.served_model_name or model.model
    app = create_app(build_serving(pipeline, model_name=name, config=server))
    uvicorn.run(
        app,
        host=server.host,
        port=server.port,
        log_level="info",
        timeout_keep_alive=30,
        timeout_graceful_shutdown=30,
        h11_max_incomplete_event_size=64 << 10,
    )
    return 0
