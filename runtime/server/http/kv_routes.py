"""/v1/kv: the KV of a prompt that was computed here, for a server on another host that answers it."""

from __future__ import annotations

import os

from fastapi import FastAPI
from fastapi.responses import FileResponse, Response
from starlette.background import BackgroundTask

from ..api.errors import HttpError
from ..engine.kv_file import KV_FOLDER, is_kv_name


def add_kv(app: FastAPI) -> None:
    """Add the route; who may ask is checked as for all others, and names cannot be guessed."""

    @app.get("/v1/kv/{name}", include_in_schema=False)
    async def kv(name: str) -> Response:
        """The KV that `kv_transfer_params` names, once."""
        path = KV_FOLDER / name
        if not is_kv_name(name) or path.is_symlink() or not path.is_file() or path.stat().st_uid != os.geteuid():
            raise HttpError(404, "there is no such KV", code="kv_not_found")
        taken = BackgroundTask(path.unlink, missing_ok=True)
        return FileResponse(path, media_type="application/octet-stream", background=taken)
