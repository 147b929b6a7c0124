"""EPUB books as Markdown, chapter by chapter."""

from __future__ import annotations

import posixpath
from urllib.parse import unquote

from gemserve.files.formats import Refused
from gemserve.files.formats.html_text import read as read_page
from gemserve.files.formats.zip_parts import Parts, events

_CONTAINER, _ENCRYPTION = "META-INF/container.xml", "META-INF/encryption.xml"
_PAGES = ("application/xhtml+xml", "text/html")


def read(content: bytes) -> str:
    parts = Parts(content, "EPUB")
    chapters = _chapters(parts)
    if not _encrypted(parts).isdisjoint(chapters):
        raise Refused("is encrypted, so that only a reader with its key can open it")
    return "\n\n".join(filter(None, (read_page(parts.read(each)).strip() for each in chapters)))


def _chapters(parts: Parts) -> list[str]:
    """The parts that are read one after the other."""
    package = next(
        attributes.get("full-path", "")
        for event, tag, attributes in events(parts.read(_CONTAINER), _CONTAINER)
        if event == "start" and tag == "rootfile"
    )
    folder = posixpath.dirname(package)
    pages: dict[str, str] = {}
    order: list[str] = []
    for event, tag, attributes in events(parts.read(package), package):
        if event == "start" and tag == "item" and attributes.get("media-type") in _PAGES:
            path = posixpath.join(folder, unquote(attributes.get("href", "")))
            pages[attributes.get("id", "")] = posixpath.normpath(path)
        elif event == "start" and tag == "itemref":
            order.append(attributes.get("idref", ""))
    return [pages[each] for each in dict.fromkeys(order) if each in pages]


def _encrypted(parts: Parts) -> set[str]:
    """Parts that are encrypted. Of books without a key these are fonts at most."""
    if _ENCRYPTION not in parts.names:
        return set()
    return {
        unquote(attributes.get("URI", ""))
        for event, tag, attributes in events(parts.read(_ENCRYPTION), _ENCRYPTION)
        if event == "start" and tag == "CipherReference"
    }
