"""Reads PDF, DOCX and HTML files, in a process of their own with limits on time, memory and output.

DOCX and HTML become Markdown, so that headings are known. This module is also the program of that
process.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import subprocess
import sys
from io import BytesIO

from gemserve.errors import LibraryError
from gemserve.library.pdf_text import PdfLimits, limit_this_process, read_pdf

_TEXT_BYTES = 1 << 27
_CPU_S, _WALL_S = 60, 240.0
_MEMORY_BYTES = 2 << 30
_SHOWN_CHARS = 200
_NEEDED = {"docx": ("mammoth", "markdownify"), "html": ("markdownify",)}
_LEFT_OUT = ["script", "style", "template", "noscript", "svg", "nav"]


def convert(content: bytes, name: str, kind: str) -> tuple[str, tuple[int, ...]]:
    """The text of the file called `name`, and the first character of each page, if there are any.

    `kind`: "pdf", "docx" or "html". Raises `RequestError` or `LibraryError`, which says why there
    is no text.
    """
    if kind == "pdf":
        limits = PdfLimits(text_bytes=_TEXT_BYTES)
        pdf = read_pdf(content, name, limits)
        return pdf.text, pdf.page_starts
    missing = [each for each in _NEEDED[kind] if importlib.util.find_spec(each) is None]
    if missing:
        raise LibraryError(
            f'is {kind.upper()}, which is not read here: pip install "gemserve[library]"'
        )
    command = [sys.executable, "-P", "-m", __name__, kind]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL) as process:
        try:
            output, _ = process.communicate(content, timeout=_WALL_S)
        except subprocess.TimeoutExpired as error:
            raise LibraryError(f"was not read within {_WALL_S:g} s") from error
        finally:
            process.kill()
    if process.returncode:
        raise LibraryError(
            f"takes too much to read; the limits are {_CPU_S} s of processor time and "
            f"{_MEMORY_BYTES >> 20} MiB of memory"
        )
    said = json.loads(output)
    if "reason" in said:
        raise LibraryError(said["reason"])
    return said["text"], ()


def _main() -> None:
    """Read a file from stdin; write its text, or why there is none, as JSON."""
    limit_this_process(_CPU_S, _MEMORY_BYTES)
    logging.disable()
    content, kind = sys.stdin.buffer.read(), sys.argv[1]
    try:
        text = _markdown(_html_of_docx(content) if kind == "docx" else content)
        said = {"text": text} if text else {"reason": "has no text"}
    except Exception as error:  # the libraries raise whatever a broken file leads to
        cause = f"{type(error).__name__}: {error}"[:_SHOWN_CHARS]
        said = {"reason": f"cannot be read as {kind.upper()} ({cause})"}
    sys.stdout.write(json.dumps(said))


def _html_of_docx(content: bytes) -> str:
    import mammoth

    html: str = mammoth.convert_to_html(BytesIO(content), convert_image=_no_image).value
    return html


def _no_image(image: object) -> list[object]:
    return []


def _markdown(html: str | bytes) -> str:
    from bs4 import BeautifulSoup
    from markdownify import MarkdownConverter

    sys.setrecursionlimit(20_000)
    parsed = BeautifulSoup(html, "html.parser")
    for each in parsed(_LEFT_OUT):
        each.decompose()
    converter = MarkdownConverter(heading_style="atx", strip=["a", "img"], bullets="-")
    text: str = converter.convert_soup(parsed.body or parsed)
    lines = (line.rstrip() for line in text.replace("\0", "").splitlines())
    text = "\n".join(lines)
    while "\n\n\n" in text:
        text = text.replace("\n\n\n", "\n\n")
    return text.encode("utf-8", "replace").decode().strip()


if __name__ == "__main__":
    _main()
