"""HTML as Markdown, so that headings are known."""

from __future__ import annotations

import re
import sys

from gemserve.files.formats import Refused
from gemserve.files.plain_text import NotText, decode

MOST_DEPTH = 20_000  # calls of Python: elements in one another take some of them each
_LEFT_OUT = ["script", "style", "template", "noscript", "svg", "nav"]
_LABEL_WITHIN = 1024  # bytes, as the HTML standard says
_LABEL = re.compile(rb"(?:charset|encoding)\s*=\s*[\"']?\s*([\w:.-]+)", re.IGNORECASE)


def read(content: bytes) -> str:
    try:
        return markdown(decode_page(content))
    except NotText as error:
        raise Refused(str(error)) from None


def decode_page(content: bytes) -> str:
    """The characters of a page, by its mark or by what it says of itself. Raises `NotText`."""
    label = _LABEL.search(content[:_LABEL_WITHIN])
    said = label[1].decode("ascii", "replace") if label else None
    # who can read that label as ASCII reads no UTF-16
    return decode(content, None if said is None or said.lower().startswith("utf-16") else said)


def markdown(html: str) -> str:
    from bs4 import BeautifulSoup
    from markdownify import MarkdownConverter

    sys.setrecursionlimit(MOST_DEPTH)
    parsed = BeautifulSoup(html, "html.parser")
    for each in parsed(_LEFT_OUT):
        each.decompose()
    converter = MarkdownConverter(heading_style="atx", strip=["a", "img"], bullets="-")
    text: str = converter.convert_soup(parsed.body or parsed)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(line.rstrip() for line in text.splitlines()))
