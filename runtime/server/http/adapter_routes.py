"""The routes that load and unload adapters: vLLM's, and the list of llama.cpp's server."""

from __future__ import annotations

from pathlib import Path

import msgspec
from fastapi import FastAPI, Request
from fastapi.responses import Response

from ..api.adapters import ServedAdapters
from ..api.requests import AdapterScale, LoadAdapterRequest, UnloadAdapterRequest
from ..api.responses import AdapterEntry, Status
from .bodies import decode_body, json_response
from .openapi import operation

_ERRORS = (400, 404, 413, 503)


def add_adapters(app: FastAPI, adapters: ServedAdapters) -> None:
    """Add /v1/load_lora_adapter, /v1/unload_lora_adapter and /lora-adapters."""

    @app.post("/v1/load_lora_adapter", **operation(Status, LoadAdapterRequest, errors=_ERRORS))
    async def load(request: Request) -> Response:
        """Load an adapter from a directory on this machine, as a model of that name."""
        body = await decode_body(request, LoadAdapterRequest)
        await adapters.load(body.lora_name, Path(body.lora_path), body.load_inplace)
        return json_response(Status("loaded"))

    @app.post("/v1/unload_lora_adapter", **operation(Status, UnloadAdapterRequest, errors=_ERRORS))
    async def unload(request: Request) -> Response:
        """Unload an adapter; running requests keep it."""
        body = await decode_body(request, UnloadAdapterRequest)
        await adapters.unload(body.lora_name)
        return json_response(Status("unloaded"))

    @app.get("/lora-adapters", include_in_schema=False)
    async def listed() -> Response:
        """The adapters that are loaded."""
        name, scale = adapters.default or ("", 0.0)
        found = [
            AdapterEntry(one.number, str(one.path), one.name, scale if one.name == name else 0.0)
            for one in adapters.all
        ]
        return Response(msgspec.json.encode(found), media_type="application/json")

    @app.post("/lora-adapters", include_in_schema=False)
    async def set_scales(request: Request) -> Response:
        """Set the adapter of requests that name none: the only one whose scale is not 0."""
        adapters.set_scales(await decode_body(request, list[AdapterScale]))
        return json_response(Status("set"))
