"""`inspect --memory`: the exact bytes of each part of an engine under a load, and the other memory of its process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ..errors import UsageError
from ..executor.cpu.cores import usable_cores
from ..executor.cpu.library import KernelLibrary
from ..executor.cpu.memory import available_bytes, choose_blocks, touched_bytes
from ..format.batch import CPU_INPUTS, GPU_INPUTS
from ..format.files import EngineFiles
from ..format.footprint import KV_SHARES, LOGITS_BYTES, batch_limits, footprint
from ..format.isa import cpu_flags, select_library
from ..format.kv import KVGroup, KVMemory
from ..format.load import read_manifest
from ..format.manifest import Limits, Manifest
from ..format.open_container import open_container
from ..format.program import Program
from ..format.programs import read_program
from ..format.prompts import PROMPTS_DIR
from ..format.weights import MappedWeights
from ..kv.places import Places
from ..kv.policy import EVICTING
from .filling import states_touched
from .inspect import BESIDE


@dataclass(frozen=True)
class Load:
    """`sequences` sequences at once, each of `length` tokens, its answer among them."""

    sequences: int
    length: int


def certify(path: str | os.PathLike[str], sequences: int | None = None, length: int | None = None) -> dict[str, object]:
    """The memory of an engine under a load (default: all that its limits allow) as plain JSON values, in bytes.

    Ranks on CPUs are counted together; for ranks on GPUs the bytes are per GPU. Each part is what the load needs, or
    touches if the system gives memory on first touch. `total_bytes` includes the other memory of the process (measured
    here, or left out if the engine cannot be loaded here). `reserved_bytes` is the most that it can grow to, because
    the prefix cache fills the KV cache. UsageError for a load beyond the engine's limits.
    """
    root = Path(path)
    manifest = read_manifest(root)
    files = EngineFiles(open_container(root), manifest.files, verify=False, base=manifest.base)
    program = read_program(manifest, files)
    load = _load(manifest.limits, sequences, length)
    limits = Limits(load.length, load.sequences, manifest.limits.max_step_tokens)
    if manifest.backend == "cpu":
        parts, reserved = _host_parts(manifest, program, files, limits)
        process, why = _process_bytes(root)
    else:
        parts, reserved = _device_parts(manifest, program, limits)
        process, why = None, "its memory is the GPU's; the process on the host is not counted"
    facts: dict[str, object] = {
        "engine": str(root),
        **({"ranks": manifest.ranks} if manifest.ranks > 1 else {}),
        "sequences": load.sequences,
        "length": load.length,
        **parts,
        "kv_cache": _groups(program, manifest, limits),
        **({"process": why} if process is None else {"process_bytes": process}),
    }
    known = sum(parts.values())
    return {**facts, "total_bytes": known + (process or 0), "reserved_bytes": reserved + (process or 0)}


def _load(limits: Limits, sequences: int | None, length: int | None) -> Load:
    load = Load(sequences or limits.max_batch_size, length or limits.max_seq_len)
    for name, given, most in (
        ("sequences", load.sequences, limits.max_batch_size),
        ("length", load.length, limits.max_seq_len),
    ):
        if not 1 <= given <= most:
            raise UsageError(f"--{name} {given}: the engine was compiled for 1 to {most}")
    return load


def _host_parts(manifest: Manifest, program: Program, files: EngineFiles, load: Limits) -> tuple[dict[str, int], int]:
    """(bytes that the load takes of each part by name, bytes reserved in all) in this machine's memory."""
    limits, ranks, stages = manifest.limits, manifest.ranks, manifest.main.is_stage
    holders = manifest.main.parts if stages else ranks  # ranks that hold a part or a copy of every layer's cache
    largest = batch_limits(program, limits, LOGITS_BYTES["cpu"])
    cache = choose_blocks(program.kv, limits, int(available_bytes() * KV_SHARES["cpu"]) // holders)
    tokens = min(largest.tokens, load.max_batch_size * load.max_seq_len)
    arena = program.arena_bytes_per_token * largest.tokens
    rows = min(largest.logit_rows, load.max_batch_size)
    weights = _weights_bytes(manifest, program, files)
    library = select_library(manifest.main.libraries, cpu_flags(), os.environ.get("ICC_ISA"))
    kernels, threads = KernelLibrary(files.read(library.path), library.path), max(usable_cores() // ranks, 1)
    scratch, shared = kernels.scratch(threads)
    batch = sum(largest.nbytes(array) for array in (*CPU_INPUTS, *program.inputs))
    stored = sum(weight.nbytes for weight in program.stored.values())
    pools = holders * (sum(weight.nbytes for weight in program.weights.values()) - stored)
    prompts = sum(entry.size for name, entry in manifest.files.items() if name.startswith(f"{PROMPTS_DIR}/"))
    writers = 1 if stages else ranks  # ranks that write logits: the last stage writes into memory that rank 0 reads
    parts = {
        "weights_bytes": weights,
        **_of_adapters(pools),
        "arena_bytes": ranks * touched_bytes([(0, program.arena_bytes_per_token * tokens)], arena),
        "logits_bytes": writers * 4 * rows * program.vocab_size,
        "batch_bytes": batch,
        "scratch_bytes": ranks * (scratch + kernels.shared_touched(threads, load.max_batch_size, load.max_seq_len)),
        "kv_bytes": holders * touched_bytes(_touched(cache, _blocks(cache, load)), cache.nbytes),
        **({"prompts_bytes": prompts} if prompts else {}),
    }
    logits = 4 * largest.logit_rows * program.vocab_size
    fixed = weights + pools + ranks * (arena + scratch + shared) + writers * logits + batch
    return parts, fixed + holders * cache.nbytes + prompts


def _weights_bytes(manifest: Manifest, program: Program, files: EngineFiles) -> int:
    """Bytes of the weights of all ranks together."""
    if manifest.ranks == 1:
        return sum(weight.nbytes for weight in program.stored.values())
    found = 0
    for name in manifest.programs:
        held: dict[str, int] = {}
        for file in manifest.weight_files(name):
            mapped = MappedWeights(files.map(file), file)
            held |= mapped.sizes()
            mapped.close()
        found += sum(held.values())
    return found


def _device_parts(manifest: Manifest, program: Program, load: Limits) -> tuple[dict[str, int], int]:
    """(bytes that the load takes of each part by name, bytes reserved in all) in a GPU's memory, which is allocated
    when the engine is loaded."""
    limits = manifest.limits
    needs = footprint(program, limits, manifest.backend)
    largest = batch_limits(program, limits, LOGITS_BYTES[manifest.backend])
    parts = {
        "weights_bytes": needs.weights,
        **_of_adapters(needs.adapters),
        "arena_bytes": needs.arena,
        "logits_bytes": needs.logits,
        "batch_bytes": sum(largest.nbytes(array) for array in (*GPU_INPUTS, *program.inputs)),
        "scratch_bytes": needs.scratch,
        "kv_bytes": KVMemory(program.kv, program.kv.blocks_needed(load, load.max_batch_size)).nbytes,
    }
    return parts, sum(parts.values()) - parts["kv_bytes"] + needs.kv_batch


def _of_adapters(nbytes: int) -> dict[str, int]:
    """The bytes for adapters, which are touched when one is loaded; {} if the engine has none."""
    return {"adapters_bytes": nbytes} if nbytes else {}


def _blocks(cache: KVMemory, load: Limits) -> list[int]:
    """How many blocks of each group such a load touches. Blocks that a window has passed stay in the prefix cache while
    there are unused blocks; a state is kept wherever a step ended."""
    groups = cache.layout.groups
    everything = (_touches(group, load.max_seq_len) * load.max_batch_size for group in groups)
    found = [min(have, most) for have, most in zip(cache.num_blocks, everything, strict=True)]
    if not any(group.holds_states for group in groups):
        return found
    ran = states_touched(cache, load)
    return [states if group.holds_states else n for group, n, states in zip(groups, found, ran, strict=True)]


def _touches(group: KVGroup, length: int) -> int:
    """How many blocks a sequence has used by its end; under a policy with Places it writes the same blocks again."""
    most = group.blocks_for(length)
    return min(most, group.policy.most_blocks(length, group.block_size)) if isinstance(group.policy, Places) else most


def _touched(cache: KVMemory, blocks: Sequence[int]) -> list[tuple[int, int]]:
    """(offset, size) in bytes of the first `blocks` of every layer: pools hand out low numbers first."""
    found: list[tuple[int, int]] = []
    base = 0
    for group, have, used in zip(cache.layout.groups, cache.num_blocks, blocks, strict=True):
        for number in group.layers:
            nbytes = group.layer_bytes(number)
            found.append((base, used * nbytes))
            base += have * nbytes
    return found


def _groups(program: Program, manifest: Manifest, load: Limits) -> list[dict[str, object]]:
    """For each KV group, the blocks that such a load needs to run without preemption, and their sizes."""
    groups: list[dict[str, object]] = []
    counts = program.kv.blocks_needed(load, load.max_batch_size)
    for group, count in zip(program.kv.groups, counts, strict=True):
        size = group.block_bytes()
        facts: dict[str, object] = {"keeps": group.keeps + _sizes(group)}
        facts |= {"layers": len(group.layers), "dtype": group.dtype}
        if group.holds_states:
            checkpoints = min(group.size * load.max_batch_size, count)
            facts |= {"states": count - checkpoints, "bytes_per_state": size}
            facts |= {"states_bytes": (count - checkpoints) * size}
            facts |= {"checkpoints": checkpoints, "checkpoints_bytes": checkpoints * size}
        else:
            facts |= {"blocks": count, "block_tokens": group.block_size, "block_bytes": size, "bytes": count * size}
        groups.append(facts)
    return groups


def _sizes(group: KVGroup) -> str:
    """How much a group keeps, as text; "" if its policy has no size."""
    if group.keeps in EVICTING:
        return f" {group.size} ({group.beside} {BESIDE[group.keeps]}; lossy)"
    return f" {group.size}" if group.keeps == "window" else ""


def _process_bytes(root: Path) -> tuple[int | None, str]:
    """The bytes of a process that has loaded the engine and run nothing: interpreter, libraries, kernels, tokenizer and
    tables, measured in a child process. (None, reason) if it could not be measured."""
    assert __package__ is not None
    top = str(Path(__file__).resolve().parents[len(__package__.split("."))])
    paths = os.pathsep.join(filter(None, (top, os.environ.get("PYTHONPATH"))))
    flags = ["-B"] if sys.dont_write_bytecode else []
    command = [sys.executable, *flags, "-P", "-m", f"{__package__}.resident", str(root)]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines()
        return None, f"not measured: {said[-1] if said else f'exit code {done.returncode}'}"
    try:
        return msgspec.json.decode(done.stdout, type=int), ""
    except msgspec.DecodeError:
        return None, "not measured: the process that loads the engine gave no answer"
