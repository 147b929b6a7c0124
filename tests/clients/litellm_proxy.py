"""Starts LiteLLM's proxy in front of models."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.clients.environments import offline_environment, script_of
from tests.fakes import wait_for

KEY = f"sk-{secrets.token_hex(32)}"  # the proxy does not start without one


@contextmanager
def proxy(folder: Path, models: dict[str, str], **settings: Any) -> Iterator[str]:
    """`litellm --config …`, with each model at its address."""
    script = script_of("litellm", "litellm")
    listed = [
        {
            "model_name": name,
            "litellm_params": {"model": "openai/builtin", "api_base": url, "api_key": "none"},
        }
        for name, url in models.items()
    ]
    config = {"model_list": listed, "litellm_settings": {"num_retries": 0, **settings}}
    (folder / "config.yaml").write_text(json.dumps(config), encoding="utf-8")  # JSON is YAML
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [script, "--config", "config.yaml", "--host", "127.0.0.1", "--port", str(port)]
    environment = {**offline_environment(folder), "LITELLM_MASTER_KEY": KEY}
    hook = {"GEMSERVE_URL": models["real"], "GEMSERVE_KEEP": "256", "GEMSERVE_LONG": "4000"}
    path = f"{Path(script).parent}:{os.environ['PATH']}"
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [*command, "--telemetry", "False"],
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env={**environment, "PATH": path, **hook},
        )
    address = f"http://127.0.0.1:{port}"
    try:
        wait_for(lambda: process.poll() is not None or is_ready(address), 200)
        assert process.poll() is None, (folder / "log").read_text()[-4000:]
        yield address
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def is_ready(address: str) -> bool:
    try:
        return httpx.get(f"{address}/health/liveliness").is_success
    except httpx.TransportError:
        return False
