"""What a server is and does, under the names of other servers: vLLM's `/load` and `/server_info`,
and llama.cpp's `/props`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import gemserve
from gemserve.api.replies.reply_types import Load, Props, ServerInfo
from gemserve.api.requests.request_builder import RequestBuilder
from gemserve.api.routes.operation import Operation, Routes
from gemserve.config import EngineConfig, ServerConfig
from gemserve.engine.worker import Engine
from gemserve_kernels import Backend

# Places in files and networks, which are nobody's business, and what is no setting.
LEFT_OUT = frozenset(
    (
        *("host", "port", "allowed_hosts", "cors_origins", "api_key_file", "admin_key_file"),
        *("adapter_dir", "adapters", "cache_dir", "calibrate", "served_model_name", "library_dir"),
        *("host_memory", "reader", "reader_device"),
    )
)
LOAD = Operation(summary="How many choices wait or run?", reply=Load)
INFO = Operation(summary="How is the server configured?", reply=ServerInfo)
PROPS = Operation(summary="Describe the model and its limits, in llama.cpp's form", reply=Props)


def server_state_routes(
    engine: Engine,
    builder: RequestBuilder,
    backend: Backend,
    *,
    model_name: str,
    engine_config: Callable[[], EngineConfig],
    config: ServerConfig,
) -> Routes:
    routes = Routes()

    @routes.add("GET", "/load", LOAD)
    async def get_load() -> Load:
        return {"server_load": engine.num_running + engine.num_waiting}

    @routes.add("GET", "/server_info", INFO)
    async def get_server_info() -> ServerInfo:
        return {
            "version": gemserve.__version__,
            "model": model_name,
            "attention_backend": backend.name,
            "kernels": backend.kernels,
            "max_model_len": builder.context_tokens,
            "needs_key": config.api_key_file is not None,
            "has_libraries": config.library_dir is not None,
            "is_calibrating": engine.has_idle_work,
            "engine": _settings(engine_config()),
            "server": _settings(config),
        }

    @routes.add("GET", "/props", PROPS)
    def get_props() -> Props:  # not async: a template may be long
        tokenizer = builder.tokenizer
        return {
            "default_generation_settings": {"n_ctx": builder.context_tokens},
            "total_slots": engine_config().max_running,
            "model_path": model_name,
            "model_alias": model_name,
            "chat_template": tokenizer.chat_template,
            "bos_token": tokenizer.bos_token,
            "eos_token": tokenizer.eos_token,
            "modalities": {"vision": False, "audio": False},
            "build_info": f"gemserve {gemserve.__version__}",
        }

    return routes


def _settings(config: EngineConfig | ServerConfig) -> dict[str, Any]:
    named = {field.name: getattr(config, field.name) for field in fields(config)}
    return {name: value for name, value in named.items() if name not in LEFT_OUT}
