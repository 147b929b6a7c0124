"""Word's DOCX as Markdown."""

from __future__ import annotations

from io import BytesIO

from gemserve.files.formats.html_text import markdown
from gemserve.files.formats.zip_parts import Parts, events

_DOCUMENT = "word/document.xml"


def read(content: bytes) -> str:
    import mammoth

    parts = Parts(content, "DOCX")
    parts.check_size()
    if _DOCUMENT in parts.names:
        for _ in events(parts.read(_DOCUMENT), _DOCUMENT):  # limits that the library does not have
            pass
    html: str = mammoth.convert_to_html(BytesIO(content), convert_image=_no_image).value
    return markdown(html)


def _no_image(image: object) -> list[object]:
    return []
