"""The application of `gemserve_fleet.ray_app`: its arguments. The rest is as with `serve`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from gemserve.errors import ConfigError

pytest.importorskip("ray", reason="needs the packages of gemserve[ray]")

from ray.serve.schema import ServeApplicationSchema, ServeDeploySchema

from gemserve_fleet.ray_app import build

DOCS = Path(__file__).parents[2] / "docs"


def test_arguments_are_the_options_of_serve() -> None:
    built = build({"model": "builtin", "replicas": 3, "kv_memory": "64MiB", "max-queue": 7})
    ingress = built._bound_deployment
    server, replicas = ingress.init_args
    assert (ingress.name, ingress.num_replicas) == ("ingress", 1)
    assert (replicas._bound_deployment.name, replicas._bound_deployment.num_replicas) == (
        "replica",
        3,
    )
    assert ingress._deployment_config.user_config == {"num_replicas": 3}
    assert list(ingress.ray_actor_options["resources"]) == ["node:__internal_head__"]
    (settings,) = replicas._bound_deployment.init_args
    assert settings.server == server
    assert (settings.engine.kv_memory_bytes, settings.engine.max_queue) == (64 << 20, 7)


def test_the_number_of_replicas_is_no_argument_of_the_ingress() -> None:
    """Else another number would replace it, with the documents that it knows."""
    two, three = (build({"replicas": number})._bound_deployment for number in (2, 3))
    assert two.init_args[0] == three.init_args[0]
    assert len(two.init_args) == 2
    assert two.ray_actor_options == three.ray_actor_options


def test_all_that_is_wrong_is_told_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        build({"port": 8000, "nonsense": 1, "max-queue": "many"})
    assert "port=8000: no such option here" in caught.value.problems
    assert "nonsense=1: no such option here" in caught.value.problems
    assert any("MAX_QUEUE=many" in problem for problem in caught.value.problems)
    with pytest.raises(ConfigError, match="replicas=0"):
        build({"replicas": 0})


@pytest.mark.parametrize(
    ("text", "kind", "field", "value"),
    [
        ("cuda-graphs: on", "engine", "cuda_graphs", "on"),
        ("prompt_lookup: off", "engine", "prompt_lookup", "off"),
        ("trust-remote-code: true", "model", "trust_remote_code", True),
        ("trust-remote-code: off", "model", "trust_remote_code", False),
        ("max-wait: 2.5", "server", "max_wait_s", 2.5),
        (
            "allowed-host: [a.example, b.example]",
            "server",
            "allowed_hosts",
            ("a.example", "b.example"),
        ),
        (
            "allowed-host: a.example,b.example",
            "server",
            "allowed_hosts",
            ("a.example", "b.example"),
        ),
    ],
)
def test_values_of_yaml_mean_what_they_say(text: str, kind: str, field: str, value: Any) -> None:
    """`off` is false in YAML, which became the text "False"."""
    ingress = build({"model": "builtin", **yaml.safe_load(text)})._bound_deployment
    (settings,) = ingress.init_args[1]._bound_deployment.init_args
    assert getattr(getattr(settings, kind), field) == value


@pytest.mark.parametrize(
    "text", ["model:", "library-dir: ~", "replicas:", "model: [a, b]", "adapter: {a: b}"]
)
def test_what_is_no_value_is_refused_by_name(text: str) -> None:
    """A folder was called None."""
    name = text.partition(":")[0]
    with pytest.raises(ConfigError, match=f"{name}=.*: must be one value, and not empty"):
        build(yaml.safe_load(text))


@pytest.mark.parametrize(("arguments", "drain_s"), [({}, 300), ({"drain": 1200}, 1200)])
def test_running_requests_have_time_when_replicas_are_changed(
    arguments: dict[str, Any], drain_s: float
) -> None:
    """They were cut after 10 s, at which Ray ends a replica whether or not it has requests."""
    ingress = build(arguments)._bound_deployment
    replica = ingress.init_args[1]._bound_deployment
    assert replica._deployment_config.graceful_shutdown_timeout_s == drain_s
    assert ingress._deployment_config.graceful_shutdown_timeout_s > drain_s


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("cache-dir", "/x"),
        ("library-dir", "/x"),
        ("calibrate", "later"),
        ("device", "cuda:1"),
        ("reader-device", "cuda:1"),
        ("tensor-parallel", "2"),
    ],
)
def test_what_replicas_refuse_is_refused_here_too(name: str, text: str) -> None:
    """The fleet was deployed, and did something else, or failed on one box only."""
    with pytest.raises(ConfigError, match=f"{name.replace('-', '_')}={text}: "):
        build({name: text})


def examples(page: str) -> list[Any]:
    """The YAML of a page."""
    text = (DOCS / page).read_text("utf-8")
    return [yaml.safe_load(each) for each in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)]


def test_the_configuration_of_the_page_is_accepted() -> None:
    (config,) = (each for each in examples("several-machines.md") if "applications" in each)
    (application,) = ServeDeploySchema.model_validate(config).applications
    assert application.import_path == "gemserve_fleet.ray_app:build"
    assert build(application.args)._bound_deployment.name == "ingress"


def test_the_number_of_replicas_of_the_page_changes_deployments_that_are_there() -> None:
    (config,) = (each for each in examples("several-machines.md") if "deployments" in each)
    application = ServeApplicationSchema.model_validate({"import_path": "x:y", **config})
    replica, ingress = application.deployments
    assert (replica.name, ingress.name) == ("replica", "ingress")
    assert ingress.user_config == {"num_replicas": replica.num_replicas}
    default = build({})._bound_deployment._deployment_config.user_config
    assert default.keys() == ingress.user_config.keys()
