"""deploy/kubernetes: what the manifests repeat from the Dockerfile, the server and the options.

`make test-deploy` also compares them with Kubernetes's own schemas.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import shlex
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from gemserve.cli import calibrate
from gemserve.cli.options import (
    ENGINE_OPTIONS,
    MODEL_OPTIONS,
    SERVER_OPTIONS,
    read_good_options,
    refuse_unknown_variables,
)
from gemserve.config import EngineConfig, ModelConfig, ServerConfig
from gemserve.errors import ConfigError
from gemserve.http_server.draining_server import CLOSE_S, DRAIN_S, STEP_S
from tests.distribution.test_deploy import DEPLOY, ROOT
from tests.distribution.test_dockerfile import _arguments, _named

FOLDER = DEPLOY / "kubernetes"
Object = dict[str, Any]


def objects(name: str) -> dict[str, Object]:
    """The objects of a file by their kind."""
    return {each["kind"]: each for each in yaml.safe_load_all((FOLDER / name).read_text("utf-8"))}


ENGINES, MODELS = objects("engines/engines.yaml"), objects("models/models.yaml")
RAY = objects("ray/ray-service.yaml")["RayService"]["spec"]
SERVE_CONFIG: Object = yaml.safe_load(RAY["serveConfigV2"])
(APPLICATION,) = SERVE_CONFIG["applications"]
HEAD = RAY["rayClusterConfig"]["headGroupSpec"]
(WORKERS,) = RAY["rayClusterConfig"]["workerGroupSpecs"]
PODS: dict[str, Object] = {
    "engine": ENGINES["Deployment"]["spec"]["template"]["spec"],
    "calibrate": MODELS["Job"]["spec"]["template"]["spec"],
    "head": HEAD["template"]["spec"],
    "worker": WORKERS["template"]["spec"],
}
RUNTIME = dict(pair.split("=", 1) for rest in _named("ENV") for pair in shlex.split(rest))
RAY_AGENT_PORT = 52365  # of Ray's agent on each node, by default


def container(pod: str) -> Object:
    (only,) = PODS[pod]["containers"]
    return only


def probes(pod: str) -> Iterator[tuple[str, str, int | str]]:
    """(probe, path, port)"""
    for name in ("startupProbe", "readinessProbe", "livenessProbe"):
        if name in container(pod):
            get = container(pod)[name]["httpGet"]
            yield name, get["path"], get["port"]


def longest_s(probe: Object) -> int:
    return int(probe["periodSeconds"] * probe["failureThreshold"])


@pytest.mark.parametrize("pod", PODS)
def test_a_pod_runs_as_the_image_s_user_and_can_change_nothing_but_its_volumes(pod: str) -> None:
    user, group = map(int, _named("USER")[-1].split(":"))
    context = PODS[pod]["securityContext"]
    assert context["runAsNonRoot"] is True
    assert (context["runAsUser"], context["runAsGroup"], context["fsGroup"]) == (user, group, group)
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container(pod)["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert PODS[pod]["automountServiceAccountToken"] is False


@pytest.mark.parametrize("pod", PODS)
def test_a_pod_can_write_where_the_image_writes(pod: str) -> None:
    mounts = {each["mountPath"]: each for each in container(pod)["volumeMounts"]}
    volumes = {each["name"]: each for each in PODS[pod]["volumes"]}
    assert {mount["name"] for mount in mounts.values()} == volumes.keys()
    for path in (*json.loads(_named("VOLUME")[-1]), "/tmp"):
        assert path in mounts
    for path in ("/cache", "/tmp"):
        assert "emptyDir" in volumes[mounts[path]["name"]]
        assert not mounts[path].get("readOnly")
    claim = volumes["models"]["persistentVolumeClaim"]
    assert claim["claimName"] == MODELS["PersistentVolumeClaim"]["metadata"]["name"]
    assert RUNTIME["XDG_CACHE_HOME"] == "/cache"
    # the job is the one that may write a calibration beside the model
    assert bool(mounts["/models"].get("readOnly")) is (pod != "calibrate")


@pytest.mark.parametrize("pod", PODS)
def test_kubernetes_sets_no_variables_for_services(pod: str) -> None:
    """It would set GEMSERVE_PORT=tcp://… for the Service `gemserve`, which is a setting here."""
    assert PODS[pod]["enableServiceLinks"] is False
    name = ENGINES["Service"]["metadata"]["name"].upper()
    with pytest.raises(ConfigError, match=f"{name}_SERVICE_HOST"):
        refuse_unknown_variables({f"{name}_SERVICE_HOST": "10.0.0.1"})


def test_the_options_are_settings_of_the_server() -> None:
    environment = ENGINES["ConfigMap"]["data"]
    assert all(isinstance(value, str) for value in environment.values())
    refuse_unknown_variables(environment)
    for table, kind in (
        (MODEL_OPTIONS, ModelConfig),
        (ENGINE_OPTIONS, EngineConfig),
        (SERVER_OPTIONS, ServerConfig),
    ):
        _, wrong = read_good_options(argparse.Namespace(), table, kind, environment)
        assert not wrong
    (source,) = container("engine")["envFrom"]
    assert source["configMapRef"]["name"] == ENGINES["ConfigMap"]["metadata"]["name"]
    assert json.loads(_named("ENTRYPOINT")[-1]) == ["gemserve"]
    assert container("engine")["args"] == ["serve"]
    parser = argparse.ArgumentParser()
    calibrate.add_command(parser.add_subparsers())
    parsed = parser.parse_args(container("calibrate")["args"])
    assert (parsed.model, parsed.device) == (environment["GEMSERVE_MODEL"], "cuda")


@pytest.mark.parametrize("pod", ["engine", "head", "worker"])
def test_the_key_file_is_where_the_secret_is(pod: str) -> None:
    mounts = {each["name"]: each["mountPath"] for each in container(pod)["volumeMounts"]}
    for path in (
        ENGINES["ConfigMap"]["data"]["GEMSERVE_API_KEY_FILE"],
        ray_argument("api-key-file"),
    ):
        assert os.path.dirname(path) == mounts["keys"]
        created = f"create secret generic gemserve-keys --from-file={os.path.basename(path)}"
        for name in ("engines", "ray"):
            assert created in (FOLDER / name / "kustomization.yaml").read_text("utf-8")


def ray_argument(name: str) -> Any:
    return APPLICATION["args"][name]


def test_an_engine_s_probes_ask_routes_at_the_port_served() -> None:
    port = int(RUNTIME["GEMSERVE_PORT"])
    (named,) = container("engine")["ports"]
    assert named == {"name": "http", "containerPort": port}
    (served,) = ENGINES["Service"]["spec"]["ports"]
    assert (served["port"], served["targetPort"]) == (port, "http")
    routes = (ROOT / "server/gemserve/api/routes/health.py").read_text()
    found = list(probes("engine"))
    assert [(name, path) for name, path, _ in found] == [
        ("startupProbe", "/health"),
        ("readinessProbe", "/ready"),
        ("livenessProbe", "/health"),
    ]
    for _, path, where in found:
        assert f'@routes.add("GET", "{path}"' in routes
        assert where == "http"
    notes = ENGINES["Deployment"]["spec"]["template"]["metadata"]["annotations"]
    assert notes["prometheus.io/port"] == str(port)


def test_an_engine_has_the_time_to_load_that_the_image_gives() -> None:
    (check,) = _named("HEALTHCHECK")
    minutes = re.search(r"--start-period=(\d+)m", check)
    assert minutes is not None
    startup_s = longest_s(container("engine")["startupProbe"])
    assert startup_s == int(minutes[1]) * 60
    assert ENGINES["Deployment"]["spec"]["progressDeadlineSeconds"] > startup_s


def test_an_engine_has_the_time_to_drain() -> None:
    pause_s = container("engine")["lifecycle"]["preStop"]["sleep"]["seconds"]
    most_s = pause_s + DRAIN_S + STEP_S + CLOSE_S
    assert PODS["engine"]["terminationGracePeriodSeconds"] >= most_s + 10


def test_selectors_find_the_engines() -> None:
    deployment = ENGINES["Deployment"]["spec"]
    labels = deployment["template"]["metadata"]["labels"]
    assert deployment["selector"]["matchLabels"] == labels
    assert ENGINES["Service"]["spec"]["selector"] == labels
    assert ENGINES["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == labels


def kustomization(folder: str) -> Object:
    content: Object = yaml.safe_load((FOLDER / folder / "kustomization.yaml").read_text("utf-8"))
    return content


def test_images_have_the_newest_release() -> None:
    """A manifest that names an older image would bring back what a release has mended."""
    newest = re.search(r"^## (\d\S*)", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    assert newest is not None
    tags = {
        (folder, image["name"]): image["newTag"]
        for folder in ("engines", "cpu", "ray")
        for image in kustomization(folder)["images"]
    }
    assert tags == {
        ("engines", "gemserve"): newest[1],
        ("cpu", "(.*/)?gemserve"): f"{newest[1]}-cpu",
        ("ray", "gemserve"): newest[1],
        ("ray", "gemserve-ray"): newest[1],
    }
    assert {container(pod)["image"] for pod in PODS} == {"gemserve", "gemserve-ray"}


@pytest.mark.parametrize("name", ["gemserve", "registry.example:5000/team/gemserve"])
def test_the_cpu_form_finds_the_image_by_whatever_name_the_engines_have(name: str) -> None:
    """With a registry in front it deployed the image for GPUs."""
    (image,) = kustomization("cpu")["images"]
    assert re.fullmatch(f"{image['name']}(:.*)?", f"{name}:0.1.0")
    assert "newName" not in image


def test_every_file_is_a_resource_of_its_folder() -> None:
    namespace = objects("models/namespace.yaml")["Namespace"]["metadata"]["name"]
    for folder in (path for path in FOLDER.iterdir() if path.is_dir()):
        content = kustomization(folder.name)
        named = {"kustomization.yaml", *content["resources"], *content.get("configurations", ())}
        assert {path.name for path in folder.iterdir()} <= named, folder.name
        assert all((folder / name).exists() for name in named)
        assert content["namespace"] == namespace


def test_the_network_policy_lets_requests_in_and_nothing_out() -> None:
    policy = objects("engines/network-policy.yaml")["NetworkPolicy"]["spec"]
    (chosen,) = policy["podSelector"]["matchExpressions"]
    assert chosen["values"] == [
        ENGINES["Deployment"]["metadata"]["labels"]["app"],
        MODELS["Job"]["spec"]["template"]["metadata"]["labels"]["app"],
    ]
    assert policy["ingress"] == [{"ports": [{"protocol": "TCP", "port": 8000}]}]
    assert policy["egress"] == []
    assert int(RUNTIME["GEMSERVE_PORT"]) == 8000


@pytest.mark.parametrize("pod", ["head", "worker"])
def test_ray_pods_are_probed_where_ray_listens(pod: str) -> None:
    port = SERVE_CONFIG["http_options"]["port"]
    assert SERVE_CONFIG["http_options"]["host"] == "0.0.0.0"
    ports = {each["name"]: each["containerPort"] for each in container(pod)["ports"]}
    assert ports["serve"] == port
    readiness = ("/-/healthz", port) if pod == "worker" else ("/api/healthz", RAY_AGENT_PORT)
    assert list(probes(pod)) == [
        ("readinessProbe", *readiness),
        ("livenessProbe", "/api/healthz", RAY_AGENT_PORT),
    ]


@pytest.mark.parametrize("pod", ["head", "worker"])
def test_ray_s_environment(pod: str) -> None:
    environment = {each["name"]: each["value"] for each in container(pod)["env"]}
    assert environment["RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS"] == "1"
    assert environment["RAY_USAGE_STATS_ENABLED"] == "0"
    assert "RAY=1" in (FOLDER / "ray/ray-service.yaml").read_text("utf-8")
    assert _arguments()["RAY"] == "0"


def test_ray_s_release_is_the_one_that_the_image_has() -> None:
    locked = re.search(r"^ray==(\S+)", (DEPLOY / "ray.lock").read_text("utf-8"), re.MULTILINE)
    assert locked is not None
    assert RAY["rayClusterConfig"]["rayVersion"] == locked[1]


def test_each_replica_has_a_worker() -> None:
    assert WORKERS["replicas"] == ray_argument("replicas")
    limits = container("worker")["resources"]["limits"]
    assert (limits["nvidia.com/gpu"], ray_argument("device")) == (1, "cuda")
    assert limits["cpu"] == str(ray_argument("threads"))
    assert HEAD["rayStartParams"]["num-cpus"] == "0"


def test_ray_accepts_the_configuration_and_ray_app_its_arguments() -> None:
    schema = pytest.importorskip("ray.serve.schema", reason="needs the packages of gemserve[ray]")
    parsed = schema.ServeDeploySchema.model_validate(SERVE_CONFIG)
    (application,) = parsed.applications
    module, _, name = application.import_path.partition(":")
    built = getattr(importlib.import_module(module), name)(application.args)
    replicas = built._bound_deployment.init_args[1]._bound_deployment
    assert replicas.num_replicas == ray_argument("replicas")
    assert replicas.ray_actor_options["num_gpus"] == 1
    drain_s = replicas._deployment_config.graceful_shutdown_timeout_s
    assert RAY["rayClusterDeletionDelaySeconds"] >= drain_s  # of an old cluster
    (settings,) = replicas.init_args
    assert settings.engine.kv_memory_bytes == 40 << 30
    with pytest.raises(ConfigError, match="nonsense"):
        getattr(importlib.import_module(module), name)({**application.args, "nonsense": 1})
