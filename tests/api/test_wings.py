"""What other packages add to an application: opened with it, and closed whatever happens."""

from __future__ import annotations

import logging
from importlib.metadata import EntryPoint
from typing import Any

import pytest

from gemserve import wings as module
from gemserve.api import app as app_module
from gemserve.api.serving import Serving
from gemserve.wings import OpenedWing, Wing
from tests import fakes


@pytest.mark.anyio
async def test_a_wing_that_cannot_be_closed_leaves_none_open(
    monkeypatch: pytest.MonkeyPatch, core: fakes.FakeCore, tokenizer: Any
) -> None:
    closed: list[str] = []

    class Opened(OpenedWing):
        def __init__(self, name: str, fails: bool) -> None:
            self.name, self.fails = name, fails

        def close(self) -> None:
            closed.append(self.name)
            if self.fails:
                raise OSError("the disk is gone")

    class Plain(Wing):
        def __init__(self, name: str, fails: bool) -> None:
            self.name, self.fails = name, fails

        def open(self, serving: Serving) -> OpenedWing:
            return Opened(self.name, self.fails)

    both = (Plain("first", False), Plain("second", True))
    monkeypatch.setattr(app_module, "wings", lambda: both)
    serving = fakes.serving_over(core, tokenizer)
    app = app_module.create_app(serving)
    with pytest.raises(OSError, match="the disk is gone"):
        async with app.router.lifespan_context(app):
            pass
    assert closed == ["second", "first"]
    assert serving.engine.death is not None


def test_a_wing_without_its_package_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found = EntryPoint("gone", "gemserve_gone.wing:GONE", module.GROUP)
    monkeypatch.setattr(module, "entry_points", lambda group: [found])
    monkeypatch.setattr(logging.getLogger("gemserve"), "propagate", True)
    module.wings.cache_clear()
    try:
        assert module.wings() == ()
    finally:
        module.wings.cache_clear()
    assert "the package gemserve_gone is missing" in caplog.text
