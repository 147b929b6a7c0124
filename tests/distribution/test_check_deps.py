"""`make check-deps`: a registry that does not tell must not look like one that knows of nothing."""

from __future__ import annotations

import json

from deploy.check_deps import Audit, read_report, requirements


def test_a_weakness_is_named_with_the_release_that_mends_it() -> None:
    vulns = [{"id": "PYSEC-1", "fix_versions": ["1.2", "2.0"]}, {"id": "X-2", "fix_versions": []}]
    report = {"dependencies": [{"name": "idna", "version": "1.0", "vulns": vulns}]}
    assert read_report(json.dumps(report), "").weaknesses == [
        "idna 1.0: PYSEC-1, fixed in 1.2, 2.0",
        "idna 1.0: X-2, fixed in no release yet",
    ]


def test_silence_is_no_good_news() -> None:
    """A mirror without PyPI's JSON interface answers 404 for every package."""
    packages = [
        {"name": "idna", "skip_reason": "Dependency not found on PyPI"},
        {"name": "tqdm", "version": "4.70.1", "vulns": []},
    ]
    found = read_report(json.dumps({"dependencies": packages}), "")
    assert found == Audit([], "PyPI told nothing of 1 of 2 packages")


def test_no_report_says_why() -> None:
    assert read_report("", "Traceback\nProxyError: no route\n") == Audit([], "ProxyError: no route")
    assert read_report("", "").gap == "pip-audit said nothing"


def test_torch_is_asked_about_too() -> None:
    lines = requirements("image").splitlines()
    assert lines[-1].startswith("torch==")
    assert not any("hash" in line or "\\" in line for line in lines)
