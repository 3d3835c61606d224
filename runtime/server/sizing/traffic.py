"""Traffic: arrival times and lengths of requests, in a file of JSON lines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from ...errors import UsageError

_Count = Annotated[int, Meta(ge=1, le=1 << 24)]  # a larger number is a mistake, and the tokens are made in memory


class Arrival(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The arrival of a request. time: seconds, from any origin. prompt_tokens, output_tokens: its lengths. prefix,
    prefix_tokens: a name, "" for none, and how many of the first prompt tokens are shared by all requests with that
    name."""

    time: Annotated[float, Meta(ge=0, le=1e10)]  # larger ones are in milliseconds or less
    prompt_tokens: _Count
    output_tokens: _Count
    prefix: str = ""
    prefix_tokens: Annotated[int, Meta(ge=0)] = 0


def read_traffic(path: Path) -> list[Arrival]:
    """Read the requests of a file, one Arrival as JSON per line; sorted by time. UsageError for a file that cannot be
    read, or a line that is not an Arrival."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--traffic {path}: {error}") from error
    found: list[Arrival] = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                found.append(msgspec.json.decode(line, type=Arrival))
            except (msgspec.DecodeError, msgspec.ValidationError) as error:
                raise UsageError(
                    f"{path}, line {number}: {error}",
                    'give {"time": 0.5, "prompt_tokens": 400, "output_tokens": 100} per line',
                ) from error
    if not found:
        raise UsageError(f"--traffic {path} holds no requests", "give one JSON object per line")
    return sorted(found, key=lambda arrival: arrival.time)


def write_traffic(path: Path, arrivals: Sequence[Arrival]) -> None:
    """Write requests to a file for `read_traffic`."""
    path.write_bytes(b"".join(msgspec.json.encode(arrival) + b"\n" for arrival in arrivals))
