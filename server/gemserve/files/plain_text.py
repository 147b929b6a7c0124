"""Decodes the bytes of a text, whatever its encoding; says which bytes are no text at all.

All shares are of the whole content, so that no single byte decides about a file. Labels of
encodings mean what the Encoding Standard of the WHATWG says, because that is how browsers and mail
programs read them: whoever writes "latin-1" means windows-1252.
"""

from __future__ import annotations

import codecs
import re
import unicodedata

# Of all bytes. Random and compressed bytes have 10% of control bytes, programs more. A log with a
# bell in each line of 80 characters has 1.3%, and one NUL or DOS end mark in any text is less.
MOST_CONTROLS = 0.02
# Of the bytes above ASCII, those in valid UTF-8. Manual pages have none in windows-1252, 1% in
# KOI8-R, up to 34% in Shift-JIS, 47% in EUC-JP and 48% in GBK. A text with one wrong byte has all
# others, and 67% if it has but one letter of two bytes besides.
LEAST_VALID = 0.6
# Of all bytes, in windows-1252: European languages have up to 15%. In a text with more, letters are
# of another script, and windows-1252 would make other letters of them.
MOST_FOREIGN = 0.3
# Of UTF-16 without a mark, the zero bytes at odd (little-endian) or even places: a seventh of a
# text in any alphabet is blanks and punctuation. The other bytes are hardly ever zero.
# One zero may be in any text.
LEAST_ZEROS, MOST_OTHER_ZEROS, LEAST_NUM_ZEROS = 0.1, 0.01, 2
MOST_UNASSIGNED = 0.01  # of the characters of such a text
_LOOKED_AT = 1 << 16  # bytes and characters, to tell UTF-16 without a mark

_MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),  # before UTF-16's, with which it begins
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
_CONTROLS = bytes(sorted({*range(32)} - {8, 9, 10, 12, 13, 27}))  # that no text needs
# in bytes of windows-1252 the second range has letters
_CONTROL = re.compile(f"[{re.escape(_CONTROLS.decode())}\x80-\x84\x86-\x9f]")
_ABOVE_ASCII = bytes(range(128, 256))
_PADDING = b"\0\x1a"  # what file systems and DOS put behind a text
_UNASSIGNED = frozenset(("Cn", "Co", "Cs"))
_LABEL_WITHIN = 1024  # bytes, as the HTML standard says
# What files say of themselves: XML and HTML, CSS, Python and others in one of two lines, what
# Emacs reads, and translations of gettext.
_LABEL = re.compile(
    rb"\s*<\?xml[^>]*?encoding\s*=\s*[\"']([\w:.-]+)"
    rb"|\s*(?:<[^\0]*?)?<meta[^>]*?charset\s*=\s*[\"']?\s*([\w:.-]+)"
    rb"|@charset \"([\w:.-]+)\";"
    rb"|(?:[ \t]*(?:#[^\r\n]*)?\r?\n)?#[ \t]*(?:en)?coding[:=][ \t]*([\w.-]+)[ \t]*[\r\n]"
    rb"|(?:[^\r\n]*\r?\n)?[^\r\n]*(?:-\*-[^\r\n]*?coding|fileencoding)[:=][ \t]*([\w.-]+)"
    rb"|[^\0]*?\n\"Content-Type: text/plain; charset=([\w.:-]+)",
    re.IGNORECASE,
)
_JAPANESE = (b"\x1b$B", b"\x1b$@")  # no terminal has these sequences


class NotText(Exception):
    """Bytes are no text, for the reason in the message."""


def _windows_1252() -> str:
    """The characters of all bytes. Those that Python's codec does not know are controls."""
    known = (bytes([byte]).decode("cp1252", "ignore") for byte in range(256))
    return "".join(each or chr(byte) for byte, each in enumerate(known))


_WINDOWS_1252 = _windows_1252()

_LABELS = {
    "utf-8": "utf-8 utf8 unicode-1-1-utf-8 unicode11utf8 unicode20utf8 x-unicode20utf8",
    "windows-1252": "windows-1252 cp1252 x-cp1252 latin1 latin-1 l1 iso-8859-1 iso8859-1 iso88591 "
    "iso_8859-1 ascii us-ascii ansi_x3.4-1968 cp819 ibm819",
    "cp874": "windows-874 iso-8859-11 tis-620 dos-874",
    "cp1250": "windows-1250 cp1250 x-cp1250",
    "cp1251": "windows-1251 cp1251 x-cp1251",
    "cp1253": "windows-1253 cp1253 x-cp1253",
    "cp1254": "windows-1254 cp1254 x-cp1254 iso-8859-9 iso8859-9 latin5 l5",
    "cp1255": "windows-1255 cp1255 x-cp1255",
    "cp1256": "windows-1256 cp1256 x-cp1256",
    "cp1257": "windows-1257 cp1257 x-cp1257",
    "cp1258": "windows-1258 cp1258 x-cp1258",
    "iso8859-2": "iso-8859-2 iso8859-2 latin2 l2",
    "iso8859-3": "iso-8859-3 iso8859-3 latin3 l3",
    "iso8859-4": "iso-8859-4 iso8859-4 latin4 l4",
    "iso8859-5": "iso-8859-5 iso8859-5 cyrillic",
    "iso8859-6": "iso-8859-6 iso8859-6 arabic",
    "iso8859-7": "iso-8859-7 iso8859-7 greek greek8",
    "iso8859-8": "iso-8859-8 iso8859-8 iso-8859-8-i hebrew",
    "iso8859-10": "iso-8859-10 iso8859-10 latin6 l6",
    "iso8859-13": "iso-8859-13 iso8859-13",
    "iso8859-14": "iso-8859-14 iso8859-14",
    "iso8859-15": "iso-8859-15 iso8859-15 latin9 l9",
    "iso8859-16": "iso-8859-16",
    "cp866": "ibm866 cp866 866",
    "koi8-r": "koi8-r koi8 koi",
    "koi8-u": "koi8-u koi8-ru",
    "mac-roman": "macintosh mac x-mac-roman",
    "gb18030": "gb18030 gbk gb2312 gb_2312 x-gbk chinese csgb2312",
    "big5hkscs": "big5 big5-hkscs cn-big5 x-x-big5",
    "euc-jp": "euc-jp x-euc-jp",
    "iso2022_jp_ext": "iso-2022-jp csiso2022jp",
    "iso2022_kr": "iso-2022-kr csiso2022kr",
    "hz": "hz-gb-2312 hz",
    "cp932": "shift_jis shift-jis sjis x-sjis ms932 ms_kanji windows-31j",
    "cp949": "euc-kr korean ks_c_5601-1987 ks_c_5601-1989 ksc5601 ksc_5601 windows-949",
    "utf-16-le": "utf-16 utf-16le unicode ucs-2 iso-10646-ucs-2",
    "utf-16-be": "utf-16be",
}
_CODECS = {label: codec for codec, labels in _LABELS.items() for label in labels.split()}


def decode(content: bytes, label: str | None = None) -> str:
    """The text, without the controls that no text needs. Raises `NotText`.

    `label`: the name of an encoding that somebody has given; without effect if a mark says
    another one, or if nobody knows it.
    """
    text = _marked(content)
    content = _unpadded(content)
    if text is None and label is not None:
        text = _labelled(content, label)
    if text is None:
        text = _utf_16(content)
    if text is None and any(map(content.__contains__, _JAPANESE)) and content.isascii():
        text = _labelled(content, "iso-2022-jp")
    if text is not None:
        return text
    return _utf_8_or_windows_1252(_without_control_bytes(content))


def declared(content: bytes) -> str | None:
    """The name of the encoding that a text gives in its first lines, if it does."""
    found = _LABEL.match(content[:_LABEL_WITHIN])
    label = next(filter(None, found.groups())).decode("ascii", "replace") if found else None
    # who can read that label as ASCII reads no UTF-16
    return None if label is None or label.lower().startswith("utf-16") else label


def _unpadded(content: bytes) -> bytes:
    """Zeros may be half of the last character of UTF-16: one of these is kept."""
    stripped = content.rstrip(_PADDING)
    if len(content) - len(stripped) < 2:
        return content
    return content[: len(stripped) + len(stripped) % 2]


def _marked(content: bytes) -> str | None:
    for mark, codec in _MARKS:
        if content.startswith(mark):
            text = content[len(mark) :].decode(codec, "replace")
            return _without_controls(text.rstrip(_PADDING.decode()))
    return None


def _labelled(content: bytes, label: str) -> str | None:
    label = label.strip().lower().removesuffix("-unix")  # as Emacs names line ends
    codec = _CODECS.get(label) or _CODECS.get(label.replace("_", "-"))
    if codec in (None, "utf-8"):  # may have a wrong byte, or another encoding after all
        return None
    if codec == "windows-1252":
        return _single_byte(_without_control_bytes(content))
    return _without_controls(content.decode(codec, "replace"))


def _utf_16(content: bytes) -> str | None:
    """The text, if its zero bytes say that it is UTF-16 without a mark."""
    start = content[:_LOOKED_AT]
    half = len(start) // 2
    if start.count(0) < LEAST_NUM_ZEROS:
        return None
    even, odd = start[0::2].count(0) / half, start[1::2].count(0) / half
    if odd >= LEAST_ZEROS and even <= MOST_OTHER_ZEROS:
        codec = "utf-16-le"
    elif even >= LEAST_ZEROS and odd <= MOST_OTHER_ZEROS:
        codec = "utf-16-be"
    else:
        return None
    seen = start.decode(codec, "replace")
    unassigned = sum(unicodedata.category(each) in _UNASSIGNED for each in seen)
    if unassigned + seen.count("\ufffd") > 1 + MOST_UNASSIGNED * len(seen):
        return None
    return _without_controls(content.decode(codec, "replace"))


def _without_control_bytes(content: bytes) -> bytes:
    kept = content.translate(None, _CONTROLS)
    _check_controls(len(content) - len(kept), len(content))
    return kept


def _without_controls(text: str) -> str:
    kept = _CONTROL.sub("", text)
    _check_controls(len(text) - len(kept), len(text))
    return kept


def _check_controls(num_controls: int, num_all: int) -> None:
    # a text of ten characters may have one, too
    is_one_of_many = num_controls <= 1 < num_all
    if num_controls > MOST_CONTROLS * num_all and not is_one_of_many:
        raise NotText(
            f"is no text ({num_controls / num_all:.1%} of it are control characters, the limit is "
            f"{MOST_CONTROLS:.0%})"
        )


def _utf_8_or_windows_1252(content: bytes) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        pass
    num_ascii = len(content.translate(None, _ABOVE_ASCII))
    num_above = len(content) - num_ascii
    valid = (len(content.decode("utf-8", "ignore").encode()) - num_ascii) / num_above
    if valid >= LEAST_VALID:
        return content.decode("utf-8", "replace")
    if num_above > MOST_FOREIGN * len(content):
        raise NotText(
            f"is no text in an encoding that is known here (of the bytes above ASCII {valid:.0%} "
            f"are UTF-8, at least {LEAST_VALID:.0%} must be); if it is a text, save it as UTF-8"
        )
    return _single_byte(content)


def _single_byte(content: bytes) -> str:
    return codecs.charmap_decode(content, "strict", _WINDOWS_1252)[0]
