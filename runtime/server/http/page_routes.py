"""The page at `/`: static files of the package, and the routes that only the page uses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.responses import Response

from .... import __version__
from ...format.manifest import Manifest
from ..api.changes import EngineChanges
from ..api.metrics import Metrics
from ..api.model import ServedModel
from ..engine.engine_pool import EnginePool

_PAGE = Path(__file__).with_name("page")
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


def _read() -> dict[str, tuple[bytes, str]]:
    """The content and the type of every file, by its path on the server."""
    found = {}
    for file in sorted(_PAGE.iterdir()):
        if file.suffix in _TYPES:
            path = "/" if file.name == "index.html" else f"/page/{file.name}"
            found[path] = (file.read_bytes(), f"{_TYPES[file.suffix]}; charset=utf-8")
    return found


_FILES = _read()
# served without a key: they are the same everywhere, and the page must load to ask for a key
OPEN_FILES = frozenset(_FILES) - {"/"}


def page_file(path: str, status: int = 200) -> Response:
    """A file of the page as an answer."""
    content, kind = _FILES[path]
    return Response(content, status, media_type=kind, headers={"cache-control": "no-cache"})


def add_page(app: FastAPI, model: ServedModel, changes: EngineChanges, engine: EnginePool, metrics: Metrics) -> None:
    """Add the chat page, its files, and the routes that it uses."""
    for path in _FILES:
        app.add_api_route(path, _serve(path), include_in_schema=False, methods=["GET"])

    @app.get("/about", include_in_schema=False)
    async def about() -> Response:
        return Response(msgspec.json.encode(_about(model, changes.manifest)), media_type="application/json")

    @app.get("/figures", include_in_schema=False)
    async def figures() -> Response:
        blocks = {"blocks": sum(facts.num_blocks for facts in engine.ready)}
        return Response(msgspec.json.encode(metrics.figures() | blocks), media_type="application/json")


def _serve(path: str):
    async def serve() -> Response:
        return page_file(path)

    return serve


def _about(model: ServedModel, manifest: Manifest) -> dict[str, Any]:
    """The facts about the engine that the page shows, or needs to choose what to offer."""
    return {
        "version": __version__,
        "model": model.name,
        "architecture": manifest.model.architecture,
        "parameters": manifest.model.num_parameters,
        "target": manifest.target,
        "quantization": manifest.quantization.method,
        "bits_per_weight": manifest.quantization.bits_per_weight,
        "max_len": model.max_len,
        "max_batch_size": manifest.limits.max_batch_size,
        "task": model.task,
        "chat": bool(model.template) and not model.embeds,
        "sampling": msgspec.to_builtins(manifest.sampling),
        "embedding": msgspec.to_builtins(manifest.embedding),
    }
