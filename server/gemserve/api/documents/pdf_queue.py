"""Reads PDFs a few at a time, in threads of their own: no other request waits for them."""

from __future__ import annotations

from anyio import CapacityLimiter, to_thread

from gemserve.api.documents.pdf_text import PdfLimits, PdfText, read_pdf
from gemserve.errors import PdfsBusy

AT_ONCE = 2  # each may take a processor
MAX_PDFS = 8  # that are read or wait


class PdfQueue:
    """A bounded queue in front of the processes that read PDFs. Use it on the event loop."""

    def __init__(self, limits: PdfLimits) -> None:
        self._limits = limits
        self._threads = CapacityLimiter(AT_ONCE)
        self._count = 0

    async def read(self, content: bytes, name: str) -> PdfText:
        """The text of a PDF. Raises what `read_pdf` raises."""
        if self._count >= MAX_PDFS:
            raise PdfsBusy(f"{MAX_PDFS} are being read, which is the limit")
        self._count += 1
        try:
            return await to_thread.run_sync(
                read_pdf, content, name, self._limits, limiter=self._threads
            )
        finally:
            self._count -= 1
