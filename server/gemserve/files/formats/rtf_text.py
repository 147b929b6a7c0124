"""RTF: the text alone, without formats, pictures and tables of fonts."""

from __future__ import annotations

import codecs
import re
from dataclasses import dataclass, replace

from gemserve.files.formats import Refused

MOST_DEPTH = 1000  # groups in one another
_TOKEN = re.compile(
    rb"\\([a-zA-Z]{1,32})(-?\d{1,10})? ?|\\'([0-9a-fA-F]{2})|\\([^a-zA-Z])|([{}])"
    rb"|[\r\n]+|([^\\{}\r\n]+)"
)
_CHARACTERS = {
    **{"par": "\n", "line": "\n", "sect": "\n\n", "page": "\n\n", "tab": "\t", "row": "\n"},
    **{"cell": " | ", "emdash": "—", "endash": "–", "bullet": "•", "lquote": "‘", "rquote": "’"},
    **{"ldblquote": "“", "rdblquote": "”", "emspace": " ", "enspace": " "},
}
_SYMBOLS = {
    b"~": "\u00a0",
    b"_": "\u2011",
    b"{": "{",
    b"}": "}",
    b"\\": "\\",
    b"\n": "\n",
    b"\r": "\n",
}
_CODE_PAGES = {"mac": "mac-roman", "pc": "cp437", "pca": "cp850"}  # of a whole file
# what fonts have by their `\fcharset`; others have what the file has
_OF_FONTS = {
    **{77: "mac-roman", 128: "cp932", 129: "cp949", 130: "johab", 134: "gbk", 136: "cp950"},
    **{161: "cp1253", 162: "cp1254", 163: "cp1258", 177: "cp1255", 178: "cp1256"},
    **{186: "cp1257", 204: "cp1251", 222: "cp874", 238: "cp1250", 254: "cp437", 255: "cp850"},
}
# groups whose texts nobody reads
_LEFT_OUT = frozenset(
    (
        *("fonttbl", "colortbl", "stylesheet", "info", "pict", "object", "header", "footer"),
        *("headerl", "headerr", "headerf", "footerl", "footerr", "footerf", "listtable"),
        *("generator", "themedata", "datastore", "xmlnstbl", "rsidtbl", "filetbl", "shprslt"),
    )
)


@dataclass(frozen=True, slots=True)
class _Group:
    """`is_optional`: it is left out for its `\\*` alone, which is for those who do not know it.

    `fallback`: how many characters follow each `\\u`, for those who do not know that.
    """

    is_left_out: bool = False
    is_optional: bool = False
    fallback: int = 1
    font: int | None = None


class _Reader:
    def __init__(self) -> None:
        self.text: list[str] = []
        self._bytes = bytearray()  # of the code page, which may have two for a character
        self._code_page = "cp1252"
        self._of_fonts: dict[int | None, str] = {}  # code pages
        self._default_font: int | None = None
        self._groups = [_Group()]
        self._to_skip = 0  # characters of a fallback

    def add(self, text: str) -> None:
        self.flush()
        if not self._groups[-1].is_left_out:
            self.text.append(text)

    def add_bytes(self, content: bytes) -> None:
        skipped = min(self._to_skip, len(content))
        self._to_skip -= skipped
        if not self._groups[-1].is_left_out:
            self._bytes += content[skipped:]

    def flush(self) -> None:
        if self._bytes:
            font = self._groups[-1].font
            code_page = self._of_fonts.get(
                self._default_font if font is None else font, self._code_page
            )
            self.text.append(self._bytes.decode(code_page, "replace"))
            self._bytes.clear()

    def brace(self, brace: bytes) -> None:
        self.flush()
        self._to_skip = 0
        if brace == b"{":
            if len(self._groups) > MOST_DEPTH:
                raise Refused(f"has groups more than {MOST_DEPTH} deep in one another, the limit")
            self._groups.append(self._groups[-1])
        elif len(self._groups) > 1:
            ended = self._groups.pop()
            if self._groups[-1].is_left_out and not ended.is_left_out:
                self.text.append("\n")  # behind a text box

    def leave_out(self, *, is_optional: bool = False) -> None:
        self.flush()
        group = self._groups[-1]
        if not (is_optional and group.is_left_out):
            self._groups[-1] = replace(group, is_left_out=True, is_optional=is_optional)

    def text_box(self) -> None:
        """Read the group, which stands in one of a shape that begins with `\\*`."""
        if self._groups[-1].is_optional:
            self._groups[-1] = replace(self._groups[-1], is_left_out=False, is_optional=False)
            self.add("\n")

    def word(self, name: str, number: int | None) -> None:
        if name in _LEFT_OUT:
            self.leave_out()
        elif name == "shptxt":
            self.text_box()
        elif name in _CHARACTERS:
            self.add(_CHARACTERS[name])
        elif name == "u" and number is not None:
            self.add(chr(number % (1 << 16)))
            self._to_skip = self._groups[-1].fallback
        elif name == "uc" and number is not None:
            self._groups[-1] = replace(self._groups[-1], fallback=max(0, min(number, 16)))
        elif name == "plain":
            self.flush()
            self._groups[-1] = replace(self._groups[-1], font=None)
        elif name in _CODE_PAGES:
            self._code_page = _CODE_PAGES[name]
        elif number is not None:
            self._number(name, number)

    def _number(self, name: str, number: int) -> None:
        if name == "ansicpg":
            self._code_page = _code_page(number)
        elif name == "deff":
            self._default_font = number
        elif name == "f":
            self.flush()
            self._groups[-1] = replace(self._groups[-1], font=number)
        elif name == "fcharset" and number in _OF_FONTS:
            self._of_fonts[self._groups[-1].font] = _OF_FONTS[number]


def read(content: bytes) -> str:
    reader, at = _Reader(), 0
    while at < len(content):
        match = _TOKEN.match(content, at)
        if match is None:  # a backslash at the end
            break
        at = match.end()
        word, number, hexadecimal, symbol, brace, plain = match.groups()
        if word is not None:
            value = None if number is None else int(number)
            if word == b"bin" and value is not None:  # so many bytes of a picture
                at += max(0, value)
            else:
                reader.word(word.decode(), value)
        elif hexadecimal is not None:
            reader.add_bytes(bytes.fromhex(hexadecimal.decode()))
        elif symbol == b"*":
            reader.leave_out(is_optional=True)
        elif symbol is not None:
            reader.add(_SYMBOLS.get(symbol, ""))
        elif brace is not None:
            reader.brace(brace)
        elif plain is not None:
            reader.add_bytes(plain)
    reader.flush()
    # two halves of a character above U+FFFF are two words
    return "".join(reader.text).encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _code_page(number: int) -> str:
    name = "utf-8" if number == 65001 else f"cp{number}"
    try:
        codecs.lookup(name)
    except LookupError:
        return "cp1252"
    return name
