"""RELIABILITY R10: an engine with a changed byte is not opened. Arbitrary bytes are tested in tests/fuzz."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from icc.runtime.errors import EngineFormatError
from icc.runtime.format.load import open_engine
from sizes import SOAK


def test_every_changed_byte_is_refused_and_the_file_named(write_engine: Callable[..., Path], tmp_path: Path) -> None:
    """R10: XOR with 0x01 and 0xFF, at every 11th byte of the manifest and every 211th of other files; in `make soak` at
    every third and at every byte."""
    root = write_engine(tmp_path / "e")
    step = 1 if SOAK else 211
    start, tried = time.monotonic(), 0
    for file in sorted(path for path in root.rglob("*") if path.is_file()):
        content = file.read_bytes()
        name = file.relative_to(root).as_posix()
        for at in range(0, len(content), (11 if step > 1 else 3) if name == "engine.json" else step):
            for mask in (0x01, 0xFF):
                file.write_bytes(content[:at] + bytes([content[at] ^ mask]) + content[at + 1 :])
                with pytest.raises(EngineFormatError) as refused:
                    open_engine(root)
                assert name in refused.value.message or name == "engine.json", (name, at)
                tried += 1
        for size in range(0, len(content), max(len(content) // 20, 1)):
            file.write_bytes(content[:size])
            with pytest.raises(EngineFormatError):
                open_engine(root)
        file.write_bytes(content)
    open_engine(root).close()
    assert tried > 400 and (time.monotonic() - start) / tried < 1
