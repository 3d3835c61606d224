"""Traffic: requests by when they arrive and how long they are, as a file of JSON lines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from ...errors import UsageError

_Count = Annotated[int, Meta(ge=1, le=1 << 24)]  # more are a mistake, and would be made in memory


class Arrival(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A request. time: seconds since any beginning. prompt_tokens, output_tokens: its lengths. prefix, prefix_tokens:
    a name, and how many of the prompt's first tokens are the same in all requests of that name."""

    time: Annotated[float, Meta(ge=0, le=1e10)]  # larger ones are in milliseconds or less
    prompt_tokens: _Count
    output_tokens: _Count
    prefix: str = ""
    prefix_tokens: Annotated[int, Meta(ge=0)] = 0


def read_traffic(path: Path) -> list[Arrival]:
    """The requests of a file, an Arrival as JSON per line, in the order of their times. UsageError for a file that
    cannot be read, or a line that is none."""
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
    """Write what `read_traffic` reads."""
    path.write_bytes(b"".join(msgspec.json.encode(arrival) + b"\n" for arrival in arrivals))
