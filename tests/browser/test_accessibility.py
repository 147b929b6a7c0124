"""The keyboard, axe-core's rules, themes, and narrow screens."""

from __future__ import annotations

from typing import Any

import pytest

from tests.browser.page import AXE, Page


def test_everything_can_be_done_with_the_keyboard(page: Page, fact: Any) -> None:
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    def press(*keys: str) -> None:
        ActionChains(page.browser).send_keys(*keys).perform()

    def focused() -> str:
        return str(page.run("return document.activeElement.id || document.activeElement.className"))

    def tab_to(name: str) -> None:
        for _ in range(60):
            if focused() == name:
                return
            press(Keys.TAB)
        raise AssertionError(f"Tab never reached {name}")

    page.fill("document", fact.document)
    press(Keys.TAB)
    assert focused() == "skip"
    press(Keys.ENTER)
    page.wait("location.hash === '#question'")
    tab_to("question")
    press(fact.question, Keys.ENTER)
    page.wait("document.getElementById('send').disabled")
    page.wait_for_end()
    assert page.answers()[0]
    for name in (
        "model",
        "document",
        "file",
        "question",
        "send",
        "question",
        "strip",
        "budget",
        "find",
        "next-kept",
        "whole",
        "copy",
        "save",
        "text",
    ):
        tab_to(name)
    tab_to("budget")
    before = page.text("budget-words")
    press(Keys.ARROW_RIGHT)
    assert page.text("budget-words") != before
    tab_to("strip")
    press(Keys.END)
    page.wait("Number(document.getElementById('strip').getAttribute('aria-valuenow')) > 50")
    tab_to("find")
    press("number", Keys.ENTER)
    assert " of " in page.text("find-words")


@pytest.mark.skipif(not AXE.exists(), reason="axe-core is not installed")
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1400, 420])
def test_axe_finds_nothing_serious(page: Page, fact: Any, theme: str, width: int) -> None:
    page.browser.execute_cdp_cmd(
        "Emulation.setEmulatedMedia",
        {"features": [{"name": "prefers-color-scheme", "value": theme}]},
    )
    page.browser.set_window_size(width, 900)
    try:
        assert page.axe_violations() == []
        page.ask(fact.document, fact.question)
        page.fill("find", fact.statement[:20])
        page.element("find-next").click()
        assert page.axe_violations() == []
        is_wider = "return document.documentElement.scrollWidth > innerWidth"
        assert not page.run(is_wider), "the page scrolls sideways"
    finally:
        page.browser.set_window_size(1400, 900)
        page.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_the_page_loads_nothing_from_elsewhere(page: Page, fact: Any) -> None:
    page.ask(fact.document, fact.question)
    loaded = page.run("return performance.getEntriesByType('resource').map((e) => e.name)")
    assert loaded
    assert [url for url in loaded if not url.startswith(page.url)] == []


def test_the_policy_stops_foreign_code(page: Page) -> None:
    blocked = page.run(
        "const seen = []; document.addEventListener('securitypolicyviolation',"
        "(e) => seen.push(e.effectiveDirective)); const s = document.createElement('script');"
        "s.textContent = 'window.owned = 1'; document.head.append(s);"
        "return new Promise((done) => setTimeout(() => done([seen, window.owned]), 300))"
    )
    assert blocked[0] == ["script-src-elem"]
    assert blocked[1] is None
    page.browser.get_log("browser")  # the violation that this test made
