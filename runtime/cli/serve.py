"""`icc serve`."""

from __future__ import annotations

from typing import Any

from ..options import LoadOptions
from ..ray.options import RayOptions
from ..server.options import ServeOptions
from .fields import field_options, taken
from .group import command
from .load import loads


@command("serve")
@field_options(ServeOptions)
@field_options(RayOptions)
@loads
def serve_command(load: LoadOptions, **parameters: Any) -> int:
    """Serve the OpenAI API over HTTP."""
    options = ServeOptions(load, **taken(ServeOptions, parameters))
    ray = RayOptions(**taken(RayOptions, parameters))
    if ray.ray:
        from ..ray.serve import serve as serve_on_ray

        return serve_on_ray(options, ray)
    from ..server.http.serve import serve

    return serve(options)
