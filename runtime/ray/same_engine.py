"""Checks that the engine on this machine is the one that was deployed."""

from __future__ import annotations

import socket
from pathlib import Path

from ..errors import EngineChangedError
from ..format.load import read_manifest


def check_engine(path: Path, digest: str) -> None:
    """EngineChangedError unless the engine at `path` is the one of that digest ("": any)."""
    found = read_manifest(path).digest
    if digest and found != digest:
        raise EngineChangedError(
            f"{path} on {socket.gethostname()} is another engine ({found[:12]}) than the one that was deployed "
            f"({digest[:12]})",
            "copy the engine to the same path of every machine, or use a file system that they share",
        )
