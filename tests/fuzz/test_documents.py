"""A changed PDF, office file or page has a text or a short reason, within the limits."""

from __future__ import annotations

import json
import zipfile
from io import BytesIO

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemserve.errors import LibraryError, PdfsBusy, RequestError
from gemserve.files.converting import convert, kind_of
from gemserve.files.limited_process import ReadingLimits
from tests.fuzz.cases import bounded, cases, changed_bytes
from tests.library import test_formats as files
from tests.pdfs import pdf_of

pytest.importorskip("mammoth", reason='"gemserve[library]" is not installed')

LIMITS = ReadingLimits(text_bytes=1 << 20, pages=100, cpu_s=20, wall_s=240.0)
ROW = '<row r="1"><c r="A1" t="s"><v>0</v></c><c r="B1" s="0"><v>45000.5</v></c></row>'
MAIL = (
    b"From: a@example.org\r\nSubject: =?utf-8?q?The_ferry?=\r\nMIME-Version: 1.0\r\n"
    b'Content-Type: multipart/mixed; boundary="b"\r\n\r\n--b\r\nContent-Type: text/html; charset='
    b"iso-8859-1\r\nContent-Transfer-Encoding: quoted-printable\r\n\r\n<p>It leaves =E0 9.</p>\r\n"
    b"--b--\r\n"
)
PAGE = b"<html><head><meta charset=utf-8></head><body><h1>Ferry</h1><table><tr><td>9</table><pre>x"
PLAIN = {
    "a.pdf": pdf_of(["The ferry leaves at nine.", "It costs four pounds."]),
    "b.pdf": pdf_of(["x"], content=b"BT /F1 12 Tf [(The) -250 (ferry)] TJ T* <0041> Tj ET"),
    "a.html": PAGE,
    "a.csv": b'place,"opens, at"\r\nhall,9\r\n"a ""b""",\r\n',
    "a.eml": MAIL,
    "a.rtf": rb"{\rtf1\ansi{\fonttbl\f0 Arial;}\f0 The ferry \u233? {\b leaves} at \'e0 9.\par}",
    "a.ipynb": json.dumps(files.NOTEBOOK).encode(),
}
ZIPPED = {
    "a.docx": files.docx_of(
        "<w:p><w:pPr><w:numPr><w:ilvl w:val='0'/></w:numPr></w:pPr><w:r><w:t>The ferry</w:t></w:r>"
        "</w:p><w:tbl><w:tr><w:tc><w:tcPr><w:gridSpan w:val='2'/></w:tcPr><w:p/></w:tc></w:tr>"
        "</w:tbl>"
    ),
    "a.xlsx": files.xlsx_of(
        ROW,
        "<si><t>ferry</t></si>",
        '<numFmts><numFmt numFmtId="164" formatCode="yyyy-mm-dd"/></numFmts><cellXfs><xf '
        'numFmtId="164"/></cellXfs>',
    ),
    "a.pptx": files.pptx_of(files.shape("The ferry", "title"), files.shape("leaves at nine")),
    "a.epub": files.epub_of(PAGE),
}


@st.composite
def changed_files(draw: st.DrawFn) -> tuple[str, bytes]:
    """A name and a content. Half of the ZIP files are changed within one of their parts."""
    name = draw(st.sampled_from([*PLAIN, *ZIPPED]))
    if name in PLAIN or draw(st.booleans()):
        content = PLAIN.get(name) or ZIPPED[name]
        return name, draw(changed_bytes(content))
    with zipfile.ZipFile(BytesIO(ZIPPED[name])) as file:
        parts = {part: file.read(part) for part in file.namelist()}
    part = draw(st.sampled_from(sorted(parts)))
    return name, files.zipped({**parts, part: draw(changed_bytes(parts[part]))})


@given(changed_files())
@cases(8)
def test_a_file_has_a_text_or_a_reason(drawn: tuple[str, bytes]) -> None:
    name, content = drawn
    kind = kind_of(content, name)
    if kind == "text":
        return
    with bounded("document file", cpu_s=30):
        try:
            text, page_starts = convert(content, name, kind, LIMITS)
        except (LibraryError, PdfsBusy, RequestError) as error:
            assert 0 < len(str(error).encode()) < 1000  # it goes into a reply
        else:
            assert text
            assert "\0" not in text
            assert len(text.encode()) <= LIMITS.text_bytes
            assert sorted(page_starts) == list(page_starts)
            assert all(0 <= start <= len(text) for start in page_starts)
