"""Libraries on the page: made, filled, asked with sources, and deleted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.browser.conftest import MODEL, served
from tests.browser.page import ANSWER_TIMEOUT_S, AXE, Page
from tests.library.worlds import paragraphs

FERRY = "The ferry to Malmo leaves at nine."
QUESTION = "When does the ferry to Malmo leave?"
DARK = {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
SMALL = {"width": 360, "height": 800, "deviceScaleFactor": 1, "mobile": False}


@pytest.fixture
def shelf(browser: Any, tmp_path: Path) -> Iterator[Page]:
    """The page of a server that has libraries, in the dark and 360 pixels wide."""
    options = ("--model", MODEL, "--filter-min-tokens", "256", "--filter-keep", "256")
    with served(tmp_path, *options, "--library-dir", str(tmp_path / "libraries")) as (url, _):
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", DARK)
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", SMALL)
        page = Page(browser, url)
        page.load()
        page.wait("!document.getElementById('libraries').hidden")
        yield page
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def make(page: Page, name: str) -> None:
    """Make a library with the keyboard."""
    from selenium.webdriver.common.keys import Keys

    page.run("document.querySelector('#libraries summary').focus()")
    page.browser.switch_to.active_element.send_keys(Keys.ENTER)
    page.element("library-name").send_keys(name, Keys.ENTER)
    page.wait(f"document.getElementById('library').value === '{name}'")
    page.wait("document.activeElement.id === 'library-files'")


def upload(page: Page, folder: Path) -> None:
    (folder / "boats.md").write_text(f"{paragraphs(60)}\n\n{FERRY}\n\n{paragraphs(60, 'ferry')}")
    (folder / "more.txt").write_text(paragraphs(20, "more"))
    (folder / "noise.bin").write_bytes(bytes(range(256)) * 8)
    names = ("boats.md", "more.txt", "noise.bin")
    page.element("library-files").send_keys("\n".join(str(folder / name) for name in names))
    page.wait("document.getElementById('library-status').textContent.includes('added')", 120)


def look_at(page: Page) -> None:
    """Nothing is wider than the screen, and axe-core finds nothing in either theme."""
    assert page.run("return document.documentElement.scrollWidth <= innerWidth")
    for theme in ("light", "dark"):
        scheme = {"name": "prefers-color-scheme", "value": theme}
        page.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        assert not AXE.exists() or page.axe_violations() == []


def press(page: Page, name: str, key: str) -> None:
    """Go to an element, as the Tab key does, and press a key there."""
    page.run("document.getElementById(arguments[0]).focus()", name)
    page.browser.switch_to.active_element.send_keys(key)


def asked(page: Page) -> str:
    """What the page has sent to be answered last."""
    return str(page.run("return window.sent"))


def test_a_library_from_its_making_to_its_end_with_the_keyboard(
    shelf: Page, tmp_path: Path
) -> None:
    from selenium.webdriver.common.keys import Keys

    shelf.run(
        "const plain = window.fetch; window.fetch = (path, options) => {"
        "if (options?.body?.includes?.('\"filter\"')) window.sent = options.body;"
        "return plain(path, options) }"
    )
    make(shelf, "notes")
    upload(shelf, tmp_path)
    assert "2 of 3 files added. 1 refused" in shelf.text("library-status")
    listed = shelf.text("library-list")
    assert "boats.md: windows: " in listed
    assert "noise.bin: refused. " in listed
    assert "Files: 2, " in shelf.text("library-size")
    look_at(shelf)
    shelf.fill("question", QUESTION)
    shelf.fill("library-candidates", 2)
    press(shelf, "send", Keys.ENTER)
    shelf.wait("document.getElementById('status').textContent === 'Done.'", ANSWER_TIMEOUT_S)
    assert shelf.text("error") == ""
    assert '"candidates":2' in asked(shelf)
    assert shelf.text("sourced-answer")
    assert "boats.md, line" in shelf.text("sources")
    assert FERRY in shelf.text("sources")
    assert " 2 read. " in shelf.text("sourced-note")
    look_at(shelf)
    shelf.run("document.querySelector('[aria-label=\"Delete boats.md\"]').focus()")
    shelf.browser.switch_to.active_element.send_keys(Keys.ENTER)
    shelf.wait("document.getElementById('library-size').textContent.includes('Files: 1,')")
    shelf.wait("document.activeElement.id === 'library-files'")
    assert "boats.md: " not in shelf.text("library-list")
    shelf.run("window.confirm = () => true")
    press(shelf, "library-delete", Keys.SPACE)
    shelf.wait("document.getElementById('library').value === ''")
    shelf.wait("document.activeElement.id === 'library'")
    assert "notes is deleted" in shelf.text("library-status")
    shelf.check_console("status of 400", "status of 422")


def test_a_name_that_is_taken_is_said(shelf: Page) -> None:
    make(shelf, "notes")
    shelf.element("library-name").send_keys("notes")
    shelf.run("document.getElementById('library-form').requestSubmit()")
    shelf.wait("document.getElementById('library-status').textContent.includes('notes')")
    shelf.check_console("status of 409", "status of 400")


def test_a_server_without_libraries_shows_none(page: Page) -> None:
    page.wait("document.querySelectorAll('#model option').length")
    assert page.run("return document.getElementById('libraries').hidden")
