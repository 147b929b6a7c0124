"""Reads PDFs a few at a time, in threads of their own: no other request waits for them."""

from __future__ import annotations

from collections import Counter

from anyio import CapacityLimiter, to_thread

from gemserve.api.documents.pdf_text import PdfLimits, PdfText, read_pdf
from gemserve.errors import PdfsBusy

AT_ONCE = 2  # each may take a processor
MAX_PDFS = 8  # that are read or wait
MAX_PDFS_OF_A_KEY = 4  # of these


class PdfQueue:
    """A bounded queue in front of the processes that read PDFs. Use it on the event loop."""

    def __init__(self, limits: PdfLimits) -> None:
        self._limits = limits
        self._threads = CapacityLimiter(AT_ONCE)
        self._under_way: Counter[bytes] = Counter()  # by tenant

    async def read(self, content: bytes, name: str, tenant: bytes = b"") -> PdfText:
        """The text of a PDF. Raises what `read_pdf` raises."""
        if self._under_way.total() >= MAX_PDFS:
            raise PdfsBusy(f"{MAX_PDFS} are being read, which is the limit")
        if tenant and self._under_way[tenant] >= MAX_PDFS_OF_A_KEY:
            raise PdfsBusy(f"{MAX_PDFS_OF_A_KEY} of this API key are, which is the limit")
        self._under_way[tenant] += 1
        try:
            return await to_thread.run_sync(
                read_pdf, content, name, self._limits, limiter=self._threads
            )
        finally:
            self._under_way[tenant] -= 1
            self._under_way += Counter()  # drops tenants without any
