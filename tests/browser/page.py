"""The inspector page as a test uses it."""

from __future__ import annotations

import json
import os
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gemserve.ranges import as_ranges
from tests.fakes import FakeCore, live_server, serving_over

AXE = Path(
    os.environ.get(
        "AXE_CORE",
        Path(__file__).parents[2] / ".venv-clients/browser/node_modules/axe-core/axe.min.js",
    )
)
ANSWER_TIMEOUT_S = 900  # of a real model on a busy machine
NETWORK = "Failed to load resource"  # what Chromium itself writes about every failed request
DOCUMENT = "The lantern hangs beside the door. " * 20


class Page:
    """The page of the server at `url`, in a browser that selenium drives."""

    def __init__(self, browser: Any, url: str) -> None:
        self.browser = browser
        self.url = url

    def load(self) -> None:
        self.browser.get_log("browser")  # forget what came before
        self.browser.get(f"{self.url}/")
        self.wait(
            "document.querySelectorAll('#model option').length || "
            "document.querySelector('#error').textContent"
        )

    def run(self, script: str, *arguments: Any) -> Any:
        return self.browser.execute_script(script, *arguments)

    def element(self, name: str) -> Any:
        return self.browser.find_element("id", name)

    def text(self, name: str) -> str:
        return str(self.run("return document.getElementById(arguments[0]).innerText", name))

    def wait(self, condition: str, timeout_s: float = 30) -> None:
        """Wait until a JavaScript expression is true."""
        deadline = time.monotonic() + timeout_s
        while not self.run(f"return Boolean({condition})"):
            assert time.monotonic() < deadline, f"{condition}: {self.text('error')}"
            time.sleep(0.05)

    def fill(self, name: str, value: object) -> None:
        """Put a value into a field at once, as pasting does."""
        self.run(
            "const e = document.getElementById(arguments[0]); e.value = arguments[1];"
            "e.dispatchEvent(new Event('input')); e.dispatchEvent(new Event('change'))",
            name,
            str(value),
        )

    def ask(self, document: str, question: str, **options: object) -> None:
        """Ask, and wait for the end of the answer."""
        self.start(document, question, **options)
        self.wait_for_end()

    def start(self, document: str, question: str, **options: object) -> None:
        self.fill("document", document)
        self.fill("question", question)
        for name, value in options.items():
            self.fill(name, value)
        self.element("send").click()

    def wait_for_end(self) -> None:
        self.wait("!document.getElementById('send').disabled", ANSWER_TIMEOUT_S)

    def answers(self) -> list[str]:
        """The answers of the newest question."""
        found = "return [...document.querySelector('.card').querySelectorAll('.answer')]"
        return list(self.run(f"{found}.map((e) => e.textContent)"))

    def state(self) -> dict[str, Any]:
        """What the page knows of the question that is shown, and what it shows.

        `ranges`: what is kept. `strength`: how strongly each token is coloured.
        """
        self.browser.set_script_timeout(60)
        known = self.browser.execute_async_script(
            "const done = arguments[0];"
            "import(new URL('inspector/page.js', document.baseURI).href).then(({state}) => done({"
            "kept: [...state.view.kept], count: state.view.count, reason: state.view.reason,"
            "strength: [...state.view.strength ?? []],"
            "report: state.entry.report, request: state.entry.request}))"
        )
        positions = [i for i, is_kept in enumerate(known.pop("kept")) if is_kept]
        return {**known, "ranges": [list(r) for r in as_ranges(positions)]}

    def slide_to(self, budget: int) -> int:
        """Move the slider near a budget, and wait for the text; the budget that is then shown."""
        self.move_slider(budget)
        self.wait_for_text()
        return int(self.text("budget-words").split()[0].replace(",", ""))

    def move_slider(self, budget: int) -> None:
        """Move the slider near a budget."""
        self.run(
            "return import(new URL('inspector/page.js', document.baseURI).href).then(({state}) => {"
            "const n = state.entry.starts.length, e = document.getElementById('budget');"
            "e.value = Math.round(1000 * Math.log(arguments[0] / 16) / Math.log(n / 16));"
            "e.dispatchEvent(new Event('input')); })",
            budget,
        )

    def wait_for_text(self) -> None:
        """Wait until the text shows the budget that the slider names, or why it does not."""
        self.wait("document.getElementById('text').getAttribute('aria-busy') === 'false'", 120)

    def marked_text(self) -> str:
        """The text with marks, of the whole document: every block is brought to the screen."""
        self.run(
            "document.querySelectorAll('.block').forEach("
            "(e) => { e.style.contentVisibility = 'visible'; })"
        )
        parts = []
        for at in range(int(self.run("return document.querySelectorAll('.block').length"))):
            self.run(f"document.querySelectorAll('.block')[{at}].scrollIntoView()")
            self.wait(f"document.querySelectorAll('.block')[{at}].children.length")
            parts.append(
                self.run(
                    f"return [...document.querySelectorAll('.block')[{at}].querySelectorAll("
                    "'mark')].map((e) => e.textContent).join('')"
                )
            )
        return "".join(parts)

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """A request of the test's own."""
        request = urllib.request.Request(
            f"{self.url}{path}",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=ANSWER_TIMEOUT_S) as reply:
            return json.loads(reply.read())

    def axe_violations(self) -> list[str]:
        """What axe-core calls serious or critical."""
        self.run(AXE.read_text("utf-8"))
        self.browser.set_script_timeout(120)
        found = self.browser.execute_async_script(
            "const done = arguments[0]; axe.run().then((result) => done(result.violations))"
        )
        serious = [v for v in found if v["impact"] in ("serious", "critical")]
        return [f"{v['id']}: {node['failureSummary']}" for v in serious for node in v["nodes"][:3]]

    def check_console(self, *allowed: str) -> None:
        """No error, no warning, no violation of the content security policy."""
        said = [entry["message"] for entry in self.browser.get_log("browser")]
        assert [m for m in said if not any(a in m for a in allowed)] == []


@contextmanager
def page_over(browser: Any, tokenizer: Any, core: FakeCore, **settings: Any) -> Iterator[Page]:
    """The page of a server whose engine plays a script."""
    with live_server(serving_over(core, tokenizer, **settings)) as url:
        page = Page(browser, url)
        page.load()
        yield page
        page.check_console(NETWORK)
