"""`/v1/libraries`: collections of files that requests can be answered from."""

from __future__ import annotations

from contextlib import suppress

from anyio import to_thread
from fastapi import Request as HttpRequest
from fastapi import Response

from gemserve.api.access.keys import tenant_of
from gemserve.api.error_replies import Error
from gemserve.api.replies.large_replies import json_reply
from gemserve.api.requests.document_form import read_switch
from gemserve.api.requests.form_body import is_form
from gemserve.api.requests.json_body import parse_body
from gemserve.api.routes.operation import Operation, Routes
from gemserve.api.routes.submission import Submitter, read_body
from gemserve.errors import LibraryFileNotFound, LibraryNotFound, NoLibraries
from gemserve_library.api import reply_types
from gemserve_library.api.bodies import (
    FORM_SCHEMA,
    LibraryBody,
    LibraryFileBody,
    parse_library_form,
)
from gemserve_library.api.reply_types import file_object, library_object, upload_object
from gemserve_library.api.shelf import Shelf
from gemserve_library.api.uploads import Uploads
from gemserve_library.library import Library, StoredFile

_PATH = "/v1/libraries"
_ONE = f"{_PATH}/{{library}}"
_FILES = f"{_ONE}/files"
_FILE = f"{_FILES}/{{path:path}}"
CREATE = Operation(
    summary="Make a library",
    body=LibraryBody,
    example={"name": "manuals"},
    reply=reply_types.Library,
)
LIST = Operation(summary="List the libraries of this key", reply=reply_types.Libraries)
DESCRIBE = Operation(summary="Describe a library", reply=reply_types.Library)
DELETE = Operation(summary="Delete a library", reply=reply_types.LibraryDeleted)
ADD = Operation(
    summary="Add a file to a library, or its new version",
    body=LibraryFileBody,
    form=FORM_SCHEMA,
    query={"wait": {"type": "boolean"}},
    example={"path": "lantern.md", "text": "The code for the lantern is 48213."},
    reply=reply_types.LibraryFile,
    unavailable=Error,
)
LIST_FILES = Operation(summary="List the files of a library", reply=reply_types.LibraryFiles)
DESCRIBE_FILE = Operation(summary="Describe a file", reply=reply_types.LibraryFile)
DELETE_FILE = Operation(
    summary="Delete a file from a library", reply=reply_types.LibraryFileDeleted
)


def library_routes(submitter: Submitter, shelf: Shelf | None, uploads: Uploads | None) -> Routes:
    """`shelf` None: the server has no libraries, and says so."""
    routes = Routes()

    def shelves() -> tuple[Shelf, Uploads]:
        if shelf is None or uploads is None:
            raise NoLibraries
        return shelf, uploads

    async def describe(tenant: bytes, name: str) -> reply_types.Library:
        kept, reading = shelves()
        described = await to_thread.run_sync(kept.describe, tenant, name)
        count = sum(upload.status == "reading" for upload in reading.list(tenant, name))
        return library_object(described, count)

    @routes.add("POST", _PATH, CREATE)
    async def post_library(http: HttpRequest) -> reply_types.Library:
        kept, _ = shelves()
        body = parse_body(await read_body(http), LibraryBody)
        with submitter.counting_refusals():
            await to_thread.run_sync(kept.create, tenant_of(http), body.name)
        return await describe(tenant_of(http), body.name)

    @routes.add("GET", _PATH, LIST)
    async def get_libraries(http: HttpRequest) -> reply_types.Libraries:
        kept, _ = shelves()
        names = await to_thread.run_sync(kept.names, tenant_of(http))
        data = []
        for name in names:
            with suppress(LibraryNotFound):  # another request has deleted it meanwhile
                data.append(await describe(tenant_of(http), name))
        return {"object": "list", "data": data}

    @routes.add("POST", _FILES, ADD)
    async def post_file(http: HttpRequest, library: str) -> reply_types.LibraryFile:
        kept, reading = shelves()
        waits = read_switch("wait", http.query_params.get("wait", "false"))
        tenant = tenant_of(http)
        with submitter.counting_refusals():
            submitter.check_room(tenant)
            reading.check_room(tenant)
            raw = await read_body(http)
            content_type = http.headers.get("content-type", "")
            with reading.one_more(tenant):  # it is unpacked onto the disk before it is listed
                await to_thread.run_sync(kept.check_names, tenant, [library], "library")
                path, given = await to_thread.run_sync(_parse, raw, content_type)
                num_bytes, content = await to_thread.run_sync(kept.hold, path, given)
                del raw, given
                http.scope["state"]["body"].release()
                try:
                    pending = num_bytes + reading.num_bytes(tenant)
                    await to_thread.run_sync(kept.check_room, tenant, pending)
                except BaseException:
                    content.close()
                    raise
        place = http.scope["state"].get("place")
        taken = None if place is None else place.hand_over()  # it is read after the reply
        upload = reading.begin(
            tenant,
            library,
            path,
            num_bytes,
            content,
            charge=lambda count: None if taken is None else taken.charge(count),
            end=lambda: None if taken is None else taken.leave(),
        )
        if not waits:
            return upload_object(library, upload)
        await upload.is_settled.wait()
        file = await to_thread.run_sync(_find_file, kept, tenant, library, path)
        if file is None or upload.status == "failed":
            return upload_object(library, upload)
        return file_object(library, file)

    @routes.add("GET", _FILES, LIST_FILES)
    async def get_files(http: HttpRequest, library: str) -> Response:
        kept, reading = shelves()
        tenant = tenant_of(http)
        files = await to_thread.run_sync(_list_files, kept, tenant, library)
        unread = reading.list(tenant, library)

        def content() -> reply_types.LibraryFiles:
            data = [file_object(library, file) for file in files]
            data += [upload_object(library, upload) for upload in unread]
            return {"object": "list", "data": data}

        return await json_reply(content, {}, len(files) // 4)

    @routes.add("GET", _FILE, DESCRIBE_FILE)
    async def get_file(http: HttpRequest, library: str, path: str) -> reply_types.LibraryFile:
        kept, reading = shelves()
        tenant = tenant_of(http)
        file = await to_thread.run_sync(_find_file, kept, tenant, library, path)
        for upload in reading.list(tenant, library):
            if upload.path == path:
                return upload_object(library, upload)
        if file is None:
            raise LibraryFileNotFound(path, param="path")
        return file_object(library, file)

    @routes.add("DELETE", _FILE, DELETE_FILE)
    async def delete_file(
        http: HttpRequest, library: str, path: str
    ) -> reply_types.LibraryFileDeleted:
        kept, reading = shelves()
        tenant = tenant_of(http)
        await to_thread.run_sync(kept.check_there, tenant, library)
        was_read = reading.cancel(tenant, library, path)
        async with reading.turn(tenant, library).for_removal(library):
            was_there = await to_thread.run_sync(kept.remove_file, tenant, library, path, was_read)
        if not (was_there or was_read):
            raise LibraryFileNotFound(path, param="path")
        return {"id": path, "object": "library.file", "deleted": True}

    @routes.add("GET", _ONE, DESCRIBE)
    async def get_library(http: HttpRequest, library: str) -> reply_types.Library:
        return await describe(tenant_of(http), library)

    @routes.add("DELETE", _ONE, DELETE)
    async def delete_library(http: HttpRequest, library: str) -> reply_types.LibraryDeleted:
        kept, reading = shelves()
        tenant = tenant_of(http)
        await to_thread.run_sync(kept.check_there, tenant, library)
        reading.cancel(tenant, library)
        async with reading.turn(tenant, library).for_removal(library):
            await to_thread.run_sync(kept.delete, tenant, library)
        return {"id": library, "object": "library", "deleted": True}

    return routes


def _parse(raw: bytes, content_type: str) -> tuple[str, bytes]:
    if is_form(content_type):
        return parse_library_form(raw, content_type)
    body = parse_body(raw, LibraryFileBody)
    return body.path, body.text.encode("utf-8", "surrogatepass")


def _list_files(shelf: Shelf, tenant: bytes, name: str) -> list[StoredFile]:
    library = shelf.open(tenant, name)
    try:
        return library.files()
    finally:
        library.close()


def _find_file(shelf: Shelf, tenant: bytes, name: str, path: str) -> StoredFile | None:
    library: Library = shelf.open(tenant, name)
    try:
        return library.find_file(path)
    finally:
        library.close()
