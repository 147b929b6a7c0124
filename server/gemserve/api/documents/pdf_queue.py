"""Reads PDFs a few at a time, in threads of their own: no other request waits for them."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from anyio import CapacityLimiter, to_thread
from starlette.exceptions import HTTPException
from starlette.types import Receive

from gemserve.errors import PdfsBusy
from gemserve.library.pdf_text import PdfLimits, PdfReading, PdfText, read_pdf

AT_ONCE = 2  # each may take a processor
MAX_PDFS = 8  # that are read or wait
MAX_PDFS_OF_A_KEY = 4  # of these


class PdfQueue:
    """A bounded queue in front of the processes that read PDFs. Use it on the event loop."""

    def __init__(self, limits: PdfLimits) -> None:
        self._limits = limits
        self._threads = CapacityLimiter(AT_ONCE)
        self._under_way: Counter[bytes] = Counter()  # by tenant

    async def read(
        self, content: bytes, name: str, tenant: bytes = b"", *, receive: Receive | None = None
    ) -> PdfText:
        """The text of a PDF. Raises what `read_pdf` raises.

        `receive`: of a request whose body was read. When its client leaves, nothing goes on.
        """
        if self._under_way.total() >= MAX_PDFS:
            raise PdfsBusy(f"{MAX_PDFS} are being read, which is the limit")
        if tenant and self._under_way[tenant] >= MAX_PDFS_OF_A_KEY:
            raise PdfsBusy(f"{MAX_PDFS_OF_A_KEY} of this API key are, which is the limit")
        self._under_way[tenant] += 1
        try:
            return await self._read(content, name, receive)
        finally:
            self._under_way[tenant] -= 1
            self._under_way += Counter()  # drops tenants without any

    async def _read(self, content: bytes, name: str, receive: Receive | None) -> PdfText:
        reading = PdfReading()
        work = asyncio.ensure_future(
            to_thread.run_sync(
                read_pdf, content, name, self._limits, reading, limiter=self._threads
            )
        )
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


async def _until_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
