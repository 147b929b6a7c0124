"""Draws the pictures of docs/how-it-works.md: `python -m website.draw_pictures`.

Each is an SVG on a ground of its own, light or dark as the reader's system is, so that it can be
read on any page. Its width is such that its text is legible on a phone.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "docs/pictures"
WIDTH = 520
MARGIN = 16
STYLE = """
.ground { fill: #f7f8fb; stroke: #d5d9e2 }
text { font: 15px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; fill: #1c2330 }
.small { font-size: 13px; fill: #4a5365 }
.always { fill: #94671a } .document { fill: #c3cad8 } .kept { fill: #2f6fd0 }
.read { fill: #4a78c2 } .cached { fill: #2f7d55 } .unread { fill: none; stroke: #a3acbd }
.on { fill: #ffffff; font-size: 13px } .line { stroke: #6b7488; stroke-width: 1.5; fill: none }
@media (prefers-color-scheme: dark) {
.ground { fill: #1d222c; stroke: #3a4252 }
text { fill: #e6eaf2 } .small { fill: #b4bccb }
.document { fill: #465064 }
.unread { stroke: #77819a } .line { stroke: #9aa4b8 }
}
""".strip()


class Picture:
    """Shapes and texts, from the top down. `title` is read to those who cannot see it."""

    def __init__(self, name: str, title: str, height: int) -> None:
        self.name, self.title, self.height = name, title, height
        self.parts: list[str] = []

    def box(self, x: float, y: float, width: float, height: float, kind: str) -> None:
        self.parts.append(
            f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" '
            'rx="2"/>'
        )

    def text(self, x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> None:
        attributes = f' class="{kind}"' if kind else ""
        if anchor != "start":
            attributes += f' text-anchor="{anchor}"'
        self.parts.append(f'<text x="{x:g}" y="{y:g}"{attributes}>{escape(words)}</text>')

    def arrow(self, x: float, y: float, to_x: float, to_y: float) -> None:
        self.parts.append(
            f'<path class="line" marker-end="url(#tip)" d="M{x:g} {y:g}L{to_x:g} {to_y:g}"/>'
        )

    def svg(self) -> str:
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height}" '
            f'width="{WIDTH}" height="{self.height}" role="img">',
            f"<title>{escape(self.title)}</title>",
            f"<style>{STYLE}</style>",
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            'markerHeight="7" orient="auto"><path class="line" d="M1 1L7 4L1 7"/></marker></defs>',
            f'<rect class="ground" x="0.5" y="0.5" width="{WIDTH - 1}" '
            f'height="{self.height - 1}" rx="8"/>',
            *self.parts,
            "</svg>",
        ]
        return "\n".join(lines) + "\n"


def draw_prompt() -> Picture:
    picture = Picture(
        "how_prompt",
        "A prompt: instructions and the question are always read, the document is filtered",
        232,
    )
    picture.text(MARGIN, 30, "A prompt of 6,000 tokens")
    y, height = 46, 46
    for x, width, kind, words in (
        (MARGIN, 96, "always", "instructions"),
        (MARGIN + 98, 300, "document", ""),
        (MARGIN + 400, 88, "always", "question"),
    ):
        picture.box(x, y, width, height, kind)
        if words:
            picture.text(x + width / 2, y + 28, words, "on", "middle")
    picture.text(MARGIN + 248, y + 28, "documents, long messages, results", "small", "middle")
    y = 124
    for row, (kind, words) in enumerate(
        (
            ("always", "always read: instructions, tools, calls, the question"),
            ("document", "filtered: here the budget keep counts"),
        )
    ):
        picture.box(MARGIN, y + 30 * row, 18, 18, kind)
        picture.text(MARGIN + 28, y + 30 * row + 14, words)
    picture.text(MARGIN, 208, "A prompt of up to 2,048 tokens is read whole.", "small")
    return picture


def draw_pass() -> Picture:
    picture = Picture(
        "how_pass",
        "The filter pass: lower layers read all tokens, all layers read the kept ones",
        330,
    )
    picture.text(MARGIN, 30, "Reading whole: every layer reads every token")
    columns, layers, width, height = 30, 6, 16.27, 12
    top = 44

    def grid(y: float, first_layer: int, kind: str, kept: frozenset[int] | None = None) -> None:
        for layer in range(layers):
            for column in range(columns):
                shown = kind if layer >= first_layer and (kept is None or column in kept) else ""
                if shown or kept is None:
                    picture.box(
                        MARGIN + column * width,
                        y + layer * height,
                        width - 2,
                        height - 2,
                        shown or "unread",
                    )

    grid(top, 0, "document")
    picture.text(MARGIN, 144, "1. Filter pass: only the layers 0 to r read every token")
    grid(158, layers - 2, "read")
    picture.text(MARGIN, 258, "2. All layers read the kept tokens, and answer")
    for column in range(5):
        for layer in range(layers):
            picture.box(MARGIN + column * width, 270 + layer * 8, width - 2, 6.5, "kept")
    picture.text(MARGIN + 5 * width + 14, 292, "The work is the coloured area:", "small")
    picture.text(
        MARGIN + 5 * width + 14, 311, "r/layers of a full read, and a little more.", "small"
    )
    return picture


def draw_kept() -> Picture:
    picture = Picture(
        "how_kept",
        "What is kept: passages are ranked by attention and by words, the best are kept whole",
        318,
    )
    picture.text(MARGIN, 30, "Each passage has a rank by attention and by words")
    passages = (0.12, 0.08, 0.34, 0.95, 0.16, 0.22, 0.7, 0.1, 0.28, 0.14)
    words = (0.0, 0.1, 0.2, 0.9, 0.0, 0.5, 0.3, 0.0, 0.1, 0.2)
    kept = {3, 5, 6}
    width = (WIDTH - 2 * MARGIN) / len(passages)
    base = 130
    for at, (attention, shared) in enumerate(zip(passages, words, strict=True)):
        x = MARGIN + at * width
        picture.box(x + 6, base - 80 * attention, 14, 80 * attention, "kept")
        picture.box(x + 24, base - 80 * shared, 14, 80 * shared, "always")
        picture.box(x + 1, base + 10, width - 3, 30, "kept" if at in kept else "document")
        if at in kept:
            picture.text(x + width / 2 - 1, base + 30, "kept", "on", "middle")
    picture.box(MARGIN, 188, 14, 14, "kept")
    picture.text(MARGIN + 22, 200, "attention of the question to the passage", "small")
    picture.box(MARGIN, 210, 14, 14, "always")
    picture.text(MARGIN + 22, 222, "words that it shares with the question", "small")
    picture.text(MARGIN, 256, "The model then reads, from position 0:")
    x = float(MARGIN)
    for kind, size, name in (
        ("always", 96, "instructions"),
        ("kept", 70, "passage"),
        ("kept", 70, "passage"),
        ("kept", 70, "passage"),
        ("always", 78, "question"),
    ):
        picture.box(x, 268, size, 32, kind)
        picture.text(x + size / 2, 289, name, "on", "middle")
        x += size + 4
    return picture


def draw_windows() -> Picture:
    picture = Picture(
        "how_windows",
        "Windows: a document is cut into parts, each read alone with the question behind it",
        318,
    )
    picture.text(MARGIN, 30, "One long document, cut where its text suggests it")
    sizes = (120, 92, 150, 114)
    x = float(MARGIN)
    for size in sizes:
        picture.box(x, 44, size, 26, "document")
        x += size + 4
    picture.text(MARGIN, 104, "Each window is read from position 0, question behind it")
    for row, size in enumerate(sizes):
        y = 116 + 34 * row
        picture.box(MARGIN, y, 22, 26, "always")
        picture.box(MARGIN + 24, y, size * 1.5, 26, "read")
        picture.text(MARGIN + 24 + size * 0.75, y + 18, f"window {row + 1}", "on", "middle")
        picture.box(MARGIN + 26 + size * 1.5, y, 66, 26, "always")
        picture.text(MARGIN + 59 + size * 1.5, y + 18, "question", "on", "middle")
        picture.arrow(MARGIN + 98 + size * 1.5, y + 13, 400, 181)
    picture.text(404, 174, "all tokens are", "small")
    picture.text(404, 191, "ranked together,", "small")
    picture.text(404, 208, "and chosen once", "small")
    picture.text(MARGIN, 276, "Time grows with the length, not with its square.", "small")
    picture.text(
        MARGIN, 297, "No window is longer than the model's context; the document may be.", "small"
    )
    return picture


def draw_cache() -> Picture:
    picture = Picture(
        "how_cache",
        "The document cache: a further question reads only what is new",
        318,
    )
    rows = (
        (
            "First question",
            (("read", 330, "document, read by layers 0 to r"), ("read", 96, "question")),
        ),
        (
            "Second question",
            (("cached", 330, "document, found in the cache"), ("read", 96, "question")),
        ),
        (
            "The same windows elsewhere, one changed",
            (
                ("read", 70, "new text"),
                ("cached", 108, "window 1"),
                ("read", 80, "changed"),
                ("cached", 80, "window 3"),
                ("read", 84, "question"),
            ),
        ),
    )
    for row, (title, parts) in enumerate(rows):
        y = 16 + 78 * row
        picture.text(MARGIN, y + 16, title)
        x = float(MARGIN)
        for kind, size, words in parts:
            picture.box(x, y + 26, size, 32, kind)
            picture.text(x + size / 2, y + 47, words, "on", "middle")
            x += size + 4
    for row, (kind, words) in enumerate(
        (("read", "read now, by the lower layers"), ("cached", "taken from the document cache"))
    ):
        picture.box(MARGIN + 250 * row, 262, 14, 14, kind)
        picture.text(MARGIN + 22 + 250 * row, 274, words, "small")
    picture.text(
        MARGIN, 300, "The kept tokens are read anew by all layers for each question.", "small"
    )
    return picture


PICTURES = (draw_prompt, draw_pass, draw_kept, draw_windows, draw_cache)


def main() -> None:
    for draw in PICTURES:
        picture = draw()
        (FOLDER / f"{picture.name}.svg").write_text(picture.svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
