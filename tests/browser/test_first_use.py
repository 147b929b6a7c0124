"""What somebody who has not seen the page before is told, and when."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from gemserve.contract.events import Finished
from tests.browser.page import DOCUMENT, Page, page_over
from tests.fakes import CONTEXT, FILTER_LAYER, FILTERED, FakeCore

OPENED = "!document.getElementById('shown').hidden"


def test_the_page_says_what_it_will_show_until_it_does(browser: Any, tokenizer: Any) -> None:
    with page_over(browser, tokenizer, FakeCore(FILTERED, "Yes.")) as page:
        assert "A filter looks where the question’s attention goes" in page.text("intro")
        page.ask(DOCUMENT, "Where?")
        page.wait(OPENED)
        assert page.run("return document.getElementById('intro').hidden")


def test_the_model_s_limit_is_told_before_anyone_asks(browser: Any, tokenizer: Any) -> None:
    """It was learnt from an error, after the document had been sent."""
    with page_over(browser, tokenizer, FakeCore()) as page:
        page.fill("document", "word " * 100)
        limit = f"fake takes {CONTEXT:,} with the answer"
        assert page.text("document-size") == f"500 characters, about 130 tokens; {limit}."
        page.fill("document", "word " * 3000)
        assert f"about 3,800 tokens: probably too long, {limit}." in page.text("document-size")
        assert page.run("return document.getElementById('document-size').matches('.error')")
        page.fill("document", "")
        assert page.text("document-size") == ""


def test_a_question_that_failed_has_no_answer(browser: Any, tokenizer: Any) -> None:
    """Its card said "Answer from what was kept", above an error."""
    with page_over(browser, tokenizer, FakeCore()) as page:
        page.ask("word " * 3000, "Where?")
        assert "Shorten the document" in page.text("error")
        assert page.run("return document.querySelector('.card h4').textContent") == "No answer"


def test_an_answer_that_was_cut_says_so(browser: Any, tokenizer: Any) -> None:
    core = FakeCore(FILTERED, "It ", "hangs", Finished(reason="length", completion_tokens=2))
    with page_over(browser, tokenizer, core) as page:
        page.ask(DOCUMENT, "Where?", **{"max-tokens": 2})
        note = "return document.querySelector('.card .note').textContent"
        assert "It ends after 2 tokens, the longest answer of the options." in page.run(note)


def test_the_layer_of_the_options_is_asked_for(browser: Any, tokenizer: Any) -> None:
    """The page told of a request's `filter.layer`, and could not make one."""
    core = FakeCore(FILTERED, "Yes.")
    with page_over(browser, tokenizer, core) as page:
        page.ask(DOCUMENT, "Where?", layer=1, keep=64)
        page.ask(DOCUMENT, "And whence?", layer="")
        assert [request.filter.layer for request in core.requests] == [1, FILTER_LAYER]
        shown = "[...document.getElementById('other').options].filter((e) => !e.hidden)"
        methods = page.run(f"return {shown}.map((e) => e.value)")
        assert methods == ["none", "gemfilter", "position", "random"], "sieve with itself"


def test_long_times_are_told_in_minutes(page: Page) -> None:
    page.browser.set_script_timeout(30)
    told = page.browser.execute_async_script(
        "const done = arguments[0];"
        "import(new URL('inspector/words.js', document.baseURI).href).then(({seconds}) =>"
        "done([90, 9_900, 99_400, 99_600, 200_000].map(seconds)))"
    )
    assert told == ["90 ms", "9.9 s", "99 s", "1 min 40 s", "3 min 20 s"]


def test_the_program_comes_with_its_document(browser: Any, tokenizer: Any, downloads: Path) -> None:
    """It reads document.txt, which nobody has who picked a PDF."""
    with page_over(browser, tokenizer, FakeCore(FILTERED, "Yes.")) as page:
        page.ask(DOCUMENT, "Where?")
        page.fill("copy", "curl")
        assert page.run("return document.getElementById('program-text').selectionEnd") == 0
        page.element("program-document").click()
        saved = downloads / "document.txt"
        deadline = time.monotonic() + 20
        while not (saved.exists() and saved.stat().st_size) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert saved.read_text("utf-8") == DOCUMENT
        page.element("program-close").click()


SLOW = """
const real = window.fetch;
window.fetch = async (url, options) => {
  const isSlow = String(url).endsWith("openapi.json");
  if (isSlow) await new Promise((done) => setTimeout(done, 1500));
  return real(url, options);
};
"""


def test_a_quick_question_gets_all_that_the_server_has(browser: Any, tokenizer: Any) -> None:
    """Asked before the page knew the server, it came without attention, heads and progress."""
    core = FakeCore(FILTERED, "Yes.")
    script = {"source": SLOW}
    added = browser.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", script)
    try:
        with page_over(browser, tokenizer, core) as page:
            page.ask(DOCUMENT, "Where?")
            assert page.answers() == ["Yes."]
    finally:
        browser.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", added)
    assert core.requests[0].filter.return_attention
    assert core.requests[0].filter.return_scores == "heads"
