"""Mail: its main headers, the text that people read, and the names of what is attached."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from email import policy
from email.message import EmailMessage
from email.parser import BytesParser
from typing import cast

from gemserve.files.formats import Refused
from gemserve.files.plain_text import NotText, declared, decode

MOST_DEPTH = 50  # mails and multiparts in one another
_HEADERS = ("From", "To", "Cc", "Date", "Subject")


def read(content: bytes) -> str:
    mail = BytesParser(policy=policy.default).parsebytes(content)
    return "\n\n".join(text for text in _texts(mail, 0) if text.strip())


def _texts(mail: EmailMessage, depth: int) -> Iterator[str]:
    """The headers, and the texts of all parts."""
    yield "\n".join(f"{name}: {mail[name]}" for name in _HEADERS if mail[name])
    yield from _parts(mail, depth)


def _parts(part: EmailMessage, depth: int) -> Iterator[str]:
    if depth > MOST_DEPTH:
        raise Refused(f"has parts more than {MOST_DEPTH} deep in one another, the limit")
    kind = part.get_content_type()
    if kind == "message/rfc822":
        for each in part.iter_parts():
            yield from _texts(cast(EmailMessage, each), depth + 1)
    elif kind == "multipart/alternative":
        parts = [cast(EmailMessage, each) for each in part.iter_parts()]
        best = _best(parts)
        for each in parts:
            yield from _parts(each, depth + 1) if each is best else _attached(each, depth + 1)
    elif part.is_multipart():
        for each in part.iter_parts():
            yield from _parts(cast(EmailMessage, each), depth + 1)
    elif kind.startswith("text/"):
        yield _text(part, kind)
    else:
        yield f"Attached: {part.get_filename() or 'without a name'} ({kind})"


def _attached(part: EmailMessage, depth: int) -> Iterator[str]:
    """The texts of what is attached within a part that is not read itself."""
    if depth > MOST_DEPTH:
        raise Refused(f"has parts more than {MOST_DEPTH} deep in one another, the limit")
    kind, is_attached = part.get_content_type(), part.is_attachment()
    # pictures that the other text shows, and what it says in another form
    is_shown = not is_attached and ("Content-ID" in part or kind == "text/calendar")
    if is_shown:
        return
    if part.get_filename() or is_attached or kind == "message/rfc822":
        yield from _parts(part, depth)
    elif part.is_multipart():
        for each in part.iter_parts():
            yield from _attached(cast(EmailMessage, each), depth + 1)


def _best(parts: list[EmailMessage]) -> EmailMessage | None:
    """The plain text, unless it is blank: it says the same as the others, which end with the best.

    An invitation for a calendar, which may be the last one, is none of these.
    """
    for each in parts:
        kind = each.get_content_type()
        if kind == "text/plain" and any(map(str.isalnum, _text(each, kind))):
            return each
    shown = [each for each in parts if each.get_content_type() != "text/calendar"]
    return next(reversed(shown or parts), None)


def _text(part: EmailMessage, kind: str) -> str:
    payload = part.get_payload(decode=True)
    assert isinstance(payload, bytes)
    label = part.get_content_charset()
    name = part.get_filename()
    title = f"Attached: {name}\n" if name else ""
    try:
        if kind != "text/html":
            return title + decode(payload, label).replace("\r\n", "\n")
        if importlib.util.find_spec("markdownify") is None:
            return f'{title}(HTML, which is not read here: pip install "gemserve[library]")'
        from gemserve.files.formats.html_text import markdown

        return title + markdown(decode(payload, label or declared(payload)))
    except NotText as error:
        return f"{title}({error})"
