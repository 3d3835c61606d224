"""The page at `/`: static files of the package, and the figures that it shows."""

from __future__ import annotations

from pathlib import Path

import msgspec
from fastapi import FastAPI
from fastapi.responses import Response

from ..api.metrics import Metrics

_PAGE = Path(__file__).with_name("page")
_TYPES = {"index.html": "text/html", "page.css": "text/css", "page.js": "text/javascript"}


def add_page(app: FastAPI, metrics: Metrics) -> None:
    for name, kind in _TYPES.items():
        content = (_PAGE / name).read_bytes()
        path = "/" if name == "index.html" else f"/{name}"
        app.add_api_route(path, _static(content, f"{kind}; charset=utf-8"), include_in_schema=False, methods=["GET"])

    @app.get("/figures", include_in_schema=False)
    async def figures() -> Response:
        return Response(msgspec.json.encode(metrics.figures()), media_type="application/json")


def _static(content: bytes, kind: str):
    async def serve() -> Response:
        return Response(content, media_type=kind, headers={"cache-control": "no-cache"})

    return serve
