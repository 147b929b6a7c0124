"""A document that comes as a file, as OpenAI's clients upload files."""

from __future__ import annotations

import gzip
import json
from typing import Any

import httpx
import pytest

from gemserve.api.requests.form_body import parse_form
from gemserve.errors import RequestError
from tests.fakes import Api, FakeCore, api_over

pytestmark = pytest.mark.anyio
PATH = "/v1/documents"
TEXT = "Béa's river runs.\r\n--not-a-boundary\r\n\r\nIt ends.\r\n"


async def upload(
    api: Api, content: bytes, name: str = "river.txt", **fields: str
) -> httpx.Response:
    files = {"file": (name, content, "text/plain")}
    return await api.client.post(PATH, files=files, data=fields)


async def test_a_file_is_stored_to_the_byte(api: Api) -> None:
    """With the fields of OpenAI's /v1/files, and a byte order mark, which is not text."""
    reply = await upload(
        api,
        b"\xef\xbb\xbf" + TEXT.encode(),
        purpose="user_data",
        pin="true",
        wait="True",
        filter=json.dumps({"method": "sieve", "keep": 32}),
        **{"expires_after[anchor]": "created_at", "expires_after[seconds]": "60"},
    )
    assert reply.status_code == 200, reply.text
    document = reply.json()
    assert document["name"] == "river.txt"
    assert document["bytes"] == len(TEXT.encode())
    assert document["expires_at"] - document["created_at"] == 60
    assert document["status"] == "ready"
    assert api.core.requests[0].pin
    body: dict[str, Any] = {"model": "fake", "prompt": "a", "document": document["id"]}
    await api.client.post("/v1/completions", json={**body, "echo": True})
    text = api.serving.builder.tokenizer.decode(
        api.core.requests[-1].prompt_ids, skip_special_tokens=True
    )
    assert text == f"{TEXT}\n\na"


@pytest.mark.parametrize(
    ("content", "fields", "param"),
    [
        (b"", {}, "file"),
        (b" \n", {}, "file"),
        (b"%PDF-1.7 \xff\xfe", {}, "file"),
        (b"x", {"ttl": "soon"}, "ttl"),
        (b"x", {"ttl": "-1"}, "ttl"),
        (b"x", {"pin": "maybe"}, "pin"),
        (b"x", {"filter": "{"}, "filter"),
        (b"x", {"filter": "most"}, "filter"),
        (b"x", {"text": "y"}, "text"),
        (b"x", {"anything": "y"}, "anything"),
        (b"x", {"expires_after[anchor]": "created_at"}, "expires_after.seconds"),
    ],
)
async def test_a_wrong_field_is_named(
    api: Api, content: bytes, fields: dict[str, str], param: str
) -> None:
    reply = await upload(api, content, **fields)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param
    assert not api.core.requests


async def test_a_wrong_switch_in_the_address_is_named(api: Api) -> None:
    reply = await api.client.post(PATH, params={"wait": "soon"}, json={"text": "x"})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "wait")


FIELD = b'Content-Disposition: form-data; name="%s"\r\n\r\n%s'


FILE = 'Content-Disposition: form-data; name="file"; filename%s\r\n\r\n'


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ('="Béa 🌍.txt"', "Béa 🌍.txt"),
        ("*=UTF-8''B%C3%A9a.txt", "Béa.txt"),
        ('="a\\"b.txt"', 'a"b.txt'),
        ('=""', ""),
    ],
)
def test_names_of_files_are_read_as_clients_write_them(given: str, name: str) -> None:
    """Bug: names in UTF-8, as browsers and curl send them, came out as question marks."""
    fields = parse_form(form((FILE % given).encode()), "multipart/form-data; boundary=B")
    assert fields["file"].filename == name


def form(*fields: bytes, end: bytes = b"\r\n--B--\r\n") -> bytes:
    return b"".join(b"\r\n--B\r\n" + field for field in fields) + end


def parsed(raw: bytes, content_type: str = "multipart/form-data; boundary=B") -> dict[str, bytes]:
    return {name: field.value for name, field in parse_form(raw, content_type).items()}


async def test_the_charset_of_a_file_is_heeded(api: Api) -> None:
    for name in ("a.txt", "a.csv"):
        given = (name, "Паром".encode("koi8-r"), "text/plain; charset=KOI8-R")
        reply = await api.client.post(f"{PATH}/text", files={"file": given})
        assert reply.json()["text"] == "Паром", reply.text
    given = ("a.txt.gz", gzip.compress(b"Ferry"), "text/plain; charset=utf-16")
    reply = await api.client.post(f"{PATH}/text", files={"file": given})
    assert reply.json()["text"] == "Ferry"


def test_forms_that_are_allowed_are_read() -> None:
    body = form(FIELD % (b"a", b"1"), FIELD % (b"b", b"x\r\n\r\n--C\r\n"))
    expected = {"a": b"1", "b": b"x\r\n\r\n--C\r\n"}
    assert parsed(body) == parsed(body[2:]) == parsed(b"preamble" + body + b"epilogue") == expected
    assert parsed(body, 'Multipart/Form-Data; charset=utf-8; boundary="B"') == expected
    spaced = form(b"").replace(b"--B\r\n", b"--B  \r\n" + FIELD % (b"a", b""), 1)
    assert parsed(spaced) == {"a": b""}


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "no end"),
        (form(FIELD % (b"a", b"1"), end=b""), "no end"),
        (form(b"no headers"), "no headers"),
        (form(b"X: " + b"y" * 5000 + b"\r\n\r\n"), "no headers, or too long"),
        (form(b"Content-Type: text/plain\r\n\r\nx"), "Content-Disposition"),
        (form(b"Content-Disposition: form-data\r\n\r\nx"), "no name"),
        (form((FILE % "*0*=\x00''%C3").encode()), "cannot be read"),  # of the standard library
        (form(FIELD % (b"a", b"1"), FIELD % (b"a", b"2")), "twice"),
        (form(*(FIELD % (b"%d" % i, b"") for i in range(40))), "more than 32"),
        (
            form(b"Content-Transfer-Encoding: base64\r\n" + FIELD % (b"a", b"1")),
            "Content-Transfer-Encoding",
        ),
    ],
)
def test_a_broken_form_is_refused(raw: bytes, words: str) -> None:
    """A form that is cut off must not become a shorter document."""
    with pytest.raises(RequestError, match=words):
        parsed(raw)
    with pytest.raises(RequestError, match="boundary"):
        parsed(raw, "multipart/form-data")


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("a.csv", b"Goal,Leaves\nMalmo,9\n", "Goal; Leaves\nGoal: Malmo; Leaves: 9"),
        ("a.txt", "Fähre – Café".encode() + b"\xff", "Fähre – Café\ufffd"),
        ("a.txt", "Fähre für 5 €".encode("cp1252"), "Fähre für 5 €"),
        ("a.txt", "Fähre".encode("utf-16"), "Fähre"),
        ("a.log.gz", gzip.compress(b"bell \x07" + b"x" * 99, mtime=0), "bell " + "x" * 99),
        ("a.rtf", rb"{\rtf1 Caf\'e9}", "Café"),
    ],
)
async def test_a_file_is_read_as_libraries_read_it(
    api: Api, name: str, content: bytes, text: str
) -> None:
    """Anything but UTF-8 was refused, although libraries took it."""
    files = {"file": (name, content, "text/plain")}
    reply = await api.client.post("/v1/documents/text", files=files)
    assert reply.json() == {"name": name, "text": text, "pages": None}
    assert (await upload(api, content, name)).json()["bytes"] == len(text.encode())


async def test_the_text_of_a_file_counts_as_a_large_reply(tokenizer: Any) -> None:
    """64 KiB that were packed made a reply of 64 MiB, which no limit counted."""
    files = {"file": ("a.txt.gz", gzip.compress(b"word " * (1 << 20)), "text/plain")}
    async with api_over(FakeCore(), tokenizer, reply_memory_bytes=1 << 20) as api:
        reply = await api.client.post(f"{PATH}/text", files=files)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert (error["param"], error["code"]) == ("file", "reply_too_large")


@pytest.mark.parametrize("path", [PATH, f"{PATH}/text"])
async def test_a_file_without_text_is_refused_by_name(api: Api, path: str) -> None:
    files = {"file": ("a.xlsx", b"no zip", "text/plain")}
    error = (await api.client.post(path, files=files)).json()["error"]
    assert (error["param"], error["code"]) == ("file", "file_without_text")
    assert "'a.xlsx' is no XLSX file" in error["message"]
