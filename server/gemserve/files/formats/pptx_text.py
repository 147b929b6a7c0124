"""PowerPoint's PPTX: a heading for each slide, its text, and the speaker's notes."""

from __future__ import annotations

from collections.abc import Iterator

from gemserve.files.formats.zip_parts import Parts, events

_PRESENTATION = "ppt/presentation.xml"
_TITLES = ("title", "ctrTitle")
_NUMBERS = ("sldNum", "dt", "ftr", "hdr", "sldImg")  # places for what all slides have


def read(content: bytes) -> str:
    parts = Parts(content, "PPTX")
    return "\n\n".join(
        _slide(parts, name, number) for number, name in enumerate(_slides(parts), start=1)
    )


def _slides(parts: Parts) -> list[str]:
    targets = parts.targets(_PRESENTATION)
    ids = [
        attributes.get(":id", "")
        for event, tag, attributes in events(parts.read(_PRESENTATION), _PRESENTATION)
        if event == "start" and tag == "sldId"
    ]
    return [targets[each][1] for each in ids if each in targets]


def _slide(parts: Parts, name: str, number: int) -> str:
    shapes = list(_shapes(parts, name))
    titles = [" ".join(text.split()) for place, text in shapes if place in _TITLES]
    lines = [": ".join([f"## Slide {number}", *titles[:1]])]
    lines += [text for place, text in shapes if place not in (*_TITLES, *_NUMBERS)]
    for kind, notes in parts.targets(name).values():
        if kind == "notesSlide":
            said = [text for place, text in _shapes(parts, notes) if place not in _NUMBERS]
            lines += ["Notes: " + "\n".join(said)] if said else []
    return "\n\n".join(lines)


def _shapes(parts: Parts, name: str) -> Iterator[tuple[str, str]]:
    """The place on the slide, which may be "", and the text of each shape that has one."""
    place, paragraphs, is_text = "", [""], False
    rows: list[list[str]] = []  # of a table
    is_again = False
    for event, tag, attributes in events(parts.read(name), name):
        if tag == "Fallback" and event != "text":  # what was there, for older programs
            is_again = event == "start"
        elif is_again:
            continue
        elif event == "text" and is_text:
            paragraphs[-1] += tag
        elif event == "start" and tag == "relIds":
            _, diagram = parts.targets(name).get(attributes.get(":dm", ""), ("", ""))
            if diagram in parts.names:
                paragraphs += _diagram(parts, diagram)
        elif event == "start" and tag == "ph":
            place = attributes.get("type", "body")
        elif tag == "t":
            is_text = event == "start"
        elif event == "start" and tag == "br":
            paragraphs[-1] += "\n"
        elif event == "end" and tag == "p":
            paragraphs.append("")
        elif event == "start" and tag == "tr":
            rows.append([])
        elif event == "end" and tag == "tc" and rows:
            rows[-1].append(" ".join(" ".join(paragraphs).split()))
            paragraphs = [""]
        elif event == "end" and tag == "tbl":
            paragraphs, rows = list(_table(rows)), []
        elif event == "end" and tag in ("sp", "graphicFrame"):
            text = "\n".join(filter(str.strip, paragraphs))
            if text:
                yield place, text
            place, paragraphs = "", [""]


def _diagram(parts: Parts, name: str) -> Iterator[str]:
    """The text of each point of a SmartArt diagram. `pres`: points of its drawing, without any."""
    words, is_read, is_text = "", False, False
    for event, tag, attributes in events(parts.read(name), name):
        if event == "text":
            words += tag if is_read and is_text else ""
        elif tag == "t":
            is_text = event == "start"
        elif event == "end" and tag == "p":
            words += "\n"
        elif event == "start" and tag == "pt":
            words, is_read = "", attributes.get("type") != "pres"
        elif event == "end" and tag == "pt":
            yield " ".join(words.split())


def _table(rows: list[list[str]]) -> Iterator[str]:
    """The lines of a table as Markdown."""
    for number, row in enumerate(rows):
        yield f"| {' | '.join(row)} |"
        if number == 0:
            yield f"| {' | '.join('---' for _ in row)} |"
