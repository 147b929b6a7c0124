"""Replicas for a cluster of Ray, as `serve run` and KubeRay start them.

    serve run gemserve_fleet.ray_app:build model=builtin replicas=2

Arguments are the options of `gemserve serve`, without dashes in front.
See docs/several-machines.md.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from gemserve.cli.options import (
    ENGINE_OPTIONS,
    MODEL_OPTIONS,
    SERVER_OPTIONS,
    Option,
    number,
    read_good_options,
    read_switch,
    read_value,
)
from gemserve.cli.startup_checks import Problems
from gemserve.config import EngineConfig, ModelConfig, ServerConfig
from gemserve_fleet.serve_command import problems_with_replicas

TABLES = (
    (MODEL_OPTIONS, ModelConfig),
    (ENGINE_OPTIONS, EngineConfig),
    (SERVER_OPTIONS, ServerConfig),
)
# Ray's proxies listen, on what the cluster's configuration says.
NOT_HERE = ("host", "port")
DRAIN_S = "300"  # a deadline: Ray cuts what still runs


def build(arguments: Mapping[str, Any]) -> Any:
    """The application. Raises one `ConfigError` for all that is wrong."""
    from gemserve_fleet.replicas.ingress_deployment import application
    from gemserve_fleet.replicas.replica import ReplicaSettings

    problems, configs = Problems(), []
    options = {option.flag.removeprefix("--"): option for table, _ in TABLES for option in table}
    texts: dict[str, str] = {}
    for given, value in arguments.items():
        name = given.replace("_", "-")
        text = _text_of(value, options.get(name))
        if text is None:
            problems.note(f"{name}={value}: must be one value, and not empty")
        else:
            texts[name] = text
    num_replicas = read_value("replicas", texts.pop("replicas", "1"), number(1))
    num_threads = read_value("threads", texts.pop("threads", "1"), number(1))
    drain_s = read_value("drain", texts.pop("drain", DRAIN_S), number(1, kind=float))
    for name in texts.keys() - options.keys() | texts.keys() & set(NOT_HERE):
        problems.note(f"{name}={texts[name]}: no such option here")
    environment = {
        "GEMSERVE_" + name.replace("-", "_").upper(): text for name, text in texts.items()
    }
    for table, kind in TABLES:
        config, wrong = read_good_options(argparse.Namespace(), table, kind, environment)
        problems.note(*wrong)
        configs.append(config)
    model, engine, server = configs
    problems.note(*problems_with_replicas(num_replicas, model, engine, server))
    problems.raise_any()
    settings = ReplicaSettings(num_threads=num_threads, model=model, engine=engine, server=server)
    has_gpu = model.device.startswith("cuda")
    return application(settings, num_replicas, has_gpu=has_gpu, drain_s=drain_s)


def _text_of(value: Any, option: Option | None) -> str | None:
    """The text of an option that a value of YAML stands for, or None.

    YAML takes `on`, `off`, `yes`, `no` and the like for true and false.
    """
    if isinstance(value, bool):
        is_switch = option is not None and option.read is read_switch
        return (("off", "on"), ("false", "true"))[is_switch][value]
    if isinstance(value, list) and option is not None and option.repeats:
        return ",".join(map(str, value))
    return None if value is None or isinstance(value, (list, Mapping)) else str(value)
