"""Compiles kernel specs ahead of time: worker processes, and a cache of objects by the content of their specs."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import queue
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

from .....runtime.errors import install
from ....interrupt import Processes
from ....targets import Target
from ...errors import CodegenError, KernelRefused
from ..spec import LaunchSpec
from . import amdgcn
from .loops import MatrixLoop, matrix_loops
from .operands import check_operands

_CACHE_FORMAT = "8"  # version of the facts beside a cached object
T = TypeVar("T")
_WORKER = Path(__file__).with_name("worker.py")


@dataclass(frozen=True)
class Compiled:
    """A compiled kernel: the object's bytes, and per thread its registers and bytes of local memory.

    driver_version: the least CUDA version of a driver that loads the object (12000 is 12.0); 0 for HIP. loops: its
    loops with matrix instructions. ir: Triton's IR without layouts, from which accesses are checked.
    """

    entry: str
    binary: bytes
    shared_bytes: int
    registers: int
    spill_bytes: int
    driver_version: int
    loops: tuple[MatrixLoop, ...] = ()
    ir: str = ""


def spec_key(spec: LaunchSpec) -> str:
    """A key of everything that the object depends on, except the target: specs with equal keys share one object."""
    signature = [(a.name, a.type, a.aligned) for a in spec.args]
    parts = [spec.source, spec.entry, signature, spec.num_warps, spec.num_stages]
    text = json.dumps([*parts, spec.max_registers] if spec.max_registers else parts)
    return f"{spec.entry}_{hashlib.sha256(text.encode()).hexdigest()[:16]}"


def compile_specs(
    specs: Iterable[LaunchSpec],
    target: Target,
    progress: Callable[[str, int, int], None] = lambda *_: None,
    refused: dict[str, str] | None = None,
) -> dict[str, Compiled]:
    """Compile each spec once for a CUDA or HIP target; objects by `spec_key`.

    Raises KernelRefused naming a kernel that Triton or a check of its loops refuses, or, if `refused` is not None,
    leaves it out and adds the reason to `refused`. Raises CodegenError if Triton is not installed or its process ends.
    """

    def compile_one(worker: _Worker, key: str) -> Compiled | None:
        try:
            return _compile(worker, key, wanted[key], target)
        except KernelRefused as refusal:
            if refused is None:
                raise
            refused[key] = refusal.message
            return None

    wanted = {spec_key(spec): spec for spec in specs}
    toolchain = _triton_version()
    cache = {key: _cache_folder(key, target, toolchain) for key in wanted}
    found = {key: load for key, folder in cache.items() if (load := _carried(folder) or _load(folder)) is not None}
    missing = [key for key in wanted if key not in found]
    with _Workers(min(len(missing), os.cpu_count() or 1)) as workers:
        done = len(found)
        progress("", done, len(wanted))
        for key, compiled in workers.map(compile_one, missing):
            done += 1
            progress(key, done, len(wanted))
            if compiled is not None:
                found[key] = compiled
                _store(cache[key], compiled)
    return {key: found[key] for key in wanted if key in found}


def _compile(worker: _Worker, key: str, spec: LaunchSpec, target: Target) -> Compiled:
    with tempfile.TemporaryDirectory(prefix="icc-triton-") as folder:
        source, file = Path(folder, f"{spec.entry}.py"), Path(folder, "object")
        ir, plain, assembly = Path(folder, "ir"), Path(folder, "plain"), Path(folder, "assembly")
        source.write_text(spec.source)
        job = {
            "source": str(source), "entry": spec.entry, "object": str(file), "ir": str(ir), "plain": str(plain),
            "assembly": str(assembly),
            "signature": {a.name: a.type for a in spec.args},
            "aligned": [i for i, a in enumerate(spec.args) if a.aligned],
            "backend": target.backend, "arch": target.arch.removeprefix("sm_"), "warp_size": target.warp_size,
            "num_warps": spec.num_warps, "num_stages": spec.num_stages, "max_registers": spec.max_registers,
        }  # fmt: skip
        answer = worker.ask(job)
        if "error" in answer:
            kind = CodegenError if answer.get("ended") else KernelRefused
            raise kind(f"kernel {key} does not compile for {target.name}: {answer['error']}")
        shared, registers, spill, driver = (answer[name] for name in ("shared", "registers", "spill", "driver"))
        binary = file.read_bytes()
        check_operands(layouts := ir.read_text())
        if target.backend == "hip":
            amdgcn.check_stores(text := assembly.read_text())
            loops = amdgcn.matrix_loops(text, layouts, spec.num_warps)
        else:
            loops = matrix_loops(binary, layouts, spec.num_warps)
        return Compiled(answer["entry"], binary, shared, registers, spill, driver, loops, plain.read_text())


class _Worker:
    """One compiling process."""

    def __init__(self, processes: Processes) -> None:
        self._cache = tempfile.TemporaryDirectory(prefix="icc-triton-cache-")
        # line information would bake this machine's paths into the objects
        env = os.environ | {"TRITON_CACHE_DIR": self._cache.name, "TRITON_DISABLE_LINE_INFO": "1"}
        env.pop("TRITON_INTERPRET", None)
        self._stderr = tempfile.TemporaryFile()
        pipe = subprocess.PIPE
        self._running = processes.running(
            [sys.executable, "-P", str(_WORKER)], stdin=pipe, stdout=pipe, stderr=self._stderr, env=env, text=True
        )
        self._process = self._running.__enter__()

    def ask(self, job: dict[str, Any]) -> dict[str, Any]:
        """Send a job and wait for its answer."""
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            code = process.wait()
            self._stderr.seek(0)
            last = self._stderr.read().decode(errors="replace").strip()[-300:]
            return {"error": f"the compiling process ended with status {code}: {last}", "ended": True}
        return json.loads(line)

    def close(self) -> None:
        """End the process."""
        self._running.__exit__(None, None, None)
        for stream in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):  # output that nobody reads any more
                stream.close()  # type: ignore[union-attr]
        self._stderr.close()
        self._cache.cleanup()


class _Workers:
    """A pool of compiling processes, each driven by one thread."""

    def __init__(self, count: int) -> None:
        self._processes = Processes()
        self._all = [_Worker(self._processes) for _ in range(count)]
        self._free: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        for worker in self._all:
            self._free.put(worker)

    def map(self, job: Callable[[_Worker, str], T], keys: list[str]) -> Iterable[tuple[str, T]]:
        """Run `job(worker, key)` for all keys; results in the order of the keys. The first error ends it."""

        def run(key: str) -> tuple[str, T]:
            worker = self._free.get()
            try:
                return key, job(worker, key)
            finally:
                self._free.put(worker)

        if not keys:
            return
        pool = ThreadPoolExecutor(len(self._all))
        try:
            yield from pool.map(run, keys)
        except KeyboardInterrupt:
            self._processes.end()
            raise
        finally:
            pool.shutdown(cancel_futures=True)

    def __enter__(self) -> _Workers:
        self._processes.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._processes.__exit__()
        for worker in self._all:
            worker.close()


def _triton_version() -> str:
    try:
        return version("triton")
    except PackageNotFoundError:
        raise CodegenError("Triton is not installed", install("compile")) from None


def _cache_folder(key: str, target: Target, toolchain: str) -> Path:
    root = os.environ.get("ICC_CACHE_DIR") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "icc").expanduser()
    return Path(root, "triton", _CACHE_FORMAT, toolchain, f"{target.backend}-{target.arch}", key)


def _carried(folder: Path) -> Compiled | None:
    """The object of that folder in the cache $ICC_CARRIED_OBJECTS, which another machine filled with any version of
    Triton, so that a GPU machine can time the objects that are shipped. None if the cache has no such object."""
    root, place = os.environ.get("ICC_CARRIED_OBJECTS"), folder.parts[-2:]
    found = sorted(Path(root, "triton", _CACHE_FORMAT).glob("/".join(("*", *place)))) if root else []
    return _load(found[-1]) if found else None


def _load(folder: Path) -> Compiled | None:
    """An object of the cache; None if it is missing, its bytes are damaged, or its facts are those of another
    version."""
    try:
        facts = json.loads((folder / "facts.json").read_text())
        binary = (folder / "object").read_bytes()
    except (OSError, ValueError):
        return None
    try:
        digest = facts.pop("sha256", None)
        facts["loops"] = tuple(MatrixLoop(**loop) for loop in facts["loops"])
        found = Compiled(binary=binary, **facts)
    except (TypeError, KeyError, AttributeError):  # of another version of icc, with other facts
        return None
    return found if hashlib.sha256(binary).hexdigest() == digest else None


def _store(folder: Path, compiled: Compiled) -> None:
    """Write an object to the cache if possible: a cache that cannot be written must not fail the build."""
    facts = asdict(compiled)
    del facts["binary"]
    facts["sha256"] = hashlib.sha256(compiled.binary).hexdigest()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in (("object", compiled.binary), ("facts.json", json.dumps(facts).encode())):
            part = folder / f".{name}.{os.getpid()}"
            part.write_bytes(data)
            part.rename(folder / name)
    except OSError:
        return
