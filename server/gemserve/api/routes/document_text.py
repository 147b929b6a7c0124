"""`/v1/documents/text`: the text of a file, which is not stored. The inspector reads files so."""

from __future__ import annotations

from anyio import to_thread
from fastapi import Request as HttpRequest
from fastapi import Response

from gemserve.api.access.keys import tenant_of
from gemserve.api.documents.file_queue import FileQueue
from gemserve.api.error_replies import Error
from gemserve.api.replies.document_types import FileText
from gemserve.api.replies.large_replies import CHARS_PER_SCORED, json_reply
from gemserve.api.requests.document_form import FILE_SCHEMA, parse_file_form
from gemserve.api.requests.form_body import is_form
from gemserve.api.routes.operation import Operation, Routes
from gemserve.api.routes.submission import Submitter, read_body
from gemserve.errors import RequestError
from gemserve.prompting.encoding import num_bytes

TEXT = Operation(
    summary="Read the text of a file, for example a PDF",
    form=FILE_SCHEMA,
    reply=FileText,
    unavailable=Error,
)


def document_text_routes(submitter: Submitter, files: FileQueue) -> Routes:
    routes = Routes()

    @routes.add("POST", "/v1/documents/text", TEXT)
    async def post_document_text(http: HttpRequest) -> Response:
        with submitter.counting_refusals():
            raw = await read_body(http)
            content_type = http.headers.get("content-type", "")
            if not is_form(content_type):
                raise RequestError(
                    "the body must be a form (multipart/form-data) with a file", param=None
                )
            file = await to_thread.run_sync(parse_file_form, raw, content_type)
            name = file.filename or "the file"
            read = await files.read(file.value, name, tenant_of(http), receive=http.receive)
            state = http.scope["state"]
            state["body"].release()
            state["reply"].take(2 * num_bytes(read.text), "file")  # as text and as what is sent
        pages = len(read.pages) if read.kind == "pdf" else None
        reply: FileText = {"name": name, "text": read.text, "pages": pages}
        return await json_reply(lambda: reply, {}, len(read.text) // CHARS_PER_SCORED)

    return routes
