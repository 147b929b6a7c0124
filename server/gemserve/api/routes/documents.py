"""`/v1/documents`: texts that requests can name by an id, read once in advance."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from anyio import to_thread
from fastapi import Request as HttpRequest

from gemserve.api.access.keys import tenant_of
from gemserve.api.access.request_id import request_id_of
from gemserve.api.documents.document_store import (
    Document,
    DocumentStore,
    Wish,
    held_bytes,
    new_document_id,
)
from gemserve.api.documents.file_queue import FileQueue
from gemserve.api.error_replies import Error
from gemserve.api.replies import document_types
from gemserve.api.replies.document_types import document_object
from gemserve.api.replies.event_reader import AtEnd, Observers
from gemserve.api.requests.client_timeout import Timeout, timeout_of
from gemserve.api.requests.document_body import DocumentBody
from gemserve.api.requests.document_form import (
    FORM_SCHEMA,
    find_file,
    parse_document_form,
    read_switch,
)
from gemserve.api.requests.document_request import count_tokens, warming_request
from gemserve.api.requests.form_body import is_form
from gemserve.api.requests.json_body import parse_body
from gemserve.api.requests.memory_fields import memory_fields_named
from gemserve.api.requests.request_builder import RequestBuilder
from gemserve.api.requests.turns import TextWait
from gemserve.api.routes.operation import Operation, Routes
from gemserve.api.routes.submission import Submitter, read_body
from gemserve.api.routes.warm_up import WarmUps
from gemserve.contract.adapters import LoadedAdapter
from gemserve.contract.requests import Request
from gemserve.errors import DocumentNotFound, EngineDead

_PATH = "/v1/documents"
STORE = Operation(
    summary="Store a document, and read it in advance",
    body=DocumentBody,
    form=FORM_SCHEMA,
    query={"wait": {"type": "boolean"}},
    example={"text": "The code for the lantern is 48213.", "ttl": 600},
    reply=document_types.Document,
    unavailable=Error,
)
LIST = Operation(summary="List the documents of this key", reply=document_types.Documents)
DESCRIBE = Operation(summary="Describe a document", reply=document_types.Document)
DELETE = Operation(summary="Delete a document", reply=document_types.DocumentDeleted)


@dataclass(frozen=True, slots=True)
class Intake:
    """A body whose document may be stored, and the request that warms the cache for it.

    `timeout`: for how long the client waits.
    """

    body: DocumentBody
    document: Document
    wish: Wish
    request: Request
    timeout: Timeout


def document_routes(
    submitter: Submitter, builder: RequestBuilder, store: DocumentStore, files: FileQueue
) -> Routes:
    routes = Routes()
    warm_ups = WarmUps(submitter.metrics.internal_errors)
    engine = submitter.engine

    def describe(document: Document) -> document_types.Document:
        return document_object(document, engine.stored_documents.get(document.id))

    @routes.add("POST", _PATH, STORE)
    async def post_document(http: HttpRequest) -> document_types.Document:
        arrived_s = time.monotonic()
        waits = read_switch("wait", http.query_params.get("wait", "false"))
        tenant = tenant_of(http)
        with submitter.counting_refusals():
            submitter.check_room(tenant)
            submitter.check_wait(tenant)
            intake = await _take_in(http, submitter, builder, store, files)
            store.check(tenant, intake.wish)  # again: time has passed
            document = intake.document
            num_tokens = len(intake.request.prompt_ids)
            submitter.backlog.check_room(tenant, num_tokens)
            with memory_fields_named(intake.body):
                stream = engine.submit(replace(intake.request, tenant=tenant))
        http.scope["state"]["body"].release()
        store.add(tenant, document)
        observers = submitter.observers(stream, arrived_s)
        if (place := http.scope["state"].get("place")) is not None:
            place.charge(num_tokens)
            observers.append(AtEnd(place.hand_over().leave))  # the pass goes on after the reply
        warm_ups.follow(document, stream, Observers(*observers))
        if waits or intake.body.wait:
            left_s = max(0.0, intake.timeout.ends_s - time.monotonic())
            with suppress(TimeoutError):  # who waits no longer must know its id all the same
                await asyncio.wait_for(document.is_settled.wait(), left_s)
        return describe(document)

    @routes.add("GET", _PATH, LIST)
    async def get_documents(http: HttpRequest) -> document_types.Documents:
        data = [describe(document) for document in store.list(tenant_of(http))]
        return {"object": "list", "data": data}

    @routes.add("GET", f"{_PATH}/{{document_id:path}}", DESCRIBE)
    async def get_document(http: HttpRequest, document_id: str) -> document_types.Document:
        document = store.find(tenant_of(http), document_id)
        if document is None:
            raise DocumentNotFound(document_id, param="document_id")
        return describe(document)

    @routes.add("DELETE", f"{_PATH}/{{document_id:path}}", DELETE)
    async def delete_document(
        http: HttpRequest, document_id: str
    ) -> document_types.DocumentDeleted:
        with suppress(EngineDead):  # whose memory nobody reads any more
            await asyncio.wrap_future(store.delete(tenant_of(http), document_id))
        return {"id": document_id, "object": "document", "deleted": True}

    return routes


async def _take_in(
    http: HttpRequest,
    submitter: Submitter,
    builder: RequestBuilder,
    store: DocumentStore,
    files: FileQueue,
) -> Intake:
    """Parse the body and build the warm-up. Raises `RequestError` and what adapters raise."""
    raw = await read_body(http)
    came_s = time.monotonic() - http.scope["state"].get("waited_s", 0.0)  # in an ingress
    timeout = timeout_of(http, submitter.timeout_s, came_s, is_streamed=False)
    content_type = http.headers.get("content-type", "")
    tenant, request_id = tenant_of(http), request_id_of(http)
    text = await _text_of_file(http, raw, files)

    def parse() -> tuple[DocumentBody, Wish]:
        body = _parse(raw, content_type, text)
        num_bytes = len(body.text.encode("utf-8", "surrogatepass"))
        wish = Wish(
            num_bytes=num_bytes,
            memory_bytes=held_bytes(body.text),
            ttl_s=body.ttl_s,
            is_pinned=bool(body.pin),
        )
        store.check(tenant, wish)  # before anything is tokenized
        return body, wish

    def build(adapter: LoadedAdapter | None) -> Intake:
        request = warming_request(builder, body, request_id, adapter)
        document = _document(builder, store, body, wish)
        tagged = replace(request, documents=(document.id,), pin=document.is_pinned)
        return Intake(body, document, wish, tagged, timeout)

    wait = TextWait(*submitter.most_wait(timeout))
    run = partial(submitter.turns.run, http, tenant, wait=wait)
    body, wish = await run(len(raw), parse)
    reference = submitter.models.find_reference(body)
    adapter = None if reference is None else await submitter.models.load(reference)
    return await run(wish.num_bytes, partial(build, adapter))


async def _text_of_file(http: HttpRequest, raw: bytes, files: FileQueue) -> str | None:
    """The text of the file that a form brings; None if the body is no form."""
    content_type = http.headers.get("content-type", "")
    if not is_form(content_type):
        return None
    file = await to_thread.run_sync(find_file, raw, content_type)
    name = file.filename or "the file"
    return (await files.read(file.value, name, tenant_of(http), receive=http.receive)).text


def _parse(raw: bytes, content_type: str, text: str | None) -> DocumentBody:
    if text is not None:
        return parse_document_form(raw, content_type, text)
    return parse_body(raw, DocumentBody)


def _document(
    builder: RequestBuilder, store: DocumentStore, body: DocumentBody, wish: Wish
) -> Document:
    created_s = int(time.time())
    return Document(
        id=new_document_id(),
        text=body.text,
        num_bytes=wish.num_bytes,
        num_tokens=count_tokens(builder, body.text),
        name=body.name,
        created_s=created_s,
        expires_s=created_s + store.ttl_s(wish),
        is_pinned=wish.is_pinned,
    )
