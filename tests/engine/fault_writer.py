"""`python fault_writer.py DIRECTORY EVERY`: writes a small engine again and again, with one failing system call each
time.

For each call of `CALLS` and each error of it, the N-th such call of a write fails, for N = 1, 1 + EVERY, ... until a
write gets through. strace injects the error into a child that is forked after the imports, so that a write takes
milliseconds. Prints one JSON list per write: call, error, N, exit status, and which engine is in DIRECTORY afterwards.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

from icc.compiler.engine import directory as write_engine
from icc.compiler.engine.atomic import engine_output
from icc.compiler.errors import WriteError
from icc.runtime.format.folder import Folder
from icc.runtime.format.load import read_manifest
from icc.runtime.format.manifest import (
    FORMAT_VERSION,
    Limits,
    Manifest,
    ModelFacts,
    ProgramEntry,
    QuantFacts,
    SamplingDefaults,
)
from icc.runtime.format.verify import check_listing

CALLS = {
    "write": ("ENOSPC", "EIO", "KILL"),
    "fsync": ("ENOSPC", "EIO", "KILL"),
    "rename": ("ENOSPC", "EIO", "KILL"),
    "openat": ("EMFILE",),
}
MISTAKE = 3  # exit status of a write that failed with a message


def write(path: Path, generation: int) -> None:
    """Write an engine whose files all hold `generation`."""
    with engine_output(path) as stage:
        (stage / "kernels").mkdir()
        for name in ("weights.safetensors", "program.json", "kernels/a.so"):
            with (stage / name).open("wb", buffering=0) as file:
                for _ in range(3):
                    file.write(str(generation).encode() * 100)
        facts = ModelFacts("Toy", 1, 1, 1, generation, 1, None, [], None)
        quant, limits = QuantFacts("none", 32.0, []), Limits(1, 1, 1)
        programs = {"main": ProgramEntry("program.json", "weights.safetensors")}
        all_facts = (facts, quant, limits, SamplingDefaults(), programs, None, {})
        manifest = Manifest(FORMAT_VERSION, "0", "cpu", "cpu", *all_facts)
        write_engine.write_manifest(stage, manifest)


def found(path: Path) -> int:
    """The generation of the engine at `path`; raises an error if the engine is not whole."""
    manifest = read_manifest(path)
    check_listing(Folder(path), manifest)
    for name, entry in manifest.files.items():
        content = (path / name).read_bytes()
        assert len(content) == entry.size and content == str(manifest.model.num_parameters).encode() * 300, name
    return manifest.model.num_parameters


def attempt(path: Path, generation: int, call: str, error: str, when: int) -> int:
    """Write in a child, with the fault; its exit status, negative for a signal."""
    ready, go = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(go)
        os.read(ready, 1)
        try:
            write(path, generation)
        except WriteError as mistake:
            os._exit(MISTAKE if "cannot write" in mistake.message else 4)
        except BaseException:
            os._exit(5)
        os._exit(0)
    os.close(ready)
    effect = "signal=KILL" if error == "KILL" else f"error={error}"
    calls = f"{call},renameat,renameat2" if call == "rename" else call
    command = [
        "strace",
        "-f",
        "-q",
        "-p",
        str(child),
        "-e",
        f"trace={calls}",
        "-e",
        f"inject={calls}:{effect}:when={when}",
    ]
    tracer = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while "TracerPid:\t0\n" in Path(f"/proc/{child}/status").read_text():
        if tracer.poll() is not None:
            os.kill(child, signal.SIGKILL)
            raise SystemExit("strace cannot attach here")
    os.write(go, b"x")
    os.close(go)
    _, status = os.waitpid(child, 0)
    tracer.wait()
    return os.waitstatus_to_exitcode(status)


def main(directory: Path, every: int) -> None:
    path = directory / "toy.engine"
    write(path, 1)
    generation = 1
    for call, errors in CALLS.items():
        for error in errors:
            when, status = 1, 1
            while status != 0:
                status = attempt(path, generation + 1, call, error, when)
                now = found(path)
                left = sorted(item.name for item in directory.iterdir() if item != path)
                print(json.dumps([call, error, when, status, now - generation, left]), flush=True)
                generation = now
                if status < 0:  # the next write removes what a killed write left
                    write(path, generation + 1)
                    generation += 1
                    assert found(path) == generation and [item.name for item in directory.iterdir()] == [path.name]
                when += every


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
