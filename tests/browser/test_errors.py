"""What the page says when something goes wrong, and that it can be used afterwards."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.browser.page import DOCUMENT, NETWORK, Page, page_over
from tests.fakes import COMPLETIONS, FILTERED, FakeCore, replace_file, serving_over, wait_for

ROOT = Path(__file__).parents[2]


def test_a_bad_key_is_asked_for_again(browser: Any, tokenizer: Any, tmp_path: Path) -> None:
    keys = replace_file(tmp_path / "keys", "sk-good")
    with page_over(browser, tokenizer, FakeCore(FILTERED, "Yes."), api_key_file=keys) as page:
        assert "needs an API key" in page.text("error")
        assert page.run("return document.activeElement.id") == "key"
        page.element("key").send_keys("sk-bad")
        page.element("key").submit()
        page.wait("document.getElementById('error').textContent.includes('did not accept')")
        page.element("key").clear()
        page.element("key").send_keys("sk-good")
        page.element("key").submit()
        page.wait("document.querySelectorAll('#model option').length")
        page.ask(DOCUMENT, "Where?")
        assert page.answers() == ["Yes."]
        stored = page.run("return [JSON.stringify(localStorage), document.cookie]")
        assert stored == ["{}", ""]
        page.run("sessionStorage.clear()")


def test_a_prompt_that_is_too_long(browser: Any, tokenizer: Any) -> None:
    with page_over(browser, tokenizer, FakeCore(FILTERED, "Yes.")) as page:
        page.ask("word " * 3000, "Where?")
        assert "tokens" in page.text("error")
        assert "1000" in page.text("error")
        page.ask(DOCUMENT, "Where?")
        assert page.answers() == ["Yes."]
        assert page.text("error") == ""


def test_a_busy_server(browser: Any, tokenizer: Any) -> None:
    gate = threading.Event()
    core = FakeCore(gate, FILTERED, "Yes.")
    with page_over(browser, tokenizer, core, max_queue=1) as page:
        body = {"model": "fake", "prompt": "Hello"}
        others = [
            threading.Thread(
                target=httpx.post, args=(page.url + COMPLETIONS,), kwargs={"json": body}
            )
            for _ in range(2)
        ]
        others[0].start()
        assert core.started.wait(10)
        others[1].start()  # earlier it might find the first one still in the queue
        metrics, full = f"{page.url}/metrics", "gemserve_num_requests_waiting 1.0"
        wait_for(lambda: full in httpx.get(metrics).text, 20)
        page.ask(DOCUMENT, "Where?")
        assert "The server is busy" in page.text("error")
        gate.set()
        for other in others:
            other.join()
        page.ask(DOCUMENT, "Where?")
        assert page.answers() == ["Yes."]


def test_an_error_in_the_stream_keeps_what_came_before(browser: Any, tokenizer: Any) -> None:
    core = FakeCore(FILTERED, "It hangs ", 0.2, MemoryError("no room"))
    with page_over(browser, tokenizer, core) as page:
        page.ask(DOCUMENT, "Where?")
        assert page.answers() == ["It hangs "]
        assert page.text("error")


def test_stop_ends_the_request(browser: Any, tokenizer: Any) -> None:
    core = FakeCore(FILTERED, "It hangs ", threading.Event(), "beside the door.")
    with page_over(browser, tokenizer, core) as page:
        page.start(DOCUMENT, "Where?")
        page.wait("document.querySelector('.answer')?.textContent")
        page.element("stop").click()
        page.wait_for_end()
        assert core.cancelled.wait(10)
        assert page.answers() == ["It hangs "]
        assert page.text("error") == ""


def test_a_server_that_dies_while_it_answers(browser: Any) -> None:
    """A cut stream looks like the end of an answer unless its [DONE] is missed."""
    command = [sys.executable, "-m", "tests.browser.silent_server"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            page = Page(browser, process.stdout.readline().strip())
            page.load()
            page.start(DOCUMENT, "Where?")
            page.wait("document.querySelector('.answer')?.textContent")
        finally:
            process.kill()
        page.wait_for_end()
        assert "before the answer was complete" in page.text("error")
        assert page.answers() == ["It hangs "]
        page.ask(DOCUMENT, "And now?")
        assert "cannot be reached" in page.text("error")
        page.check_console(NETWORK, "ERR_")


@pytest.mark.parametrize("prefix", ["/deep/path"])
def test_the_page_works_behind_a_path(browser: Any, tokenizer: Any, prefix: str) -> None:
    import uvicorn

    from gemserve.api.app import create_app

    serving = serving_over(FakeCore(FILTERED, "Yes."), tokenizer)
    app = create_app(serving)

    async def proxy(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            assert scope["path"].startswith(f"{prefix}/"), scope["path"]
            scope = {**scope, "path": scope["path"].removeprefix(prefix)}
        await app(scope, receive, send)

    config = uvicorn.Config(proxy, port=0, log_config=None, ws="none", lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_for(lambda: server.started, 10)
    try:
        port = server.servers[0].sockets[0].getsockname()[1]
        page = Page(browser, f"http://127.0.0.1:{port}{prefix}")
        page.load()
        page.ask(DOCUMENT, "Where?")
        assert page.answers() == ["Yes."]
        page.check_console()
    finally:
        serving.engine.stop()
        server.should_exit = True
        thread.join(10)


PROGRESS = {
    "choices": [],
    "progress": {"phase": "filter", "tokens": 500, "total": 2000, "eta_ms": 3000},
}


def test_progress_is_shown_until_the_answer_begins(browser: Any, tokenizer: Any) -> None:
    """A server that reports no progress yet is played by the page's own `fetch`."""
    with page_over(browser, tokenizer, FakeCore()) as page:
        page.run(
            "const real = window.fetch, encoder = new TextEncoder();"
            "const body = new ReadableStream({start(stream) {"
            "  window.push = (chunk) => stream.enqueue(encoder.encode(`data: ${chunk}\\n\\n`));"
            "  window.end = () => stream.close(); }});"
            "window.fetch = (url, options) => url.endsWith('chat/completions')"
            "  ? Promise.resolve(new Response(body)) : real(url, options);"
        )
        page.start(DOCUMENT, "Where?")
        page.run("window.push(arguments[0])", json.dumps(PROGRESS))
        page.wait("!document.getElementById('progress').hidden")
        assert page.text("status") == "Reading: 500 of 2,000 tokens, about 3.0 s left."
        assert page.run("return document.getElementById('progress').value") == 0.25
        answer = {"choices": [{"delta": {"content": "Beside the door."}}]}
        page.run("window.push(arguments[0])", json.dumps(answer))
        page.wait("document.getElementById('progress').hidden")
        page.run("window.push('[DONE]'); window.end()")
        page.wait_for_end()
        assert page.answers() == ["Beside the door."]
