"""Encodings of texts: no single byte decides about a file."""

from __future__ import annotations

import codecs
import os
import time
from contextlib import suppress

import pytest

from gemserve.files.file_text import NoText, text_of
from gemserve.files.plain_text import NotText, decode

TEXT = "Das Café öffnet um acht, die Fähre fährt um neun – für „Gäste“."
LOG = "".join(f"12:00:{i % 60:02} the ferry is at buoy {i}\n" for i in range(2000))


@pytest.mark.parametrize("at", [0, 7, 30, 66])
def test_a_stray_byte_is_one_replacement_character(at: int) -> None:
    """The whole file became Latin-1: "CafÃ©"."""
    encoded = (TEXT[:at] + "\ue000" + TEXT[at:]).encode().replace("\ue000".encode(), b"\xff")
    assert decode(encoded) == TEXT[:at] + "\ufffd" + TEXT[at:]


def test_a_text_that_is_cut_in_a_character_is_utf_8() -> None:
    assert decode("Ein Café".encode() + "é".encode()[:1]) == "Ein Café\ufffd"


@pytest.mark.parametrize("byte", [b"\x07", b"\x1a", b"\0"])
@pytest.mark.parametrize("at", [0, 5000, len(LOG)])
def test_one_control_byte_does_not_make_a_log_a_binary(byte: bytes, at: int) -> None:
    content = LOG.encode()
    assert decode(content[:at] + byte + content[at:]) == LOG


def test_zeros_behind_a_text_are_padding() -> None:
    """A machine that lost its power leaves a log with pages of zeros."""
    assert decode(LOG.encode() + bytes(1 << 20)) == LOG


def test_a_short_text_may_have_one_control_byte() -> None:
    assert decode(b"ready\x07") == "ready"


@pytest.mark.parametrize(
    "content",
    [
        b"\0\1",
        bytes(range(256)) * 9,
        b"\x7fELF" + bytes(200) + b"text" * 99,
        b"abcdefgh\0\0" * 1000,
    ],
    ids=["two bytes", "all bytes", "program", "records"],
)
def test_a_share_of_control_bytes_makes_a_binary(content: bytes) -> None:
    with pytest.raises(NotText, match=r"of it are control characters, the limit is 2%"):
        decode(content)


def test_random_bytes_are_a_binary() -> None:
    with pytest.raises(NotText):
        decode(os.urandom(1 << 16))


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (codecs.BOM_UTF8 + TEXT.encode(), TEXT),
        (codecs.BOM_UTF16_LE + TEXT.encode("utf-16-le"), TEXT),
        (codecs.BOM_UTF16_BE + TEXT.encode("utf-16-be"), TEXT),
        (codecs.BOM_UTF32_LE + TEXT.encode("utf-32-le"), TEXT),
        (codecs.BOM_UTF16_LE + TEXT.encode("utf-16-le") + b"\0\x07", f"{TEXT}\u0700"),
        (codecs.BOM_UTF16_LE + TEXT.encode("utf-16-le") + b"x", f"{TEXT}\ufffd"),
        (TEXT.encode("utf-16-le"), TEXT),
        (TEXT.encode("utf-16-be"), TEXT),
        ("Паром уходит в девять часов.".encode("utf-16-le"), "Паром уходит в девять часов."),
        (TEXT.encode("cp1252"), TEXT),
        ("Café, 5 €".encode("cp1252"), "Café, 5 €"),
        (b"A text\x81 \x93so\x94", "A text\x81 “so”"),  # a byte that cp1252 does not know
        (
            "L’ÉTÉ” est fini depuis".encode("cp1252"),
            "L’ÉTÉ” est fini depuis",
        ),  # its last two bytes are UTF-8
        ("中文".encode(), "中文"),
    ],
)
def test_encodings_are_told_by_marks_zeros_and_bytes(content: bytes, text: str) -> None:
    assert decode(content) == text


@pytest.mark.parametrize("encoding", ["cp1251", "gbk", "euc_kr", "shift_jis"])
def test_an_encoding_that_cannot_be_told_is_refused(encoding: str) -> None:
    letters = {
        "cp1251": "Паром уходит",
        "gbk": "渡轮九点离开图书馆",
        "euc_kr": "배는 아홉 시에 떠난다",
    }
    text = letters.get(encoding, "フェリーは九時に出発します")
    with pytest.raises(NotText, match=r"at least 60% must be\); if it is a text, save it as UTF"):
        decode(text.encode(encoding))


@pytest.mark.parametrize(
    ("label", "encoding"),
    [
        *(("latin-1", "cp1252"), ("ISO-8859-1 ", "cp1252"), ("us-ascii", "cp1252")),
        *(("windows-1251", "cp1251"), ("gb2312", "gbk"), ("shift_jis", "cp932")),
        *(("euc-kr", "cp949"), ("iso-8859-9", "cp1254"), ("KOI8-R", "koi8-r")),
    ],
)
def test_labels_mean_what_browsers_take_them_for(label: str, encoding: str) -> None:
    text = {"cp1252": "“5 €”", "gbk": "渡轮", "cp932": "フェリー", "cp949": "배는", "cp1254": "ığ"}
    content = text.get(encoding, "Паром").encode(encoding)
    assert decode(content, label) == text.get(encoding, "Паром")


@pytest.mark.parametrize(
    ("begin", "encoding"),
    [
        ('<?xml version="1.0" encoding="windows-1251"?>\n<a>', "cp1251"),
        ("<?xml version='1.0' encoding='Shift_JIS' standalone='yes'?><a>", "cp932"),
        ("#!/usr/bin/python3\n# -*- coding: koi8_r -*-\n#", "koi8-r"),
        ("# vim: set fileencoding=cp1251 :\n#", "cp1251"),
        ("# -*- coding: iso-2022-jp-unix -*-\n", "iso2022_jp"),
        ('@charset "gb2312";\n/*', "gbk"),
        ("<!DOCTYPE html>\n<meta charset=euc-kr>\n<?php", "cp949"),
        ("# coding: hz\n", "hz"),
        ("/* -*- mode: c; coding: koi8-r -*- */\n//", "koi8-r"),
        ('msgid ""\nmsgstr ""\n"Content-Type: text/plain; charset=KOI8-R\\n"\n', "koi8-r"),
    ],
)
def test_what_a_text_says_of_its_encoding_is_heeded(begin: str, encoding: str) -> None:
    said = {
        "cp932": "フェリー",
        "iso2022_jp": "フェリー",
        "gbk": "渡轮",
        "hz": "渡轮",
        "cp949": "배는",
    }
    text = begin + said.get(encoding, "Паром")
    assert text_of(text.encode(encoding), "a.x").text == text


@pytest.mark.parametrize(
    "begin",
    [
        "code\n# coding: cp1251\n",
        "# Coding: cp1251 or not?\n",
        "#\n#\n# coding: cp1251\n",
        '<a b="<?xml encoding=cp1251?>">',
    ],
)
def test_what_stands_elsewhere_names_no_encoding(begin: str) -> None:
    assert text_of(f"{begin}Café".encode(), "a.x").text == f"{begin}Café"


def test_sequences_of_japanese_are_told_from_those_of_terminals() -> None:
    text = "フェリーは九時に出発します。OK?\n"
    assert decode(text.encode("iso2022_jp")) == text
    terminal = "\x1b[1mready\x1b(B\x1b[m\n"
    assert decode(terminal.encode()) == terminal


@pytest.mark.parametrize("text", ["buoy", "the ferry is late!", "a"])
def test_a_zero_in_a_short_text_makes_no_utf_16(text: str) -> None:
    for at in range(len(text) + 1):
        assert decode(f"{text[:at]}\0{text[at:]}".encode()) == text


def test_a_label_that_is_wrong_or_unknown_is_without_effect() -> None:
    for label in ("utf-8", "punycode", "rot13", "no such thing"):
        assert decode("Café für 5 €".encode("cp1252"), label) == "Café für 5 €"


@pytest.mark.parametrize("byte", [b"\xff", b"\xc3\xa9\xff", b"\0\x80", b"\x07a", b"a\0"])
def test_a_hostile_text_ends_soon(byte: bytes) -> None:
    """Each wrong byte must not cost a call of Python."""
    began_s = time.process_time()
    with suppress(NoText):
        text_of(byte * (16 << 20), "x")
    assert time.process_time() - began_s < 8
