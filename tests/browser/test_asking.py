"""Asking, and what the page then shows, against a real server."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.browser.page import Page
from tests.pdfs import pdf_of


def selection_of(page: Page, keep: int | None = None, **more: object) -> Any:
    """The filter report of a new request for the same prompt."""
    body = page.state()["request"]["body"]
    options = {**body["filter"], "return_scores": False, **more}
    options.pop("return_attention", None)  # of answers only
    if keep is not None:
        options["keep"] = keep
    prompt = {name: body[name] for name in ("messages", "prompt") if name in body}
    reply = page.post("/v1/filter", {"model": body["model"], **prompt, "filter": options})
    return reply["filter"]


def test_the_answer_streams_and_the_kept_passages_are_marked(page: Page, fact: Any) -> None:
    # the document cache has not seen its beginning; later windows another test may have read
    unread = f"Notes of {time.time_ns()}. {fact.document}"
    page.ask(unread, fact.question)
    assert page.text("error") == ""
    state = page.state()
    assert state["report"]["applied"], state["report"]
    assert state["ranges"] == selection_of(page)["selection"]
    assert page.answers()[0].strip()
    facts = page.text("facts")
    assert f"{state['report']['kept_tokens']:,} of " in facts
    assert "Coverage is" in facts
    is_cached = state["report"]["cached_windows"]
    told = "Most of the document was in" if is_cached else "Reading everything would take about"
    assert told in facts
    tokens = page.post("/tokenize", prompt_of(state))["tokens"]
    kept = [i for start, stop in state["ranges"] for i in tokens[start:stop]]
    assert page.marked_text() == page.post("/detokenize", {"tokens": kept})["prompt"]


def prompt_of(state: dict[str, Any]) -> dict[str, Any]:
    body = state["request"]["body"]
    return {name: body[name] for name in ("messages", "prompt") if name in body}


def test_the_slider_shows_what_a_new_request_would_keep(page: Page, fact: Any) -> None:
    page.ask(fact.document, fact.question, keep=600)
    for wanted in (20, 90, 150, 300, 450, 700, 1024, 2500):
        budget = page.slide_to(wanted)
        shown = page.state()
        told = selection_of(page, budget)
        assert shown["ranges"] == told["selection"], budget
        assert shown["count"] == told["kept_tokens"]
    assert "Coverage" not in page.text("facts"), "that of the answer, which is not shown"
    page.element("budget-back").click()
    assert page.state()["ranges"] == selection_of(page, 600)["selection"]
    assert "Coverage" in page.text("facts")


def test_the_slider_knows_the_fallback(page: Page, fact: Any) -> None:
    """Where attention is diffuse, a request keeps more than its budget."""
    page.ask(fact.document, "How many words are there, and which of them is used most often?")
    for wanted in (64, 1024):
        budget = page.slide_to(wanted)
        shown, told = page.state(), selection_of(page, budget)
        assert shown["ranges"] == told["selection"], budget
        assert (shown["reason"] is None) == (told["reason"] is None)


def test_several_questions_on_one_document(page: Page, fact: Any) -> None:
    page.ask(fact.document, fact.question)
    page.ask(fact.document, "What is it about?")
    second = page.state()
    assert second["report"]["cached_tokens"] > 0
    assert "were already in the document cache" in page.text("facts")
    page.run("document.querySelectorAll('.card .question')[1].click()")
    assert page.state()["request"]["body"]["question"] == fact.question


def test_a_filtered_answer_beside_one_from_the_whole_prompt(page: Page, fact: Any) -> None:
    page.ask(fact.document, fact.question)
    page.element("whole").click()
    page.wait_for_end()
    filtered, whole = page.answers()
    body = page.state()["request"]["body"]
    prompt = {name: body[name] for name in ("messages", "prompt", "model") if name in body}
    asked = {**prompt, "max_tokens": 128, "temperature": 0, "filter": "none"}
    (choice,) = page.post(f"/{page.state()['request']['path']}", asked)["choices"]
    assert whole == (choice.get("message") or {"content": choice.get("text")})["content"]
    assert filtered
    assert "(measured)" in page.text("facts")


def test_a_short_prompt_is_said_to_be_read_whole(page: Page) -> None:
    page.ask("The code of the lantern is 48213.", "What is the code of the lantern?")
    assert "short enough to be read whole" in page.text("facts")
    assert page.run("return document.getElementById('budget').disabled")


def test_find_says_whether_a_hit_was_kept(page: Page, fact: Any) -> None:
    page.ask(fact.document, fact.question)
    page.fill("find", fact.statement[:30])
    page.element("find-next").click()
    assert page.text("find-words").startswith("1 of 1: kept"), page.text("find-words")
    assert page.run("return document.querySelector('.hit').textContent") in fact.statement
    page.fill("find", "no such words")
    page.element("find-next").click()
    assert page.text("find-words") == "not found"


def test_a_file_is_read(page: Page, tmp_path: Path) -> None:
    path = tmp_path / "notes.md"
    path.write_text("# Notes\n\nÜber 🌍", encoding="utf-8")
    page.element("file").send_keys(str(path))
    page.wait("document.getElementById('document').value")
    assert page.run("return document.getElementById('document').value") == path.read_text("utf-8")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\0\0")
    page.element("file").send_keys(str(tmp_path / "picture.png"))
    page.wait("document.getElementById('error').textContent")
    assert "picture.png is neither text nor a PDF" in page.text("error")


def test_a_pdf_is_read(page: Page, tmp_path: Path) -> None:
    """One that Chromium prints, and one without text, whose error names the file."""
    pytest.importorskip("pypdf", reason='"gemserve[pdf]" is not installed')
    printed = page.browser.execute_cdp_cmd("Page.printToPDF", {})["data"]
    (tmp_path / "paper.pdf").write_bytes(base64.b64decode(printed))
    page.element("file").send_keys(str(tmp_path / "paper.pdf"))
    page.wait("document.getElementById('document').value")
    assert "what the filter kept" in page.run("return document.getElementById('document').value")
    assert "of paper.pdf: " in page.text("document-size")
    (tmp_path / "scan.pdf").write_bytes(pdf_of([""]))
    page.element("file").send_keys(str(tmp_path / "scan.pdf"))
    page.wait("document.getElementById('error').textContent")
    assert "'scan.pdf' has no text on its 1 page(s)" in page.text("error")
    assert "of paper.pdf: " in page.text("document-size"), "the document is still the other one"
    assert [m for m in page.browser.get_log("browser") if "400" not in m["message"]] == []


@pytest.mark.parametrize("kind", ["curl", "python", "node"])
def test_programs_do_what_the_page_did(page: Page, fact: Any, kind: str, tmp_path: Path) -> None:
    page.ask(fact.document, fact.question, keep=300)
    page.fill("copy", kind)
    program = page.run("return document.getElementById('program-text').value")
    assert fact.question in program
    assert page.url in program
    if kind == "node":
        assert "keep" in program
        return
    if kind == "curl" and not (shutil.which("jq") and shutil.which("curl")):
        pytest.skip("curl or jq is missing")
    (tmp_path / "document.txt").write_text(fact.document, encoding="utf-8")
    command = [sys.executable, "-c", program] if kind == "python" else ["sh", "-c", program]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    answer, report = page.answers()[0], page.state()["report"]
    assert report["kept_tokens"] < report["prompt_tokens"]
    if kind == "python":
        said = re.fullmatch(r"(.*)\n(\d+) of (\d+) tokens kept\n", done.stdout, re.DOTALL)
        assert said, done.stdout
        assert said[1] == answer
        assert (int(said[2]), int(said[3])) == (report["kept_tokens"], report["prompt_tokens"])
    else:
        reply = json.loads(done.stdout)
        assert reply["choices"][0]["message"]["content"] == answer
        assert reply["filter"]["kept_tokens"] == report["kept_tokens"]


def test_the_saved_file_needs_no_server(page: Page, fact: Any, downloads: Path) -> None:
    page.ask(fact.document, f"{fact.question} <script>alert(1)</script>")
    answer = page.answers()[0]
    marked = page.marked_text()
    saved = downloads / "answer.html"
    saved.unlink(missing_ok=True)  # of another test
    page.element("save").click()
    page.wait("true")
    for _ in range(200):
        if saved.exists() and saved.stat().st_size:
            break
        page.run("return new Promise((done) => setTimeout(done, 50))")
    html = saved.read_text("utf-8")
    assert "<script" not in html
    assert "src=" not in html
    page.browser.get(saved.as_uri())
    body = page.run("return document.body.innerText")
    assert answer.strip() in body
    shown = page.run(
        "return [...document.querySelectorAll('mark')].map((e) => e.textContent).join('')"
    )
    assert shown == marked
