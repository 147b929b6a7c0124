"""Other budgets and heads than the answer's: the server is asked, and what goes wrong is told."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from gemserve.contract.events import Filtered
from gemserve.contract.reports import FilterReport
from tests.browser.page import DOCUMENT, Page, page_over
from tests.fakes import FakeCore, replace_file, wait_for

# The page's own `fetch`, which keeps the bodies that were sent to /v1/filter, and may be offline.
WATCH = """
const real = window.fetch;
window.sent = [];
window.isOffline = false;
window.fetch = async (url, options) => {
  if (window.isOffline) throw new TypeError("offline");
  if (url.endsWith("v1/filter")) window.sent.push(options.body);
  return real(url, options);
};
"""
NUM_TOKENS = 140  # about as many as DOCUMENT has


def watch(page: Page) -> None:
    page.run(WATCH)


def sent(page: Page) -> list[dict[str, Any]]:
    """The bodies of the requests for other budgets."""
    return [json.loads(body) for body in page.run("return window.sent")]


def keeping(num_kept: int) -> Filtered:
    """A filter that keeps the first tokens."""
    report = FilterReport(
        method="sieve",
        applied=True,
        reason=None,
        layer=2,
        prompt_tokens=NUM_TOKENS,
        kept_tokens=num_kept,
        cached_tokens=0,
        filter_ms=1.0,
        selection=[(0, num_kept)],
        coverage=0.5,
    )
    ids = list(range(10, 10 + num_kept))  # the reply of /v1/filter has their text
    now_s = time.monotonic()
    return Filtered(report=report, started_s=now_s, filtered_s=now_s, ids=ids)


def test_the_document_is_found_in_the_cache(page: Page, fact: Any) -> None:
    """Only if the messages are those of the first request: else the whole document is read."""
    watch(page)
    page.ask(fact.document, fact.question, keep=300)
    page.slide_to(100)
    (body,) = sent(page)
    asked = page.state()["request"]["body"]
    assert body["messages"] == asked["messages"]
    assert body["filter"]["method"] == asked["filter"]["method"]
    told = page.post("/v1/filter", body)["filter"]
    assert told["prompt_tokens"] - told["cached_tokens"] < 100
    assert page.state()["ranges"] == told["selection"]


def test_a_known_budget_is_shown_without_the_server(page: Page, fact: Any) -> None:
    watch(page)
    page.ask(fact.document, fact.question, keep=300)
    page.slide_to(100)
    ranges = page.state()["ranges"]
    page.slide_to(700)
    assert page.state()["ranges"] != ranges
    page.run("window.isOffline = true")
    page.slide_to(100)
    assert page.state()["ranges"] == ranges
    assert page.text("budget-note") == ""
    assert len(sent(page)) == 2


BOXES = "document.querySelectorAll('#head-boxes input')"


def tick(page: Page, *ticked: int) -> None:
    """Tick these boxes of the heads, and no other ones."""
    page.run("document.getElementById('heads').open = true")
    page.run(
        f"{BOXES}.forEach((e, i) => arguments[0].includes(i) !== e.checked && e.click())", ticked
    )


def test_other_heads_choose_with_the_present_budget(page: Page, fact: Any) -> None:
    """They only coloured the text, and what a request by them would keep could not be seen."""
    watch(page)
    page.ask(fact.document, fact.question, keep=300, window="off")
    budget = page.slide_to(100)
    own = page.state()["ranges"]
    counts = page.run(f"return [...{BOXES}].map((e) => e.checked)")
    first, second = [i for i, is_ticked in enumerate(counts) if not is_ticked][:2]
    tick(page, first)
    page.wait_for_text()
    theirs = page.state()["ranges"]
    assert theirs != own
    slid, headed = sent(page)
    assert headed == {**slid, "filter": {**slid["filter"], "heads": headed["filter"]["heads"]}}
    assert len(headed["filter"]["heads"]) == 1
    assert headed["filter"]["keep"] == budget
    assert page.post("/v1/filter", headed)["filter"]["selection"] == theirs
    page.run("window.isOffline = true")
    tick(page)
    assert page.text("budget-note").startswith("No head is ticked, so none can choose.")
    assert page.text("budget-note").endswith(f"a budget of {budget} tokens by other heads.")
    assert page.state()["ranges"] == theirs
    tick(page, first)  # which is remembered
    page.wait_for_text()
    assert (page.text("budget-note"), page.state()["ranges"]) == ("", theirs)
    page.run("document.getElementById('heads-back').click()")
    page.wait_for_text()
    assert (page.text("budget-note"), page.state()["ranges"]) == ("", own)
    coloured = page.state()["strength"]
    tick(page, second)
    page.wait_for_text()
    assert page.text("budget-note").startswith("The server cannot be reached.")
    assert page.text("budget-note").endswith(f"a budget of {budget} tokens.")
    assert page.state()["ranges"] == own
    assert page.state()["strength"] != coloured


@pytest.mark.parametrize("method", ["gemfilter", "position", "random"])
def test_the_slider_is_there_for_every_method(page: Page, fact: Any, method: str) -> None:
    page.ask(fact.document, fact.question, method=method, keep=300)
    budget = page.slide_to(100)
    body = page.state()["request"]["body"]
    options = {"method": method, "keep": budget, "return_selection": True}
    asked = {"model": body["model"], "messages": body["messages"], "filter": options}
    assert page.state()["ranges"] == page.post("/v1/filter", asked)["filter"]["selection"]


def test_a_slow_reply_is_waited_for_and_superseded(browser: Any, tokenizer: Any) -> None:
    """The number moves at once, the marks stay, and the reply to an older wish never shows."""
    core = FakeCore(keeping(100), "Yes.")
    with page_over(browser, tokenizer, core) as page:
        page.ask(DOCUMENT, "Where?")
        gate = threading.Event()
        core.script = (gate, keeping(20))
        core.started.clear()
        page.move_slider(20)
        assert page.text("budget-words") == "20 tokens"
        assert page.state()["ranges"] == [[0, 100]]
        assert core.started.wait(10)
        page.wait("document.getElementById('budget-note').textContent")
        assert page.text("budget-note") == "Asking the server what it would keep with 20 tokens…"
        core.script = (keeping(60),)
        page.move_slider(60)
        assert core.cancelled.wait(10), "the request that nobody wants any more still runs"
        gate.set()
        page.wait_for_text()
        assert page.state()["ranges"] == [[0, 60]]
        assert "With a budget of 60 tokens, 60 of 140 would be kept" in page.text("facts")
        assert page.text("budget-note") == ""


def test_as_answered_ends_the_wait(browser: Any, tokenizer: Any) -> None:
    core = FakeCore(keeping(100), "Yes.")
    with page_over(browser, tokenizer, core) as page:
        page.ask(DOCUMENT, "Where?")
        core.script = (threading.Event(), keeping(20))
        core.started.clear()
        page.move_slider(20)
        assert core.started.wait(10)
        page.element("budget-back").click()
        assert core.cancelled.wait(10)
        page.wait_for_text()
        assert page.state()["ranges"] == [[0, 100]]
        assert page.text("budget-words") == "100 tokens"


def test_a_refusal_is_told_beside_the_slider(browser: Any, tokenizer: Any, tmp_path: Path) -> None:
    core = FakeCore(keeping(100), "Yes.")
    keys = replace_file(tmp_path / "keys", "sk-good")
    limits = {"api_key_file": keys, "requests_per_minute": 2}
    with page_over(browser, tokenizer, core, **limits) as page:
        page.element("key").send_keys("sk-good")
        page.element("key").submit()
        page.wait("document.querySelectorAll('#model option').length")
        page.ask(DOCUMENT, "Where?")
        page.slide_to(20)
        note = page.text("budget-note")
        assert note.startswith("The server is busy: "), note
        assert "Try again in" in note
        assert note.endswith("The text still shows what the answer was given from.")
        assert page.state()["ranges"] == [[0, 100]]
        page.element("budget-back").click()
        assert page.text("budget-note") == ""
        page.run("sessionStorage.clear()")


def test_without_the_server_the_page_shows_and_saves_what_it_has(
    page: Page, fact: Any, downloads: Path
) -> None:
    watch(page)
    page.ask(fact.document, fact.question, keep=300)
    page.slide_to(100)
    shown = page.marked_text()
    page.run("window.isOffline = true")
    page.slide_to(700)
    note = page.text("budget-note")
    assert note.startswith("The server cannot be reached."), note
    assert "still shows a budget of " in note
    assert page.marked_text() == shown
    saved = downloads / "answer.html"
    saved.unlink(missing_ok=True)
    page.element("save").click()
    wait_for(lambda: saved.exists() and saved.stat().st_size > 0, 20)
    page.browser.get(saved.as_uri())
    marks = "[...document.querySelectorAll('mark')]"
    assert page.run(f"return {marks}.map((e) => e.textContent).join('')") == shown
