"""Files of other formats: what people read in them, and the limits that hostile ones meet."""

from __future__ import annotations

import json
import zipfile
from email.message import EmailMessage
from io import BytesIO

import pytest

from gemserve.files import converting, file_text, formats
from gemserve.files.converting import LIMITS, kind_of
from gemserve.files.file_text import NoText, read_file, text_of
from gemserve.files.formats import zip_parts
from gemserve.files.limited_process import ReadingLimits

HTML = pytest.mark.skipif(
    not __import__("importlib.util").util.find_spec("mammoth"),
    reason='"gemserve[library]" is not installed',
)
R = 'xmlns:r="http://schemas.openxmlformats.org/officeDocument/2006/relationships"'
KIND = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
PICTURE = "iVBORw0KGgo" * 20


def zipped(parts: dict[str, str | bytes]) -> bytes:
    out = BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in parts.items():
            file.writestr(name, content)
    return out.getvalue()


def relations(*targets: tuple[str, str]) -> str:
    return (
        "<Relationships>"
        + "".join(
            f'<Relationship Id="r{i}" Type="{KIND}/{kind}" Target="{target}"/>'
            for i, (kind, target) in enumerate(targets)
        )
        + "</Relationships>"
    )


def xlsx_of(sheet: str, strings: str = "", styles: str = "") -> bytes:
    return zipped(
        {
            "xl/workbook.xml": f'<workbook {R}><sheets><sheet name="Ferries" r:id="r0"/></sheets>'
            "</workbook>",
            "xl/_rels/workbook.xml.rels": relations(
                ("worksheet", "worksheets/sheet1.xml"),
                ("sharedStrings", "/xl/strings.xml"),
                ("styles", "styles.xml"),
            ),
            "xl/strings.xml": f"<sst>{strings}</sst>",
            "xl/styles.xml": f"<styleSheet>{styles}</styleSheet>",
            "xl/worksheets/sheet1.xml": f"<worksheet><sheetData>{sheet}</sheetData></worksheet>",
        }
    )


def pptx_of(slide: str, notes: str = "", diagram: str = "") -> bytes:
    return zipped(
        {
            "ppt/presentation.xml": f'<p {R}><sldIdLst><sldId id="256" r:id="r0"/></sldIdLst></p>',
            "ppt/_rels/presentation.xml.rels": relations(("slide", "slides/s.xml")),
            "ppt/slides/s.xml": f"<sld>{slide}</sld>",
            "ppt/slides/_rels/s.xml.rels": relations(
                ("notesSlide", "../notes/n.xml"), ("diagramData", "../diagrams/data1.xml")
            ),
            "ppt/diagrams/data1.xml": f"<dataModel>{diagram}</dataModel>",
            "ppt/notes/n.xml": f"<notes>{notes}</notes>",
        }
    )


def epub_of(page: bytes | str, more: dict[str, str | bytes] | None = None) -> bytes:
    manifest = '<item id="a" href="my%20page.xhtml" media-type="application/xhtml+xml"/>'
    return zipped(
        {
            "META-INF/container.xml": '<c><rootfile full-path="OPS/book.opf"/></c>',
            "OPS/book.opf": f'<package>{manifest}<itemref idref="a"/></package>',
            "OPS/my page.xhtml": page,
            **(more or {}),
        }
    )


def docx_of(document: str) -> bytes:
    types = (
        '<Types xmlns="http://schemas.openxmlformats.org/package/2006/content-types">'
        '<Default Extension="xml" ContentType="application/xml"/></Types>'
    )
    word = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
    return zipped(
        {
            "[Content_Types].xml": types,
            "_rels/.rels": '<Relationships xmlns="http://schemas.openxmlformats.org/package/2006/'
            f'relationships"><Relationship Id="r1" Type="{KIND}/officeDocument" '
            'Target="word/document.xml"/></Relationships>',
            "word/document.xml": f'<w:document xmlns:w="{word}"><w:body>{document}</w:body>'
            "</w:document>",
        }
    )


def refusal(content: bytes, name: str, limits: ReadingLimits = LIMITS) -> str:
    with pytest.raises(Exception, match=r".") as caught:
        read_file(content, name, limits)
    assert isinstance(caught.value, NoText | converting.LibraryError), caught.value
    return str(caught.value)


def shape(text: str, place: str = "") -> str:
    mark = f'<ph type="{place}"/>' if place else ""
    return f"<sp>{mark}<p><r><t>{text}</t></r></p></sp>"


NOTEBOOK = {
    "metadata": {"kernelspec": {"language": "python"}},
    "cells": [
        {
            "cell_type": "markdown",
            "source": ["# Ferries\n", f"![](data:a/b;base64,{PICTURE})"],
        },
        {
            "cell_type": "code",
            "source": "count()",
            "outputs": [
                {"output_type": "stream", "text": ["12 \x1b[31mferries\x1b[0m\n"]},
                {
                    "output_type": "display_data",
                    "data": {"image/png": PICTURE, "text/plain": "<Figure>"},
                },
                {"output_type": "error", "ename": "KeyError", "evalue": "'buoy'", "traceback": []},
            ],
        },
    ],
}
SHEET = (
    '<row><c r="A1" t="s"><v>0</v></c><c r="B1" t="s"><v>1</v></c><c r="D1" t="inlineStr"><is>'
    "<t>Open</t></is></c></row>"
    '<row><c r="A2" t="str"><v>Malmo</v></c><c r="B2" s="1"><v>45000.375</v></c>'
    '<c r="D2" t="b"><v>1</v></c></row><row/><row><c r="D4"><v>7.5</v></c></row>'
)
STRINGS = "<si><t>Goal</t></si><si><r><t>Lea</t></r><r><t>ves</t></r><rPh><t>x</t></rPh></si>"
STYLES = '<cellXfs><xf numFmtId="0"/><xf numFmtId="22"/></cellXfs>'
RTF = (
    rb"{\rtf1\ansi\ansicpg1252{\fonttbl{\f0 Arial;}}{\*\generator Word;}{\pict\bin4 }}}}}"
    rb"{\b Caf\'e9} \u8364?5 \u-10179?\u-8704?\par Next {\v hidden}\{\~\cell a\row}"
)


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        (
            "a.ipynb",
            json.dumps(NOTEBOOK).encode(),
            "# Ferries\n![]()\n\n```python\ncount()\n```\n\nOutput:\n12 ferries\n\n"
            "Output:\n<Figure>\n\nOutput:\nKeyError: 'buoy'",
        ),
        ("a.csv", b"Goal,Leaves\nMalmo,9\n", "Goal; Leaves\nGoal: Malmo; Leaves: 9"),
        ("a.csv", b'Goal;Caf\xe9\nMalmo;"a\nb"\n', "Goal; Café\nGoal: Malmo; Café: a b"),
        ("a.csv", b" \n,\nGoal,Leaves\n\nMalmo,9\n", "Goal; Leaves\n\nGoal: Malmo; Leaves: 9"),
        ("a.tsv", b"1\t2\n3\t4\n", "1; 2\n3; 4"),
        ("a.csv", b"only one column\nand more\n", "only one column\nand more"),
        (
            "a.xlsx",
            xlsx_of(SHEET, STRINGS, STYLES),
            "## Ferries\n\nGoal; Leaves; Open\n"
            "Goal: Malmo; Leaves: 2023-03-15 09:00:00; Open: TRUE\nOpen: 7.5",
        ),
        (
            "a.pptx",
            pptx_of(shape("Ferries", "title") + shape("To Malmo"), shape("At nine", "body")),
            "## Slide 1: Ferries\n\nTo Malmo\n\nNotes: At nine",
        ),
        ("a.rtf", RTF, "Café €5 😀\nNext hidden{\u00a0 | a"),
        ("renamed.txt", RTF, "Café €5 😀\nNext hidden{\u00a0 | a"),
        pytest.param(
            "a.epub",
            epub_of("<h1>Ferries</h1><p>At nine.</p>"),
            "# Ferries\n\nAt nine.",
            marks=HTML,
        ),
        pytest.param(
            "a.html",
            "<meta charset=windows-1251><h1>Паром</h1>".encode("cp1251"),
            "# Паром",
            marks=HTML,
        ),
        pytest.param(
            "a.html", b"<meta charset='iso-8859-1'><p>5 \x80 \x93so\x94</p>", "5 € “so”", marks=HTML
        ),
        pytest.param(
            "a.html",
            "<script charset=utf-8></script><meta charset=windows-1251>Паром".encode("cp1251"),
            "Паром",
            marks=HTML,
        ),
        pytest.param(
            "a.html",
            "<meta charset=utf-8><p>Café".encode() + b" \xff</p>",
            "Café \ufffd",
            marks=HTML,
        ),
        pytest.param(
            "a.docx", docx_of("<w:p><w:r><w:t>At nine.</w:t></w:r></w:p>"), "At nine.", marks=HTML
        ),
    ],
)
def test_what_people_read_is_the_text(name: str, content: bytes, text: str) -> None:
    assert text_of(content, name).text == text


def text_within(content: bytes, kind: str) -> str:
    """What `text_of` reads, in this process."""
    return formats.read(kind, content).strip()


def row(*cells: str) -> str:
    """A row of Word: "^" stands for a cell that goes on from the row above."""
    return "<w:tr>" + "".join(map(_word_cell, cells)) + "</w:tr>"


def _word_cell(text: str) -> str:
    merge = {"^": "<w:vMerge/>", "Malmo": '<w:vMerge w:val="restart"/>'}.get(text, "")
    shown = "" if text == "^" else f"<w:r><w:t>{text}</w:t></w:r>"
    return f"<w:tc><w:tcPr>{merge}</w:tcPr><w:p>{shown}</w:p></w:tc>"


def slide_row(*cells: str) -> str:
    within = "".join(f"<tc><txBody><p><r><t>{c}</t></r></p></txBody></tc>" for c in cells)
    return f"<tr>{within}</tr>"


TABLE = """| Goal | Day | Leaves |
| --- | --- | --- |
| Malmo | Monday | 9 |
|  | Sunday | 11 |"""
TITLES = "<w:tr><w:trPr><w:tblHeader/></w:trPr>"


@HTML
@pytest.mark.parametrize(
    ("kind", "content"),
    [
        (
            "docx",
            docx_of(
                "<w:tbl>"
                + row("Goal", "Day", "Leaves").replace("<w:tr>", TITLES)
                + row("Malmo", "Monday", "9")
                + row("^", "Sunday", "11")
                + "</w:tbl>"
            ),
        ),
        (
            "html",
            b"<table><tr><th>Goal</th><th>Day</th><th>Leaves</th></tr><tr><td rowspan=2>Malmo</td>"
            b"<td>Monday</td><td>9</td></tr><tr><td>Sunday</td><td>11</td></tr></table>",
        ),
        (
            "pptx",
            pptx_of(
                "<graphicFrame><tbl>"
                + slide_row("Goal", "Day", "Leaves")
                + slide_row("Malmo", "Monday", "9")
                + slide_row("", "Sunday", "11")
                + "</tbl></graphicFrame>"
            ),
        ),
    ],
)
def test_cells_below_a_merged_one_stay_in_their_columns(kind: str, content: bytes) -> None:
    assert text_within(content, kind).removeprefix("## Slide 1\n\n") == TABLE


@HTML
def test_cells_merged_in_both_directions_and_at_the_end_keep_their_place() -> None:
    page = (
        b"<table><tr><td rowspan=2 colspan=2>a</td><td>b</td><td rowspan=3>c</td></tr>"
        b"<tr><td>d</td></tr><tr><td>e</td></tr><tr><td>f</td><td>g</td><td>h</td></tr></table>"
    )
    rows = [line.split("|")[1:-1] for line in text_within(page, "html").splitlines()]
    cells = [[cell.strip() for cell in each] for each in rows[2:]]
    assert cells == [["a", "", "b", "c"], ["", "", "d", ""], ["e"], ["f", "g", "h"]]


@HTML
@pytest.mark.parametrize(
    ("page", "text"),
    [
        (
            "<TABLE><TR><TH>Port<TH>Hour<TR><TD>Malmo<TD>9 <TR><TD>Lund<TD>11</TABLE>Next",
            "| Port | Hour |\n| --- | --- |\n| Malmo | 9 |\n| Lund | 11 |\n\nNext",
        ),
        (
            "<ul><li>one<li>two <b>bold</b><ul><li>in</ul><li>three</ul>",
            "- one\n- two **bold**\n  - in\n- three",
        ),
        (
            "<p>One<p>Two<h2>Head</h2><p>Three<div>Four</div>",
            "One\n\nTwo\n\n## Head\n\nThree\n\nFour",
        ),
        ("<dl><dt>-a<dd>all<dt>-b<dd>brief</dl>", "-a\n:   all\n\n-b\n:   brief"),
        (
            "<table><tr><th>a<table><tr><th>in<th>ner</table><th>b</table>",
            "| a  | in | ner | | --- | --- | | b |\n| --- | --- | --- | --- |",
        ),
        (
            "<table><tr><th rowspan=0>a<th>b<tbody><tr><td rowspan=0>c<td>d<tr><td>e</table>",
            "| a | b |\n| --- | --- |\n| c | d |\n|  | e |",
        ),
        (
            "<table><caption>C<thead><tr><th>a<tbody><tr><td>b<tbody><tr><td>c<tfoot><tr><td>d",
            "C\n\n| a |\n| --- |\n| b |\n| c |\n| d |",
        ),
    ],
)
def test_end_tags_may_be_left_out(page: str, text: str) -> None:
    """Each cell, item and paragraph was within the one before."""
    assert text_within(page.encode(), "html") == text


@HTML
@pytest.mark.parametrize(
    ("page", "text"),
    [
        (
            "<html><body><p>one</p></body></html><html><body><p>two</p></body></html>three",
            "one\n\ntwo\n\nthree",
        ),
        ("<body><p>first</p></body><p>second</p>", "first\n\nsecond"),
        ("<head><title>T</title><meta charset=utf-8><body><p>one</p>", "one"),
        ("<head><title>T<body><p>one</p></body>", "T\n\none"),
        (
            '<?xml version="1.0"?><!DOCTYPE html><html><head><title>T</title></head>\n'
            "<body><![if !mso]><p>one</p><![endif]></body></html>\n",
            "one",
        ),
        ("<title>T</title><p>one</p>", "T\n\none"),
    ],
)
def test_what_stands_outside_of_a_body_is_read(page: str, text: str) -> None:
    """All but the first body was left out, and nobody was told."""
    assert text_within(page.encode(), "html") == text


@HTML
def test_a_few_merged_cells_do_not_fill_millions() -> None:
    wide = "<td colspan=1000 rowspan=0>a" * 100
    text = text_within(f"<table><tr>{wide}{'<tr></tr>' * 1000}</table>".encode(), "html")
    assert text.count("|") < 500_000


@HTML
def test_a_page_of_many_paragraphs_without_end_tags_is_not_too_deep() -> None:
    assert len(text_within(b"<p>word" * 30_000, "html").split()) == 30_000


@HTML
def test_texts_of_folded_parts_and_lists_of_choices_stand_apart() -> None:
    page = b"<details><summary>Ferries</summary>At nine.</details><header>Top</header>Next"
    assert text_within(page, "html") == "Ferries\n\nAt nine.\n\nTop\n\nNext"
    page = b"To <select><option>Malmo</option><option>Lund</option></select>"
    assert text_within(page, "html") == "To\n\n- Malmo\n- Lund"


@pytest.mark.parametrize(
    ("number", "code", "shown"),
    [
        ("0.475", "0.0%", "47.5%"),
        ("0.28999999999999998", "0%", "29%"),
        ("1.5208333333333333", "[h]:mm:ss", "36:30:00"),
        ("0.0625", "[mm]:ss", "1:30:00"),
        ("1234.5", '_-* #,##0.00\\ _D_M_-;-* "-"??_-', "1234.5"),
        ("1234.5", '_("$"* #,##0.00_);_("$"* \\(#,##0.00\\);[Red]General', "1234.5"),
        ("1", "yyyy-mm-dd", "1900-01-01"),
        ("59", "yyyy-mm-dd", "1900-02-28"),
        ("61", "d/m/yy", "1900-03-01"),
        ("45000", "mmmm", "2023-03-15"),
        ("1067", "00000", "01067"),
        ("1.1000000000000001", "General", "1.1"),
        ("7.4999999999999997E-2", "0.00", "0.075"),
        ("12345678901234567", "0", "12345678901234567"),
    ],
)
def test_numbers_of_a_sheet_are_shown_as_their_formats_say(
    number: str, code: str, shown: str
) -> None:
    code = code.replace('"', "&quot;")
    styles = f'<numFmts><numFmt numFmtId="170" formatCode="{code}"/></numFmts>'
    styles += '<cellXfs><xf numFmtId="170"/></cellXfs>'
    content = xlsx_of(f'<row><c s="0"><v>{number}</v></c></row>', styles=styles)
    assert text_within(content, "xlsx") == f"## Ferries\n\n{shown}"


def test_characters_that_xml_does_not_have_are_read() -> None:
    content = xlsx_of('<row><c t="s"><v>0</v></c></row>', "<si><t>a_x000D_\nb _x4g_</t></si>")
    assert text_within(content, "xlsx") == "## Ferries\n\na b _x4g_"


def test_what_older_programs_show_instead_is_not_read_twice() -> None:
    twice = f"<AlternateContent><Choice>{shape('E')}</Choice><Fallback>{shape('F')}</Fallback>"
    slide = f"{twice}</AlternateContent>{shape('G')}"
    assert text_within(pptx_of(slide), "pptx") == "## Slide 1\n\nE\n\nG"


def test_the_points_of_a_diagram_are_read_where_it_stands() -> None:
    def point(text: str, kind: str = "node") -> str:
        said = f"<t xmlns='d'><bodyPr/>{text}</t>"
        return f'<pt type="{kind}"><prSet phldrT="[Text]"/>{said}</pt>'

    def words(text: str) -> str:
        return f"<p><r><t>{text}</t></r></p>"

    points = point("", "doc") + point(words("Load") + words("cars")) + point(words("Leave"))
    frame = f'<graphicFrame {R}><graphicData><relIds r:dm="r1"/></graphicData></graphicFrame>'
    lost = frame.replace("r1", "r9")
    content = pptx_of(
        shape("Ferries", "title") + frame + lost + shape("To Malmo"),
        diagram=points + point(words("Load"), "pres"),
    )
    assert text_within(content, "pptx") == "## Slide 1: Ferries\n\nLoad cars\nLeave\n\nTo Malmo"


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("sep=;\r\nPort;Hour\r\nMalmo;9", "Port; Hour\nPort: Malmo; Hour: 9"),
        ('"Name, first";"Hour"\nMalmo;9', "Name, first; Hour\nName, first: Malmo; Hour: 9"),
        ('"Port\nname",Hour\nMalmo,9', "Port name; Hour\nPort name: Malmo; Hour: 9"),
        ("a, b, c\td\nMalmo, S\t9", "a, b, c; d\na, b, c: Malmo, S; d: 9"),
    ],
)
def test_the_separator_is_named_or_stands_outside_of_quotes(content: str, text: str) -> None:
    assert text_within(content.encode(), "csv") == text


def test_text_boxes_of_rtf_are_read_once() -> None:
    """Word writes them in a group that old programs leave out, and again for those."""
    shape = (
        rb"{\shp{\*\shpinst\shpleft0{\sp{\sn shapeType}{\sv 202}}{\shptxt \pard{\*\bkmkstart x}"
        rb"At nine}}{\shprslt\pard At nine\par}}"
    )
    assert text_within(rb"{\rtf1 Ferries" + shape + rb"to Malmo}", "rtf") == (
        "Ferries\nAt nine\nto Malmo"
    )
    hidden = rb"{\header " + shape + rb"}{\*\generator {\shptxt x}}"
    assert text_within(rb"{\rtf1 Ferries" + hidden + rb" go}", "rtf") == "Ferries go"


def test_a_font_of_rtf_has_its_own_letters() -> None:
    content = (
        rb"{\rtf1\ansi\ansicpg1252\deff0{\fonttbl{\f0\fcharset0 Arial;}"
        rb"{\f1\fcharset204 Arial Cyr;}{\f2\fcharset128 Gothic;}}"
        rb"\f0 Caf\'e9 {\f1 \'cf\'e0\'f0\'ee\'ec} \'e9 \f2 \'83\'74\'83F\f0 \'e9}"
    )
    assert text_within(content, "rtf") == "Café Паром é フェé"


def test_a_plain_font_of_rtf_is_the_first_one_and_a_mac_has_its_own_letters() -> None:
    fonts = rb"{\fonttbl{\f0\fcharset0 Arial;}{\f1\fcharset204 Arial Cyr;}}"
    assert text_within(rb"{\rtf1\deff0" + fonts + rb"\f1 \'cf\plain \'e9}", "rtf") == "Пé"
    assert text_within(rb"{\rtf1\mac caf\'8e}", "rtf") == "café"


def test_formats_in_zip_files_are_known_without_their_suffix() -> None:
    """The file within the slides is not packed, so that its parts' names can be seen."""
    book = xlsx_of(SHEET, STRINGS, STYLES)
    slides = BytesIO(pptx_of(shape("To Malmo")))
    with zipfile.ZipFile(slides, "a") as file:
        file.writestr("ppt/embeddings/book.xlsx", book)
    document = docx_of("<w:p/>").replace(b"document.xml", b"document2xml")
    for name in ("upload", "a.txt", "a.docx", "a.bin"):
        kinds = [kind_of(each, name) for each in (book, slides.getvalue(), document, epub_of("x"))]
        assert kinds == ["xlsx", "pptx", "docx", "epub"]
    assert kind_of(zipped({"word/notes.txt": "x"}), "a.zip") == "text"


def mail_of(*, html: str = "", text: str = "") -> EmailMessage:
    mail = EmailMessage()
    mail["From"], mail["Subject"] = "Béa <bea@example.org>", "Fähre"
    if text:
        mail.set_content(text, cte="base64")
    if html:
        mail.add_alternative(html, subtype="html") if text else mail.set_content(html, "html")
    return mail


def test_a_mail_is_its_decoded_text_and_what_is_attached() -> None:
    inner = mail_of(text="Inner.")
    mail = mail_of(text="Um neun. 5 €", html="<p>Um neun.</p>")
    mail.add_attachment(b"\x89PNG" + bytes(99), maintype="image", subtype="png", filename="a.png")
    mail.add_attachment("One line.", filename="notes.txt")
    mail.add_attachment(inner)
    head = "From: Béa <bea@example.org>\nSubject: Fähre"
    assert text_of(mail.as_bytes(), "a.eml").text == (
        f"{head}\n\nUm neun. 5 €\n\n\nAttached: a.png (image/png)\n\n"
        f"Attached: notes.txt\nOne line.\n\n\n{head}\n\nInner."
    )


def test_what_is_attached_to_the_html_of_a_mail_is_not_left_out() -> None:
    """Some programs attach it there, beside a plain text that says what the HTML says."""
    html = EmailMessage()
    html.set_content("<p>At nine.</p>", "html")
    html.add_attachment(b"\x89PNG", maintype="image", subtype="png", filename="a.png")
    html.add_attachment("One line.", filename="notes.txt")
    html.add_attachment(mail_of(text="Inner."))
    mail = mail_of(text="At nine.")
    mail.make_alternative()
    mail.attach(html)
    head = "From: Béa <bea@example.org>\nSubject: Fähre"
    assert text_within(mail.as_bytes(), "eml") == (
        f"{head}\n\nAt nine.\n\n\nAttached: a.png (image/png)\n\n"
        f"Attached: notes.txt\nOne line.\n\n\n{head}\n\nInner."
    )


def test_a_mail_s_charset_means_what_mail_programs_take_it_for() -> None:
    raw = b"Subject: x\nContent-Type: text/plain; charset=iso-8859-1\n\n5 \x80 \x93so\x94\n"
    assert text_of(raw, "a.eml").text == "Subject: x\n\n5 € “so”"


@HTML
def test_a_mail_in_html_is_read_as_markdown() -> None:
    assert text_of(mail_of(html="<h1>Um neun</h1>").as_bytes(), "a.eml").text.endswith("# Um neun")


def nested_mail(depth: int) -> bytes:
    begin = b"".join(
        b'Content-Type: multipart/mixed; boundary="b%d"\n\n--b%d\n' % (i, i) for i in range(depth)
    )
    return begin + b"Content-Type: text/plain\n\nx\n"


BOMB = b" " * (300 << 20)
LAUGHS = '<!DOCTYPE a [<!ENTITY b "ha"><!ENTITY c "&b;&b;">]><a>&c;</a>'
DEEP_XML = "<a>" * 300 + "</a>" * 300


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.xlsx", b"no zip", "is no XLSX file"),
        ("a.pptx", zipped({"x": "y"}), "has no part 'ppt/presentation.xml', so it is damaged"),
        ("a.xlsx", zipped({"xl/workbook.xml": "<a"}), "has a damaged part 'xl/workbook.xml'"),
        (
            "a.xlsx",
            zipped({"xl/workbook.xml": LAUGHS}),
            "declares XML entities in its part 'xl/workbook.xml', which are not read",
        ),
        (
            "a.pptx",
            pptx_of(DEEP_XML),
            "has elements more than 256 deep in its part 'ppt/slides/s.xml', the limit",
        ),
        ("a.rtf", rb"{\rtf1 " + b"{" * 5000, "has groups more than 1000 deep in one another"),
        ("a.eml", nested_mail(60), "has parts more than 50 deep in one another, the limit"),
        ("a.ipynb", b'{"cells":' + b"[" * 100_000, "its parts are nested too deeply"),
        ("a.ipynb", b"{", "is no notebook: its JSON is damaged"),
        ("a.ipynb", b"{}", "has no text"),
        pytest.param("a.epub", epub_of(BOMB), "unpacks to more than 268,435,456 bytes", marks=HTML),
        pytest.param("a.docx", docx_of(DEEP_XML), "has elements more than 256 deep", marks=HTML),
        pytest.param(
            "a.docx", zipped({"word/document.xml": LAUGHS}), "declares XML entities", marks=HTML
        ),
        pytest.param("a.docx", zipped({"x": BOMB}), "unpacks to more than", marks=HTML),
        pytest.param(
            "a.epub",
            epub_of(
                "x",
                {"META-INF/encryption.xml": '<a><CipherReference URI="OPS/my%20page.xhtml"/></a>'},
            ),
            "is encrypted",
            marks=HTML,
        ),
        pytest.param("a.html", b"<div>" * 200_000 + b"x", "", marks=HTML),
    ],
)
def test_a_broken_or_hostile_file_is_refused_with_the_limit(
    name: str, content: bytes, reason: str
) -> None:
    assert reason in refusal(content, name)


def test_a_table_of_many_parts_is_refused() -> None:
    content = zipped({str(i): "" for i in range(zip_parts.MOST_PARTS + 1)})
    assert refusal(content, "a.xlsx") == "has 20,001 parts, the limit is 20,000"


def test_a_password_is_said() -> None:
    content = bytearray(zipped({"xl/workbook.xml": "<a/>"}))
    content[content.index(b"PK\x01\x02") + 8] |= 1
    assert refusal(bytes(content), "a.xlsx").startswith("is encrypted; save it without")


@pytest.mark.parametrize("kind", ["csv", "xlsx"])
def test_a_huge_cell_or_table_meets_the_limit_of_text(kind: str) -> None:
    """A long name in a header stands in each line: only its beginning does."""
    limits = ReadingLimits(text_bytes=1 << 20)
    cell = "x" * (1 << 20)
    row = f'<row><c t="str"><v>{cell}</v></c></row>'
    content = xlsx_of(row) if kind == "xlsx" else f"{cell},b\n1,2\n".encode()
    assert (
        refusal(content, f"a.{kind}", limits) == "has more than 1,048,576 bytes of text, the limit"
    )
    header = "".join(f'<c t="str"><v>{name * 30_000}</v></c>' for name in "ab")
    rows = "<row><c><v>1</v></c><c><v>2</v></c></row>" * 1000
    assert len(text_of(xlsx_of(f"<row>{header}</row>{rows}"), "a.xlsx").text) < 300_000


@pytest.mark.slow
def test_shared_strings_that_multiply_meet_the_limit_of_memory() -> None:
    limits = ReadingLimits(text_bytes=1 << 20, cpu_s=20)
    rows = '<row><c t="s"><v>0</v></c></row>' * 20_000
    content = xlsx_of(rows, f"<si><t>{'x ' * (1 << 19)}</t></si>")
    assert "limit" in refusal(content, "a.xlsx", limits)


def test_a_quotation_mark_without_another_one_leaves_a_table_as_it_is() -> None:
    """The rest of the file became one cell."""
    text = 'a,b\n"open,1\n' + "1,2\n" * 400_000
    assert text_of(text.encode(), "a.csv").text == text.strip()


def test_a_time_limit_names_itself() -> None:
    limits = ReadingLimits(text_bytes=1 << 27, cpu_s=1)
    assert "the limits are 1 s of processor time and 2048 MiB of memory" in refusal(
        b"<p>x</p>" * 500_000, "a.html", limits
    )


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(converting.importlib.util, "find_spec", lambda _: None)
    assert 'is EPUB, which is not read here: pip install "gemserve[library]"' in refusal(
        epub_of("x"), "a.epub"
    )


@HTML
def test_a_blank_text_beside_html_is_not_the_mail() -> None:
    mail = mail_of(text=" \n\u00a0\u200b\ufeff\n", html="<p>Um neun.</p>")
    assert text_within(mail.as_bytes(), "eml").endswith("\n\nUm neun.")
    mail.add_alternative("BEGIN:VCALENDAR", subtype="calendar")
    assert text_within(mail.as_bytes(), "eml").endswith("\n\nUm neun.")


@HTML
def test_html_of_a_mail_may_name_its_encoding_itself() -> None:
    raw = b"Content-Type: text/html\n\n<meta charset=koi8-r>" + "Паром".encode("koi8-r")
    assert text_within(raw, "eml") == "Паром"


@pytest.mark.parametrize("name", ["t.csv.gz", "T.CSV.GZ"])
def test_a_packed_file_is_read_by_the_name_in_front_of_gz(name: str) -> None:
    import gzip

    assert file_text.text_of(gzip.compress(b"a,b\n1,2\n"), name).text == "a; b\na: 1; b: 2"
