"""PDFs: their text, and what is said of those that have none or would take too long."""

from __future__ import annotations

import asyncio
import io
import threading

import httpx
import pytest

from gemserve.api.documents import file_queue
from gemserve.api.documents.file_queue import MAX_PDFS, FileQueue
from gemserve.errors import PdfsBusy, RequestError
from gemserve.files.file_text import FileText
from gemserve.files.limited_process import ReadingLimits
from gemserve.files.pdf_text import cleaned, read_pdf
from tests.fakes import Api
from tests.pdfs import pdf_of

pytest.importorskip("pypdf", reason='"gemserve[pdf]" is not installed')
pytestmark = pytest.mark.anyio
PDF = b"%PDF-"
LIMITS = ReadingLimits(text_bytes=1000, pages=10)
PAGES = ["The code of the lantern is 48213.", "", "It hangs beside the door."]
TEXT = f"{PAGES[0]}\n\n{PAGES[2]}"


async def send(api: Api, content: bytes, path: str = "/v1/documents/text") -> httpx.Response:
    return await api.client.post(path, files={"file": ("notes.pdf", content, "application/pdf")})


async def test_the_text_of_a_pdf_is_read(api: Api) -> None:
    reply = await send(api, pdf_of(PAGES))
    assert reply.status_code == 200, reply.text
    assert reply.json() == {"name": "notes.pdf", "text": TEXT, "pages": 3}


async def test_a_pdf_is_stored_as_its_text(api: Api) -> None:
    reply = await send(api, pdf_of(PAGES), "/v1/documents?wait=true")
    assert reply.status_code == 200, reply.text
    stored = reply.json()
    assert (stored["name"], stored["bytes"]) == ("notes.pdf", len(TEXT))
    body = {"model": "fake", "prompt": "a", "document": stored["id"]}
    await api.client.post("/v1/completions", json=body)
    tokenizer = api.serving.builder.tokenizer
    prompt = tokenizer.decode(api.core.requests[-1].prompt_ids, skip_special_tokens=True)
    assert prompt == f"{TEXT}\n\na"


async def test_a_text_file_is_its_own_text(api: Api) -> None:
    reply = await send(api, "Über".encode())
    assert reply.json() == {"name": "notes.pdf", "text": "Über", "pages": None}


def encrypted(password: str) -> bytes:
    from pypdf import PdfReader, PdfWriter

    writer = PdfWriter(clone_from=PdfReader(io.BytesIO(pdf_of(PAGES))))
    writer.encrypt(user_password=password, owner_password="other", algorithm="RC4-128")
    out = io.BytesIO()
    writer.write(out)
    return out.getvalue()


def test_pages_begin_within_the_text() -> None:
    """An empty last page began two characters behind the end."""
    second = len(PAGES[0]) + 2
    assert read_pdf(pdf_of(PAGES), "a.pdf", LIMITS).page_starts == (0, second, second)
    text = read_pdf(pdf_of([PAGES[0], ""]), "a.pdf", LIMITS)
    assert text.page_starts == (0, len(text.text))


def test_ligatures_are_letters() -> None:
    """A page printed by Chromium had the word "filter" with a ligature; no search found it."""
    assert cleaned(" the \ufb01lter\ufb00\0 ") == "the filterff"


def test_a_pdf_that_only_forbids_printing_is_read() -> None:
    assert read_pdf(encrypted(""), "a.pdf", LIMITS).text == TEXT


@pytest.mark.parametrize(
    ("content", "code", "reason"),
    [
        (pdf_of(["", ""]), "pdf_without_text", "no text on its 2 page(s)"),
        (pdf_of(["x"] * 11), "pdf_too_large", "has 11 pages, the limit is 10"),
        (pdf_of(["x" * 600] * 2), "pdf_too_large", "more than 1000 bytes of text"),
        (b"%PDF-1.7 \xff\xfe", "pdf_invalid", "cannot be read as a PDF"),
        (pdf_of(["x"])[:200], "pdf_invalid", "cannot be read as a PDF"),
    ],
    ids=["scan", "pages", "text", "noise", "cut"],
)
def test_a_refusal_names_the_file_the_reason_and_the_limit(
    content: bytes, code: str, reason: str
) -> None:
    with pytest.raises(RequestError) as caught:
        read_pdf(content, "notes.pdf", LIMITS)
    assert caught.value.code == code, str(caught.value)
    assert "'notes.pdf'" in str(caught.value)
    assert reason in str(caught.value)


def test_an_encrypted_pdf_is_refused() -> None:
    with pytest.raises(RequestError, match=r"'a\.pdf' is encrypted"):
        read_pdf(encrypted("secret"), "a.pdf", LIMITS)


@pytest.mark.parametrize(
    "content",
    [
        b"BT /F1 12 Tf " + b"(a) Tj " * 1_000_000 + b"ET",  # much to draw
        b"[" * 5_000_000,  # much to hold
        bytes(100 << 20),  # a bomb: 100 KB in the file
    ],
    ids=["time", "memory", "bomb"],
)
def test_a_hostile_pdf_ends_soon(content: bytes) -> None:
    """It would hold a thread for minutes, or the server's memory."""
    limits = ReadingLimits(text_bytes=1 << 20, cpu_s=1, wall_s=200, memory_bytes=256 << 20)
    with pytest.raises(RequestError) as caught:
        read_pdf(pdf_of(["x"], content=content), "bomb.pdf", limits)
    assert caught.value.code in ("pdf_too_large", "pdf_invalid", "pdf_without_text")
    assert "'bomb.pdf'" in str(caught.value)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """No PDF is read to its end before this is set."""
    gate = threading.Event()

    def read_slowly(content: bytes, name: str, *_: object) -> FileText:
        gate.wait(30)
        return FileText(text=name, kind="pdf", pages=(0,))

    monkeypatch.setattr(file_queue, "read_file", read_slowly)
    return gate


async def test_pdfs_wait_in_a_queue_of_their_own(gate: threading.Event) -> None:
    """Many slow PDFs would take the threads in which all requests are parsed."""
    queue = FileQueue(LIMITS)
    tasks = [asyncio.ensure_future(queue.read(PDF, str(i))) for i in range(MAX_PDFS)]
    await asyncio.sleep(0)
    with pytest.raises(PdfsBusy, match="which is the limit"):
        await queue.read(PDF, "one more")
    gate.set()
    assert [(await task).text for task in tasks] == [str(i) for i in range(MAX_PDFS)]
    assert (await queue.read(PDF, "later")).text == "later"


async def test_one_key_s_pdfs_leave_places_for_another_s(gate: threading.Event) -> None:
    """Eight PDFs that take a minute each kept every other key from having one read."""
    queue = FileQueue(LIMITS)
    tasks = [
        asyncio.ensure_future(queue.read(PDF, str(i), b"greedy"))
        for i in range(file_queue.MAX_PDFS_OF_A_KEY)
    ]
    await asyncio.sleep(0)
    with pytest.raises(PdfsBusy, match="of this API key"):
        await queue.read(PDF, "one more", b"greedy")
    tasks.append(asyncio.ensure_future(queue.read(PDF, "other", b"modest")))
    gate.set()
    assert [(await task).text for task in tasks][-1] == "other"
    assert (await queue.read(PDF, "later", b"greedy")).text == "later"
