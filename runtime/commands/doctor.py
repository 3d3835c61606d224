"""`doctor`: whether this host can run an engine, what is missing, and how fast it can be at most."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple

from ..choosing import TargetHere, candidates, chosen
from ..errors import CapacityError, DeviceError, IccError
from ..executor.cpu.bandwidth import read_bandwidth
from ..executor.cpu.cores import usable_cores
from ..executor.cpu.library import KernelLibrary
from ..executor.cpu.memory import available_bytes, choose_blocks
from ..executor.cuda.compat import arch_name, check_device, check_memory, open_gpu
from ..executor.cuda.driver import Cuda
from ..format.container import Container
from ..format.files import EngineFiles
from ..format.footprint import (
    KV_SHARES,
    Footprint,
    footprint,
    kv_bytes_read,
    length_within,
    sequences_within,
    size_text,
)
from ..format.isa import cpu_flags, runs_here, select_library
from ..format.load import check_abi, read_manifest, read_targets, verify_files
from ..format.manifest import Library, Manifest
from ..format.open_container import open_container
from ..format.program import Program
from ..format.programs import read_program
from ..format.roofline import Roofline
from ..format.verify import check_listing
from ..options import LoadOptions
from ..system import system
from .held_back import held_back

_SERVER = ("fastapi", "uvicorn", "httptools", "prometheus_client")
State = Literal["ok", "warning", "failed"]


@dataclass(frozen=True)
class Check:
    """The result of one check. exit_code: of the error that using the engine would end with."""

    name: str
    state: State
    found: str
    hint: str = ""
    exit_code: int = 0


@dataclass
class Diagnosis:
    """The results of all checks. expect: bytes, GB/s, tokens and tokens per second by name; {} if the engine cannot run
    here."""

    engine: str
    target: str
    checks: list[Check] = field(default_factory=list)
    expect: dict[str, Any] = field(default_factory=dict)

    @property
    def exit_code(self) -> int:
        """The exit code of the first check that failed; 0 if none did."""
        return next((check.exit_code or 1 for check in self.checks if check.state == "failed"), 0)

    def as_json(self) -> dict[str, Any]:
        """The diagnosis as plain values."""
        return {**asdict(self), "runs": self.exit_code == 0}

    def look(self, name: str, at: Callable[[], str]) -> None:
        """Run one check: `at` returns a text of what it found, or raises."""
        try:
            self.checks.append(Check(name, "ok", at()))
        except IccError as error:
            self.checks.append(Check(name, "failed", error.message, error.hint, error.exit_code))


def diagnose(path: str | os.PathLike[str], hashes: bool = False, cuda: Callable[[str], Cuda] = open_gpu) -> Diagnosis:
    """Examine this host for an engine; with several targets, for the one that would be taken. hashes: also compare
    every file with its sha256. cuda: opens a back end's GPU.

    Raises IccError only if the engine's manifest or program cannot be read.
    """
    root = Path(path)
    if (targets := read_targets(root)) is None:
        return _of_one(root, hashes, cuda)
    asked = candidates(root, targets, LoadOptions(root))
    found = Diagnosis(str(root), ", ".join(targets.targets))
    found.look("target", lambda: _choice(asked))
    if not found.exit_code:
        one = _of_one(root / chosen(asked).target, hashes, cuda)
        found.checks, found.expect = found.checks + one.checks, one.expect
    return found


def _choice(asked: Sequence[TargetHere]) -> str:
    """Which target is taken and why, and why the others are not."""
    taken = chosen(asked)
    others = [f"{one.target}: {one.why}" for one in asked if one is not taken]
    return "; ".join([f"{taken.target} is taken, as {taken.why}", *others])


def _of_one(root: Path, hashes: bool, cuda: Callable[[str], Cuda]) -> Diagnosis:
    manifest = read_manifest(root)
    container = open_container(root)
    files = EngineFiles(container, manifest.files, verify=hashes, base=manifest.base)
    program = read_program(manifest, files)
    memory = footprint(program, manifest.limits, manifest.backend)
    found = Diagnosis(str(root), manifest.target)
    found.look("files", lambda: _files(container, manifest, files, hashes))
    found.look("kernel interface", lambda: _abi(manifest))
    bandwidth, sharers = None, 1
    if manifest.backend == "cpu":
        sharers = _sharers(manifest)
        found.look("instruction set", lambda: _isa(manifest, files))
        found.look("memory", lambda: _host_memory(manifest, program, sharers * memory.fixed))
        free = available_bytes()
        room = min(int(free * KV_SHARES["cpu"]), free - sharers * memory.fixed) // sharers
        found.checks += [Check("speed", "warning", *what) for what in held_back(manifest.ranks)]
    else:
        room, bandwidth = _gpu(found, manifest, memory, cuda)
    found.checks += _warnings(manifest, memory, room)
    if not found.exit_code:
        once = _decode_bytes(root, memory)
        bandwidth = bandwidth or read_bandwidth(nbytes=once)
        found.expect = _expect(manifest, program, memory, room, Reading(once, bandwidth, sharers))
    return found


def _files(container: Container, manifest: Manifest, files: EngineFiles, hashes: bool) -> str:
    if not hashes:
        check_listing(container, manifest)
        return f"{len(manifest.files)} files of the right size (--hashes compares their contents)"
    verify_files(container, manifest, files)
    return f"{len(manifest.files)} files as they were written"


def _abi(manifest: Manifest) -> str:
    check_abi(manifest)
    return f"version {manifest.kernel_abi}, compiled by icc {manifest.icc_version}"


def _isa(manifest: Manifest, files: EngineFiles) -> str:
    flags = cpu_flags()
    best = select_library(manifest.main.libraries, flags, os.environ.get("ICC_ISA"))
    KernelLibrary(files.read(best.path), best.path)  # checks that it loads, with all libraries that it links to
    others = [
        library.title + (" (the system refuses tile data)" if _lacks_tiles(library, flags) else "")
        for library in manifest.main.libraries
        if not runs_here(library, flags)
    ]
    return f"{best.isa}, {usable_cores()} threads" + (f"; not here: {', '.join(others)}" if others else "")


def _lacks_tiles(library: Library, flags: frozenset[str]) -> bool:
    """Whether the CPU has all that the library needs, so that only the system's permission for tile data is missing."""
    return library.system == system() and flags.issuperset(library.cpu_flags)


def _sharers(manifest: Manifest) -> int:
    """How many ranks share this machine's memory, each with parts of all layers."""
    return manifest.main.parts if manifest.main.is_stage else manifest.ranks


def _host_memory(manifest: Manifest, program: Program, fixed: int) -> str:
    choose_blocks(program.kv, manifest.limits)
    if fixed > (free := available_bytes()):
        raise CapacityError(f"weights and buffers take {size_text(fixed)}, {size_text(free)} are free")
    return f"{size_text(free)} free, {size_text(fixed)} for weights and buffers"


def _gpu(
    found: Diagnosis, manifest: Manifest, memory: Footprint, cuda: Callable[[str], Cuda]
) -> tuple[int, float | None]:
    """Run the checks of a GPU engine. Returns the bytes for its KV cache (0 if a check failed) and the GPU's bandwidth
    in GB/s (None if unknown)."""
    room, bandwidth = 0, None

    def device() -> str:
        nonlocal room, bandwidth
        needs = manifest.gpu
        if needs is None:
            raise DeviceError(
                f"the engine is for target {manifest.target} and does not say what GPU it needs", "compile it again"
            )
        opened = cuda(manifest.backend)
        try:
            facts, bandwidth = opened.facts(), opened.bandwidth()
        finally:
            opened.close()
        check_device(manifest.target, needs, facts)
        check_memory(memory.fixed, memory.kv_sequence, facts, manifest.limits.max_seq_len)
        room = int((facts.free_bytes - memory.fixed) * KV_SHARES["cuda"])
        arch = arch_name(needs.arch, facts)
        return f"{facts.name} ({arch}), {size_text(facts.free_bytes)} free of {size_text(facts.total_bytes)}"

    found.look("GPU", device)
    return room, bandwidth


def _warnings(manifest: Manifest, memory: Footprint, room: int) -> Iterator[Check]:
    if memory.kv_batch > room > 0:
        hint = "requests beyond it wait; free memory, or compile with a smaller --max-batch-size or --kv-cache int8"
        text = f"{size_text(room)} for the KV cache, a full batch of full sequences takes {size_text(memory.kv_batch)}"
        yield Check("KV cache", "warning", text, hint)
    if manifest.tokenizer_dir is None:
        hint = "give token ids, or compile a checkpoint that has tokenizer.json"
        yield Check("tokenizer", "warning", "the engine has none", hint)
    missing = [name for name in _SERVER if find_spec(name) is None]
    if missing:
        yield Check(
            "server", "warning", f"{', '.join(missing)} not installed", "for icc serve: pip install 'icc[serve]'"
        )


class Reading(NamedTuple):
    """once: bytes other than the KV cache that a decode step of one sequence moves, on each of `sharers` ranks that
    read the same memory. bandwidth: GB/s of that memory."""

    once: int
    bandwidth: float
    sharers: int = 1


def _expect(manifest: Manifest, program: Program, memory: Footprint, room: int, reading: Reading) -> dict[str, Any]:
    """The highest speed that the engine can reach here: a decode step reads the weights once, and each sequence's
    cache. room: bytes for the cache of each rank."""
    kv, limits = program.kv, manifest.limits
    batch = min(max(sequences_within(kv, limits, room), 1), limits.max_batch_size)
    once, bandwidth, sharers = reading

    def rate(sequences: int, length: int) -> float:
        step = Roofline(bandwidth * 1e9 / sharers).memory_seconds(once + sequences * kv_bytes_read(kv, length))
        return round(sequences / step, 1)

    return {
        "bandwidth_gb_s": round(bandwidth, 1),
        "decode_bytes_per_step": sharers * once,
        "decode_tokens_per_s": {
            "one_sequence": rate(1, 0),
            "one_full_sequence": rate(1, limits.max_seq_len),
            f"batch_of_{batch}": rate(batch, limits.max_seq_len // 2),
        },
        "kv_bytes": sharers * min(room, memory.kv_batch),
        "kv_bytes_per_token": sharers * kv.bytes_per_token(),
        "kv_tokens": int(min(room, memory.kv_batch) / kv.bytes_per_token()) if kv.bytes_per_token() else None,
        "sequences_of_full_length": batch,
        "longest_sequence": length_within(kv, limits, room),
    }


def _decode_bytes(root: Path, memory: Footprint) -> int:
    """Bytes that a decode step of one sequence reads and writes: from the compiler's report, else the bytes of the
    weights."""
    try:
        rows = json.loads((root / "report.json").read_text())["roofline"]["decode"]
        return int(sum(row["bytes"] for row in rows))
    except (OSError, ValueError, KeyError, TypeError):
        return memory.weights


def as_text(found: Diagnosis) -> str:
    """The diagnosis as text for a terminal."""
    marks = {"ok": "ok     ", "warning": "warning", "failed": "FAILED "}
    lines = [f"{found.engine}: compiled for {found.target}"]
    for check in found.checks:
        lines.append(f"  {marks[check.state]} {check.name}: {check.found}")
        lines += [f"          {check.hint}"] if check.hint and check.state != "ok" else []
    if not found.expect:
        return "\n".join([*lines, "this host cannot run the engine as it is"])
    expect = found.expect
    rates = ", ".join(f"{name.replace('_', ' ')} {rate:,.0f}" for name, rate in expect["decode_tokens_per_s"].items())
    lines.append(f"at {expect['bandwidth_gb_s']:g} GB/s of memory, decode tokens/s are at most: {rates}")
    lines.append(
        f"KV cache: {size_text(expect['kv_bytes'])}, {expect['kv_tokens']} tokens, "
        f"{expect['sequences_of_full_length']} sequences of full length at once"
    )
    return "\n".join(lines)
