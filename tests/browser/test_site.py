"""The built site on a phone and a desk, light and dark: axe-core's rules, widths, the keyboard.

It is skipped until `make docs` has built the site.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.browser.page import AXE
from website.build import SITE

PAGES = (
    "index.html",
    "start.html",
    "how-it-works.html",
    "guides/when-something-is-wrong.html",
    "choosing/when-to-use.html",
    "reference/options.html",
    "reference/python.html",
    "http.html",
    "models.html",
    "log.html",
)
SCREENS = {"desk": (1280, 900), "phone": (360, 760)}
_RUN_AXE = (
    "const done = arguments[0]; axe.run().then((result) => done(result.violations.map("
    "(v) => [v.id, v.nodes[0].target.join(' ')])))"
)


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        """Say nothing of requests."""


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    if not (SITE / "index.html").exists():
        pytest.skip("the site is not built: make docs")
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(SITE)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture(scope="module")
def visitor(open_browser: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    return open_browser(tmp_path_factory.mktemp("downloads"))


def look(visitor: Any, screen: str, scheme: str) -> None:
    width, height = SCREENS[screen]
    visitor.execute_cdp_cmd(
        "Emulation.setDeviceMetricsOverride",
        {
            "width": width,
            "height": height,
            "deviceScaleFactor": 1,
            "mobile": screen == "phone",
        },
    )
    wanted = [{"name": "prefers-color-scheme", "value": scheme}]
    visitor.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": wanted})


@pytest.mark.skipif(not AXE.exists(), reason="axe-core is not installed")
@pytest.mark.parametrize("screen", SCREENS)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everybody_can_read_the_site(site: str, visitor: Any, screen: str, scheme: str) -> None:
    look(visitor, screen, scheme)
    visitor.set_script_timeout(120)
    visitor.get_log("browser")
    wrong: dict[str, object] = {}
    for name in PAGES:
        visitor.get(f"{site}/{name}")
        visitor.execute_async_script("setTimeout(arguments[0], 500)")  # docs/keyboard.js has run
        visitor.execute_script(AXE.read_text("utf-8"))
        found = visitor.execute_async_script(_RUN_AXE)
        is_wider = visitor.execute_script(
            "return document.documentElement.scrollWidth > window.innerWidth"
        )
        if found or is_wider:
            wrong[name] = [*found, *(["wider than the screen"] if is_wider else [])]
    assert wrong == {}
    assert visitor.get_log("browser") == []


def test_the_keyboard_skips_and_searches(site: str, visitor: Any) -> None:
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    look(visitor, "desk", "light")
    visitor.get(f"{site}/start.html")
    ActionChains(visitor).send_keys(Keys.TAB).perform()
    assert (
        visitor.execute_script("return document.activeElement.innerText")
        .strip()
        .startswith("Skip to content")
    )
    ActionChains(visitor).send_keys("/").pause(0.7).send_keys("calibrate").pause(2).perform()
    ActionChains(visitor).send_keys(Keys.ENTER).pause(1).perform()
    assert "h=calibrate" in visitor.current_url


def test_pictures_have_words_for_those_who_cannot_see_them() -> None:
    pages = [path for path in Path(SITE).rglob("*.html") if path.name != "404.html"]
    if not pages:
        pytest.skip("the site is not built: make docs")
    for path in pages:
        assert 'alt=""' not in path.read_text("utf-8"), path.name
