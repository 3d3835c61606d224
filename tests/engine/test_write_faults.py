"""RELIABILITY R8: whichever system call fails while an engine is written, the old or the new engine remains, whole."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from sizes import size_of


@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
def test_every_failing_call_leaves_one_whole_engine(tmp_path: Path) -> None:
    script = str(Path(__file__).with_name("fault_writer.py"))
    command = [sys.executable, script, str(tmp_path), str(size_of("write_fault_every"))]
    done = subprocess.run(command, capture_output=True, text=True)
    if "cannot attach" in done.stderr:
        pytest.skip("strace cannot attach to a process here")
    assert done.returncode == 0, done.stderr[-3000:]
    attempts = [json.loads(line) for line in done.stdout.splitlines()]
    kinds = {(call, error) for call, error, *_ in attempts}
    assert len(kinds) == 10 and len(attempts) > 20
    for call, error, when, status, advanced, left in attempts:
        where = (call, error, when)
        if status == 0:
            assert advanced == 1, where
        elif error == "KILL":
            assert status == -9 and advanced in (0, 1), where
        else:
            assert status == 3 and advanced in (0, 1), where  # in words
        assert not left or error == "KILL", (where, left)
    assert {call for call, _, _, status, *_ in attempts if status == 3} == {"write", "fsync", "rename", "openat"}
