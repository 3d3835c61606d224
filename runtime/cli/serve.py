"""`icc serve`."""

from __future__ import annotations

from typing import Any

from ..options import LoadOptions
from ..server.options import ServeOptions
from .fields import field_options, taken
from .group import command
from .load import loads


@command("serve")
@field_options(ServeOptions)
@loads
def serve_command(load: LoadOptions, **parameters: Any) -> int:
    """Serve the OpenAI API over HTTP."""
    from ..server.http.serve import serve

    return serve(ServeOptions(load, **taken(ServeOptions, parameters)))
