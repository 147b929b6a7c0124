"""Two answers side by side, other heads, and what a sentence of the answer leaned on."""

from __future__ import annotations

from base64 import b64decode
from typing import Any

import numpy as np

from gemserve.contract.prompt_parts import Priority
from tests.browser.page import Page


def kept_by(page: Page, **options: Any) -> set[int]:
    """What a request of the test's own keeps of the shown prompt."""
    body = page.state()["request"]["body"]
    prompt = {name: body[name] for name in ("messages", "prompt", "model") if name in body}
    options = {"return_selection": True, **options}
    told = page.post("/v1/filter", {**prompt, "filter": options})["filter"]
    return {p for start, stop in told["selection"] for p in range(start, stop)}


def test_two_methods_side_by_side(page: Page, fact: Any) -> None:
    page.ask(fact.document, fact.question, keep=300)
    page.fill("other", "gemfilter")
    page.element("whole").click()
    page.wait_for_end()
    assert len(page.answers()) == 2
    ours = kept_by(page, method="sieve", keep=300)
    theirs = kept_by(page, method="gemfilter", keep=len(ours))  # as many tokens
    words = page.text("differences-words")
    assert f"Both kept {len(ours & theirs)} tokens" in words
    assert f"Only sieve kept {len(ours - theirs)} tokens" in words
    assert f"Only gemfilter kept {len(theirs - ours)} tokens" in words
    page.wait("document.querySelector('#text .only-this, #text .only-other')")
    page.run("document.getElementById('differ').click()")
    assert not page.run("return document.querySelector('#text .only-this, #text .only-other')")
    page.run("document.querySelectorAll('#differences summary').forEach((e) => e.click())")
    page.run("document.querySelector('#differences .passage').click()")
    page.ask(fact.document, "What is it about?")
    assert page.run("return document.getElementById('differences').hidden")


def test_other_heads_redraw_the_choice(page: Page, fact: Any) -> None:
    page.ask(fact.document, fact.question, keep=300)
    assert page.run("return !document.getElementById('heads-windows').hidden")  # no scores of heads
    page.ask(fact.document, fact.question, keep=300, window="off")
    assert page.run("return document.getElementById('heads-windows').hidden")
    before = page.state()
    body = before["request"]["body"]
    prompt = {name: body[name] for name in ("messages", "prompt", "model") if name in body}
    one = {"method": "sieve", "keep": 300, "window": "off"}
    options = {**one, "return_scores": "heads"}
    scores = page.post("/v1/filter", {**prompt, "filter": options})["filter"]["scores"]
    heads = sorted(scores["heads"], key=lambda head: int(head["layer"]))  # as they are shown
    assert len(heads) > 1
    page.run("document.getElementById('heads').open = true")
    boxes = "document.querySelectorAll('#head-boxes input')"
    shown = page.run(f"return [...{boxes}].map((e) => e.checked)")
    assert shown == [head["counts"] for head in heads]
    other = shown.index(False)
    page.run(f"{boxes}.forEach((e, i) => (i === {other}) !== e.checked && e.click())")
    assert "the attention of other heads" in page.text("facts")
    assert page.state()["strength"] != before["strength"]
    page.wait_for_text()
    assert "chosen by other heads" in page.text("facts")
    now = page.state()
    assert now["ranges"] != before["ranges"]
    assert now["strength"] != before["strength"]
    named = [[heads[other]["layer"], heads[other]["head"]]]
    chosen = {p for start, stop in now["ranges"] for p in range(start, stop)}
    assert chosen == kept_by(page, **one, heads=named)
    codes = np.frombuffer(b64decode(heads[other]["tokens"]), np.uint8).copy()
    for start, stop, priority in scores["inputs"]["protected"]:
        if priority <= Priority.FRAME:
            codes[start:stop] = 0
    assert now["strength"][int(codes.argmax())] == 1
    assert int(codes.argmax()) in chosen
    page.run("document.getElementById('heads-back').click()")
    assert page.state()["ranges"] == before["ranges"]
    page.element("budget-back").click()
    after = page.state()
    assert (after["ranges"], after["strength"]) == (before["ranges"], before["strength"])
    assert "other heads" not in page.text("facts")


def test_a_sentence_shows_what_it_leaned_on(page: Page, fact: Any) -> None:
    page.ask(fact.document, fact.question)
    sentences = "document.querySelectorAll('.card .sentence')"
    text = page.run(f"return [...{sentences}].map((e) => e.textContent).join('')")
    assert text == page.answers()[0]
    page.run(f"{sentences}[0].click()")
    assert "attended most to" in page.text("leaned-words")
    assert page.run("return document.querySelectorAll('#leaned-list li').length") > 0
    page.wait("document.querySelector('#text .leaned')")
    page.run("document.querySelector('#leaned-list button').click()")
    assert "head" in page.text("leaned-words")
    page.run("document.getElementById('leaned-close').click()")
    assert page.run("return document.getElementById('leaned').hidden")
    assert not page.run("return document.querySelector('#text .leaned, [aria-pressed]')")
    page.run(f"{sentences}[0].click()")
    body = page.state()["request"]["body"]
    prompt = {name: body[name] for name in ("messages", "prompt", "model") if name in body}
    asked = {**prompt, "max_tokens": 128, "temperature": 0, "filter": body["filter"]}
    (choice,) = page.post(f"/{page.state()['request']['path']}", asked)["choices"]
    attention = choice["attention"]
    if page.run(f"return {sentences}.length") == 1:
        totals: dict[int, float] = {}
        offsets = attention["offsets"]
        of_text = [at for at, offset in enumerate(offsets) if offset < len(text)]  # not of its end
        for at in of_text:
            for index, weight in attention["tokens"][at]:
                totals[index] = totals.get(index, 0) + weight
        best = max(totals.values()) / len(of_text)
        first = page.run("return document.querySelector('#leaned-list li').textContent")
        assert first.startswith(f"{round(100 * best)}%") or best < 0.01
