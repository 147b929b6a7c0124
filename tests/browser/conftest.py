"""A headless Chromium and a real server for the tests of the inspector page.

`make test-browser` runs them. Without Chromium, or without selenium, they are skipped.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.browser.page import Page

START_TIMEOUT_S = 600
MODEL = os.environ.get("BROWSER_MODEL", "builtin")
REPLICAS = os.environ.get("TEST_REPLICAS")


@contextmanager
def served(folder: Path, *options: str) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """`gemserve serve` as a child process on a free port; yields its address and its process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "gemserve.cli.main", "serve", "--port", str(port), *options]
    if REPLICAS is not None:
        command += ["--replicas", REPLICAS, "--device", "cpu"]
    log = folder / f"server-{port}.log"
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not is_ready(url):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, "the server did not start"
            time.sleep(0.2)
        yield url, process
    finally:
        if REPLICAS is not None:
            process.terminate()  # else processes of Ray would be left for a while
        else:
            process.kill()
        process.wait()


def is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=5) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server that filters prompts of more than 256 tokens."""
    options = ("--model", MODEL, "--filter-min-tokens", "256", "--filter-keep", "512")
    with served(tmp_path_factory.mktemp("server"), *options) as (url, _):
        yield url


def find_chromium() -> str | None:
    """The program, if it and its driver are installed."""
    found = shutil.which("chromium") or shutil.which("chromium-browser")
    return found if shutil.which("chromedriver") else None


def start_chromium(downloads: Path, window: str = "1400,900") -> Any:
    """A headless Chromium that selenium drives. `window`: its width and height."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    options.binary_location = find_chromium()
    for flag in (
        "headless=new",
        "no-sandbox",
        "disable-gpu",
        "disable-background-networking",
        "disable-component-update",
        "disable-dev-shm-usage",
        "no-first-run",
        f"window-size={window}",
    ):
        options.add_argument(f"--{flag}")
    options.add_experimental_option("prefs", {"download.default_directory": str(downloads)})
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(executable_path=shutil.which("chromedriver"))
    return webdriver.Chrome(options=options, service=service)


@pytest.fixture(scope="session")
def open_browser() -> Iterator[Callable[..., Any]]:
    """Starts a Chromium; all of them are closed at the end."""
    pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    if find_chromium() is None:
        pytest.skip("no chromium: on Debian, `apt-get install chromium chromium-driver`")
    with ExitStack() as stack:

        def start(downloads: Path) -> Any:
            browser = start_chromium(downloads)
            stack.callback(browser.quit)
            return browser

        yield start


@pytest.fixture(scope="session")
def downloads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("downloads")


@pytest.fixture(scope="session")
def browser(open_browser: Callable[..., Any], downloads: Path) -> Any:
    return open_browser(downloads)


@pytest.fixture
def page(browser: Any, server: str) -> Iterator[Page]:
    """The page of `server`, newly loaded. At the end its console must be empty."""
    opened = Page(browser, server)
    opened.load()
    yield opened
    opened.check_console()


@pytest.fixture(scope="session")
def fact(tokenizer: Any) -> Any:
    """A document of about 4,000 tokens, and a question that the built-in model can answer."""
    from gemserve_lab.demo.document import natural_document, synthetic_document

    draw = synthetic_document if MODEL == "builtin" else natural_document
    return draw(tokenizer, 4000, 3)
