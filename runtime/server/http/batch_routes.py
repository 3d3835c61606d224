"""The routes of /v1/files and /v1/batches."""

from __future__ import annotations

import asyncio
import secrets
import time
from typing import Annotated, Literal, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import Response
from msgspec import Meta, Struct
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException

from ..api import limits
from ..api.errors import HttpError
from ..batches.batches import Batches
from ..batches.store import Batch, FileObject
from .bodies import decode_body, json_response
from .openapi import operation

T = TypeVar("T")
_WINDOW_S = 24 * 3600
_FORM = {
    "type": "object",
    "properties": {"purpose": {"enum": ["batch"]}, "file": {"type": "string", "format": "binary"}},
    "required": ["purpose", "file"],
    "additionalProperties": False,
}
_ERRORS = (400, 404, 408, 413)


class BatchRequest(Struct, forbid_unknown_fields=True, frozen=True):
    """POST /v1/batches."""

    input_file_id: Annotated[str, Meta(max_length=64)]
    endpoint: Literal["/v1/completions", "/v1/chat/completions", "/v1/embeddings"]
    completion_window: Literal["24h"]
    metadata: Annotated[dict[str, str], Meta(max_length=16)] | None = None


class FileList(Struct):
    """Answer of GET /v1/files."""

    data: list[FileObject]
    object: str = "list"
    has_more: bool = False


class BatchList(Struct):
    """Answer of GET /v1/batches."""

    data: list[Batch]
    object: str = "list"
    has_more: bool = False


class Deleted(Struct):
    """Answer of DELETE /v1/files/{id}."""

    id: str
    deleted: bool
    object: str = "file"


def add_batches(app: FastAPI, batches: Batches) -> None:
    """Add the routes of /v1/files and /v1/batches."""
    _add_files(app, batches)
    _add_batches(app, batches)


def _add_files(app: FastAPI, batches: Batches) -> None:
    store = batches.store

    @app.post("/v1/files", **operation(FileObject, errors=_ERRORS, form=_FORM))
    async def upload(request: Request) -> Response:
        """Store a file of requests."""
        name, content = await _uploaded(request)
        client = request.scope["icc.client"]
        return json_response(await asyncio.to_thread(store.add_file, client, name, "batch", content))

    @app.get("/v1/files", **operation(FileList))
    async def files(request: Request) -> Response:
        """The files of the client."""
        return json_response(FileList(await asyncio.to_thread(store.files, request.scope["icc.client"])))

    @app.get("/v1/files/{file_id}", **operation(FileObject, errors=(404,)))
    async def file(request: Request, file_id: str) -> Response:
        """A file without its content."""
        return json_response(_found(await asyncio.to_thread(store.file, request.scope["icc.client"], file_id)))

    @app.get("/v1/files/{file_id}/content", **operation(None, errors=(404,)))
    async def content(request: Request, file_id: str) -> Response:
        """The content of a file."""
        raw = _found(await asyncio.to_thread(store.content, request.scope["icc.client"], file_id))
        return Response(raw, media_type="text/plain; charset=utf-8")

    @app.delete("/v1/files/{file_id}", **operation(Deleted, errors=(404,)))
    async def delete(request: Request, file_id: str) -> Response:
        """Delete a file."""
        _found(await asyncio.to_thread(store.delete_file, request.scope["icc.client"], file_id) or None)
        return json_response(Deleted(file_id, True))


def _add_batches(app: FastAPI, batches: Batches) -> None:
    store = batches.store

    @app.post("/v1/batches", **operation(Batch, BatchRequest, errors=_ERRORS))
    async def create(request: Request) -> Response:
        """Run the requests of a file, at low priority."""
        body = await decode_body(request, BatchRequest)
        client, now = request.scope["icc.client"], int(time.time())
        _found(await asyncio.to_thread(store.file, client, body.input_file_id))
        batch = Batch(
            id=f"batch_{secrets.token_hex(12)}",
            endpoint=body.endpoint,
            input_file_id=body.input_file_id,
            completion_window=body.completion_window,
            created_at=now,
            expires_at=now + _WINDOW_S,
            metadata=body.metadata,
        )
        await asyncio.to_thread(store.add_batch, client, batch)
        batches.added()
        return json_response(batch)

    @app.get("/v1/batches", **operation(BatchList))
    async def every(request: Request) -> Response:
        """The batches of the client, the newest first."""
        return json_response(BatchList(await asyncio.to_thread(store.batches, request.scope["icc.client"])))

    @app.get("/v1/batches/{batch_id}", **operation(Batch, errors=(404,)))
    async def one(request: Request, batch_id: str) -> Response:
        """A batch and its progress."""
        return json_response(_found(await asyncio.to_thread(store.batch, request.scope["icc.client"], batch_id)))

    @app.post("/v1/batches/{batch_id}/cancel", **operation(Batch, errors=(404,)))
    async def cancel(request: Request, batch_id: str) -> Response:
        """Cancel a batch; its results so far are kept."""
        batch = _found(await asyncio.to_thread(store.batch, request.scope["icc.client"], batch_id))
        return json_response(await batches.cancel(batch))


def _found(value: T | None) -> T:
    if value is None:
        raise HttpError(404, "there is no file or batch of this id", code="not_found")
    return value


async def _uploaded(request: Request) -> tuple[str, bytes]:
    """The name and the content of the file in a form."""
    declared = request.headers.get("content-length", "")
    if not declared.isdigit() or int(declared) > limits.UPLOAD_BYTES:
        raise HttpError(
            413, f"an upload needs a content-length of at most {limits.UPLOAD_BYTES} bytes", code="body_too_large"
        )
    try:
        async with asyncio.timeout(limits.BODY_S * 10):
            form = await request.form(max_files=1, max_fields=8)
    except (MultiPartException, HTTPException, ValueError, KeyError) as error:
        raise HttpError(400, "the body is not a form with a file", code="invalid_form") from error
    except TimeoutError:
        raise HttpError(408, "the body came too slowly", code="body_timeout") from None
    try:
        file = form.get("file")
        if form.get("purpose") != "batch" or not isinstance(file, UploadFile) or set(form) != {"purpose", "file"}:
            raise HttpError(400, "a form of `purpose` = batch and a `file` is needed", "purpose", "invalid_value")
        return (file.filename or "file")[:256], await file.read()
    finally:
        await form.close()
