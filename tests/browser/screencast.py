"""Makes `docs/pictures/inspector.gif`: a question on the inspector page, and what was kept.

`make screencast`, which needs Debian's Chromium. Each picture is a screenshot of the real page and
of a real server, with a line below it that says what happens.
"""

from __future__ import annotations

import argparse
import io
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont
from transformers import AutoTokenizer

from gemserve.model.loading.loader import BUILTIN_PATH
from gemserve_lab.demo.document import natural_document
from tests.browser.conftest import served, start_chromium
from tests.browser.page import Page

OUT = Path(__file__).parents[2] / "docs/pictures/inspector.gif"
MODEL = "smollm2"
SIZE = (900, 640)
CAPTION_HEIGHT = 40
NUM_COLOURS = 64
MAX_BYTES = 2_000_000
TOKENS, SEED = 5000, 4
REDRAW_S = 3.0  # the server reads the windows from its cache, and the page draws them
MAX_READING = 14  # pictures of the progress
_HAS_ANSWER = (
    "return Boolean(document.querySelector('.answer')?.textContent)"
    "|| !document.getElementById('send').disabled"
)


class Film:
    """Pictures, and for how many milliseconds each is shown."""

    def __init__(self, page: Page) -> None:
        self._page = page
        self._pictures: list[Image.Image] = []
        self._durations: list[int] = []
        self._font = ImageFont.load_default(18)

    def take(self, caption: str, duration_ms: int) -> None:
        shot = Image.open(io.BytesIO(self._page.browser.get_screenshot_as_png())).convert("RGB")
        shot = shot.crop((0, 0, SIZE[0], SIZE[1]))
        picture = Image.new("RGB", (SIZE[0], SIZE[1] + CAPTION_HEIGHT), "#1c2330")
        picture.paste(shot, (0, 0))
        ImageDraw.Draw(picture).text((16, SIZE[1] + 9), caption, "#ffffff", self._font)
        self._pictures.append(picture)
        self._durations.append(duration_ms)

    def take_while_reading(self, caption: str) -> None:
        """A few pictures until the answer begins, when the progress has changed."""
        seen: list[str] = []
        while not self._page.run(_HAS_ANSWER):
            status = self._page.text("status")
            if status not in seen and len(seen) < MAX_READING:
                self.take(caption, 350)
                seen.append(status)
            time.sleep(0.3)

    def write(self, path: Path) -> None:
        """One palette for all pictures, so that what does not change takes no bytes."""
        sheet = Image.new("RGB", (SIZE[0], (SIZE[1] + CAPTION_HEIGHT) * len(self._pictures)))
        for at, picture in enumerate(self._pictures):
            sheet.paste(picture, (0, at * (SIZE[1] + CAPTION_HEIGHT)))
        palette = sheet.quantize(NUM_COLOURS)
        frames = [p.quantize(palette=palette, dither=Image.Dither.NONE) for p in self._pictures]
        frames[0].save(
            path,
            save_all=True,
            append_images=frames[1:],
            duration=self._durations,
            loop=0,
            optimize=True,
        )


def play(page: Page, film: Film, document: str, question: str) -> None:
    film.take("1. The inspector page of a server", 1500)
    page.fill("document", document)
    film.take("2. Paste a document", 1800)
    for at in range(8, len(question) + 8, 8):
        page.fill("question", question[:at])
        film.take("3. Ask a question about it", 160)
    page.element("send").click()
    film.take_while_reading("4. The filter reads the document with the lower layers only")
    page.wait_for_end()
    page.run("document.querySelector('.card').scrollIntoView({block: 'center'})")
    film.take("5. The answer is written from what was kept", 2000)
    page.run("document.getElementById('shown').scrollIntoView()")
    film.take("6. The strip is the document: where attention went, and what was kept", 2600)
    page.element("next-kept").click()
    page.run("document.getElementById('text').scrollIntoView({block: 'center'})")
    film.take("7. Kept passages are marked, stronger where attention was stronger", 2600)
    page.run("document.getElementById('shown').scrollIntoView()")
    for share in (450, 600, 750):
        page.run(
            "const b = document.getElementById('budget'); b.value = arguments[0];"
            "b.dispatchEvent(new Event('input')); b.dispatchEvent(new Event('change'))",
            share,
        )
        time.sleep(REDRAW_S)
        film.take("8. Move the budget: the server says what it would keep", 900)
    film.take("8. Move the budget: the server says what it would keep", 1500)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.browser.screencast", description=__doc__)
    parser.add_argument("--seed", type=int, default=SEED, help="which fact (default: %(default)s)")
    seed: int = parser.parse_args().seed
    with tempfile.TemporaryDirectory() as name, ExitStack() as at_end:
        url, _ = at_end.enter_context(served(Path(name), "--model", MODEL))
        browser: Any = start_chromium(Path(name), f"{SIZE[0]},{SIZE[1]}")
        at_end.callback(browser.quit)
        frame = SIZE[1] - int(browser.execute_script("return innerHeight"))
        browser.set_window_size(SIZE[0], SIZE[1] + frame)  # of the page, without the window's own
        page = Page(browser, url)
        page.load()
        film = Film(page)
        tokenizer = AutoTokenizer.from_pretrained(BUILTIN_PATH)  # for a rough length
        fact = natural_document(tokenizer, TOKENS, seed)
        play(page, film, fact.document, fact.question)
        answer = page.answers()[0]
        if not all(right in answer for right in fact.answers):
            print(f"{answer!r} is not {fact.answers}: the model is small; take another --seed")
            return 1
        film.write(OUT)
    size = OUT.stat().st_size
    print(f"{OUT.name}: {size:,} bytes")
    return 0 if size <= MAX_BYTES else 1


if __name__ == "__main__":
    sys.exit(main())
