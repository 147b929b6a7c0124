"""A server of the built-in model, which is never started: it is asked what it has."""

from __future__ import annotations

from functools import cache

from fastapi import FastAPI

from gemserve.api.app import create_app
from gemserve.api.serving import Serving, build_serving
from gemserve.calibration.search.calibrated_core import build_calibrated_core
from gemserve.config import EngineConfig, ModelConfig, ServerConfig


@cache
def example_server() -> tuple[Serving, FastAPI]:
    """What it serves, and its application."""
    engine = EngineConfig(kv_memory_bytes=64 << 20, cpu_step="off")
    core = build_calibrated_core(ModelConfig(model="builtin"), engine)
    serving = build_serving(core, model_name="builtin", config=ServerConfig())
    return serving, create_app(serving)


def stop_example_server() -> None:
    """End its threads, if there is one."""
    if example_server.cache_info().currsize:
        example_server()[0].engine.stop()
        example_server.cache_clear()
