"""Reads PDFs and other formats a few at a time, in threads of their own: nobody else waits."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from anyio import CapacityLimiter, to_thread
from starlette.exceptions import HTTPException
from starlette.types import Receive

from gemserve.errors import LibraryError, PdfsBusy, RequestError, shown
from gemserve.files.file_text import FileText, NoText, is_plain, read_file
from gemserve.files.limited_process import Reading, ReadingLimits
from gemserve.holdings import Holdings

AT_ONCE = 2  # each may take a processor
MAX_PDFS = 8  # files that are read or wait
MAX_PDFS_OF_A_KEY = 4  # of these


class FileQueue:
    """A bounded queue in front of the processes that read files. Use it on the event loop."""

    def __init__(self, limits: ReadingLimits) -> None:
        self._limits = limits
        self._threads = CapacityLimiter(AT_ONCE)
        self._under_way = Holdings(MAX_PDFS)

    async def read(
        self, content: bytes, name: str, tenant: bytes = b"", *, receive: Receive | None = None
    ) -> FileText:
        """The text of a file. Plain text does not wait. Raises `RequestError` and `PdfsBusy`.

        `receive`: of a request whose body was read. When its client leaves, nothing goes on.
        """
        if is_plain(content, name):
            return await to_thread.run_sync(_read, content, name, self._limits, None)
        if self._under_way.free <= 0:
            raise PdfsBusy(f"{MAX_PDFS} are being read, which is the limit")
        if tenant and self._under_way.of(tenant) >= MAX_PDFS_OF_A_KEY:
            raise PdfsBusy(f"{MAX_PDFS_OF_A_KEY} of this API key are, which is the limit")
        with self._under_way.one_more(tenant):
            return await self._read_apart(content, name, receive)

    async def _read_apart(self, content: bytes, name: str, receive: Receive | None) -> FileText:
        reading = Reading()
        read = partial(_read, content, name, self._limits, reading)
        work = asyncio.ensure_future(to_thread.run_sync(read, limiter=self._threads))
        tasks: list[asyncio.Future[Any]] = [work]
        if receive is not None:
            tasks.append(asyncio.ensure_future(_until_left(receive)))
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise HTTPException(499, "the client left")  # nobody reads it
            return await work
        finally:
            reading.end()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def _read(content: bytes, name: str, limits: ReadingLimits, reading: Reading | None) -> FileText:
    try:
        return read_file(content, name, limits, reading)
    except (NoText, LibraryError) as error:
        raise RequestError(
            f"file: {shown(name)} {error}", param="file", code="file_without_text"
        ) from error


async def _until_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
