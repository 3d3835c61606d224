"""`icc bench serve`."""

from __future__ import annotations

from typing import Any

import click

from ..loadtest.options import LoadTestOptions
from .fields import field_options, taken
from .group import command


@command("bench serve")
@field_options(LoadTestOptions)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON value.")
def bench_serve_command(as_json: bool, **parameters: Any) -> int:
    """Measure any OpenAI server under load: icc, vLLM, llama-server, OpenVINO."""
    options = LoadTestOptions(**taken(LoadTestOptions, parameters))
    from ..loadtest.measure import measure

    return measure(options, as_json)
