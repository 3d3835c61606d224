"""Writes the report of an engine."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from ..errors import UsageError
from .facts import EngineFacts, decode_bytes, read_facts
from .page import report_page


def write_report(engine: str | os.PathLike[str], file: Path) -> int:
    """Write the report of an engine to a file, completely or not at all ("-": to standard output); returns its size in
    bytes. UsageError if it cannot be written; also raises what `read_facts` raises."""
    facts = read_facts(engine)
    content = report_page(facts, _bandwidth(facts)).encode()
    if str(file) == "-":
        sys.stdout.buffer.write(content)
        sys.stdout.buffer.flush()
        return len(content)
    try:
        handle, name = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)
    except OSError as error:
        raise _unwritable(file, error) from error
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
        os.chmod(name, 0o644)
        os.replace(name, file)
    except OSError as error:
        os.unlink(name)
        raise _unwritable(file, error) from error
    return len(content)


def _bandwidth(facts: EngineFacts) -> float | None:
    """The GB/s at which this host reads as many bytes as a decode step; None if the engine was not compiled for a CPU
    host."""
    if facts.manifest.target != "native" or not (once := decode_bytes(facts)):
        return None
    from ..executor.cpu.bandwidth import read_bandwidth

    return read_bandwidth(nbytes=once)


def _unwritable(file: Path, error: OSError) -> UsageError:
    return UsageError(f"{file} cannot be written: {error.strerror}", "give another --html FILE")
