"""deploy/: alerts and dashboard name metrics that the server has; a renamed one would be silent."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy import make_dashboard
from gemserve.cli.main import make_parser
from gemserve.http_server.draining_server import CLOSE_S, DRAIN_S, STEP_S
from gemserve_fleet.replicas.cluster import OBJECT_STORE_BYTES
from gemserve_fleet.replicas.ingress_metrics import IngressMetrics
from tests.distribution.test_docs import anchors
from tests.fakes import Api

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
COMPOSE_FILES = [DEPLOY / "compose.yaml", DEPLOY / "compose.replicas.yaml"]
OPERATIONS = ROOT / "docs/operations.md"
RULES: list[dict[str, Any]] = [
    rule
    for group in yaml.safe_load((DEPLOY / "alerts.yml").read_text("utf-8"))["groups"]
    for rule in group["rules"]
]
QUERIES = [
    target["expr"]
    for panel in make_dashboard.dashboard()["panels"]
    for target in panel.get("targets", [])
]


def metrics_in(expression: str) -> set[str]:
    return set(re.findall(r"\b((?:gemserve|process)_\w+)", expression))


@pytest.mark.anyio
@pytest.mark.parametrize("where", ["alerts", "dashboard"])
async def test_every_metric_exists(api: Api, where: str) -> None:
    text = (await api.client.get("/metrics")).text
    text += IngressMetrics(lambda: 1).text(()).decode()
    known = set(re.findall(r"^# TYPE (\w+)", text, re.MULTILINE))
    expressions = QUERIES if where == "dashboard" else [rule["expr"] for rule in RULES]
    named = {name for expression in expressions for name in metrics_in(expression)}
    assert len(named) > 10
    families = {name: re.sub(r"_(bucket|sum|count)$", "", name) for name in named}
    assert not {n for n, family in families.items() if n not in known and family not in known}


@pytest.mark.slow
def test_the_dashboard_is_what_the_table_says() -> None:
    """`python -m deploy.make_dashboard` writes it."""
    assert make_dashboard.TARGET.read_text("utf-8") == make_dashboard.text()


def test_every_alert_has_its_section_in_the_runbook() -> None:
    names = [rule["alert"] for rule in RULES]
    assert len(set(names)) == len(names) > 10
    for rule in RULES:
        page, _, anchor = rule["annotations"]["runbook"].partition("#")
        assert anchor == rule["alert"].lower()
        assert ROOT / page == OPERATIONS
        assert anchor in anchors(OPERATIONS), rule["alert"]
        assert rule["labels"]["severity"] in ("warning", "critical")


def test_what_compose_mounts_exists() -> None:
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text("utf-8"))["services"]
    sources = [v.split(":")[0] for s in services.values() for v in s["volumes"]]
    paths = [DEPLOY / source for source in sources if source.startswith("./")]
    assert len(paths) == 4
    assert all(path.exists() for path in paths)
    assert all(port.startswith("127.0.0.1:") for s in services.values() for port in s["ports"])


def test_containers_can_change_nothing_but_their_volumes() -> None:
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text("utf-8"))["services"]
    for service in services.values():
        assert service["read_only"] is True
        assert service["tmpfs"] == ["/tmp"]
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert service["pids_limit"] > 0
        assert "privileged" not in service
        assert "cap_add" not in service


def test_replicas_in_compose_change_only_what_they_must() -> None:
    """The rest is compose.yaml's: the second file comes after it."""
    one, several = (yaml.safe_load(path.read_text("utf-8"))["services"] for path in COMPOSE_FILES)
    assert list(several) == ["gemserve"]
    service = several["gemserve"]
    assert service.keys() == {"build", "command", "shm_size", "stop_grace_period"}
    assert service["build"] == {"args": {"RAY": 1}}
    assert service["command"] == [
        *one["gemserve"]["command"][:3],
        *("--replicas", "${REPLICAS:-2}"),
        *one["gemserve"]["command"][3:],
    ]
    assert int(service["shm_size"].removesuffix("gb")) << 30 > OBJECT_STORE_BYTES


@pytest.mark.parametrize("path", COMPOSE_FILES, ids=lambda path: path.name)
def test_what_compose_starts_has_options_of_the_command_line(path: Path) -> None:
    service = yaml.safe_load(path.read_text("utf-8"))["services"]["gemserve"]
    words = [re.sub(r"\$\{\w+:-(.*)\}", r"\1", word) for word in service["command"]]
    assert make_parser().parse_args(words).model == "builtin"
    arguments = re.findall(r"^ARG (\w+)", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert set(service["build"]["args"]) <= set(arguments)
    grace_s = int(service["stop_grace_period"].removesuffix("s"))
    assert grace_s >= DRAIN_S + STEP_S + CLOSE_S + 10
