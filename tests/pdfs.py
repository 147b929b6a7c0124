"""Small PDF files for tests, written by hand: the tested library does not write its own tests."""

from __future__ import annotations

import zlib
from collections.abc import Sequence


def pdf_of(pages: Sequence[str], *, content: bytes | None = None) -> bytes:
    """A PDF with one line of ASCII text on each page; `content` replaces what draws the pages."""
    count = len(pages)
    kids = " ".join(f"{4 + 2 * i} 0 R" for i in range(count))
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        f"<< /Type /Pages /Kids [{kids}] /Count {count} >>".encode(),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    for i, text in enumerate(pages):
        drawn = f"BT /F1 12 Tf 72 720 Td ({text}) Tj ET" if text else ""
        packed = zlib.compress(drawn.encode() if content is None else content)
        objects += [
            (
                f"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents {5 + 2 * i} 0 R "
                "/Resources << /Font << /F1 3 0 R >> >> >>"
            ).encode(),
            b"<< /Length %d /Filter /FlateDecode >>\nstream\n%s\nendstream" % (len(packed), packed),
        ]
    return _file_of(objects)


def _file_of(objects: Sequence[bytes]) -> bytes:
    out = b"%PDF-1.7\n"
    places = []
    for number, each in enumerate(objects, 1):
        places.append(len(out))
        out += b"%d 0 obj\n%s\nendobj\n" % (number, each)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    start = len(out)
    size = len(objects) + 1
    out += b"xref\n0 %d\n0000000000 65535 f \n%s" % (size, table)
    return out + b"trailer\n<< /Size %d /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF" % (size, start)
