"""Lowers graphs and runs them through the CPU library at the best ISA level of this machine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np
from icc.compiler.backends.cpu.backend import CPU_PROFILE
from icc.compiler.backends.cpu.build import build_libraries
from icc.compiler.backends.cpu.isa import host_isas
from icc.compiler.backends.cpu.kernels.table import CPU_KERNELS
from icc.compiler.backends.values import pack
from icc.compiler.graph.graph import Graph
from icc.compiler.program.lower import Lowered, LowerOptions, lower
from icc.compiler.program.verify import verify_lowered
from icc.passes import pipelines
from icc.passes.base import PassContext
from icc.passes.manager import run_passes
from icc.runtime.executor.cpu.library import IccBatch, KernelLibrary
from icc.runtime.executor.cpu.memory import AnonymousMemory
from icc.runtime.format.kv import KVMemory

OPTIONS = LowerOptions("f32", CPU_PROFILE, block_size=16)


def optimize(graph: Graph) -> Graph:
    """Run the phases of every compile on the graph; returns it."""
    for phase in (pipelines.canonicalize, pipelines.attention, pipelines.fuse):
        run_passes(graph, phase(), PassContext())
    return graph


def lower_graph(graph: Graph) -> Lowered:
    lowered = lower(graph, OPTIONS)
    verify_lowered(lowered.program, CPU_KERNELS.refusal)
    return lowered


def _bytes(memory: AnonymousMemory, data: np.ndarray) -> int:
    np.ctypeslib.as_array((np.ctypeslib.ctypes.c_uint8 * data.nbytes).from_address(memory.address))[:] = data.view("u1")
    return memory.address


def run_lowered(
    lowered: Lowered,
    folder: Path,
    ids: list[int],
    logit_rows: list[int] | None = None,
    extras: Mapping[str, bytes] = MappingProxyType({}),
) -> np.ndarray:
    """Logits [L, vocab] of one sequence that starts at position 0. extras: rows of all declared inputs."""
    program, tokens = lowered.program, len(ids)
    isa = host_isas()[0]
    build_libraries(program, folder / "kernels", [isa], optimize="-O1")
    packed = [pack(lowered.sources[name]) for name in program.weights]
    held = [AnonymousMemory(max(64, p.nbytes)) for p in packed]
    blocks = -(-tokens // OPTIONS.block_size)
    arena = AnonymousMemory(program.arena_bytes_per_token * tokens)
    groups = len(program.kv.groups)
    kv = AnonymousMemory(max(64, KVMemory(program.kv, (blocks,) * groups).nbytes))
    rows = list(range(tokens)) if logit_rows is None else logit_rows
    lists = {
        "token_ids": ids, "positions": range(tokens), "slot_mapping": range(tokens), "seq_starts": [0, tokens],
        "context_lens": [tokens], "block_tables": [list(range(blocks))], "logit_rows": rows,
    }  # fmt: skip
    arrays = {name: np.array(values, np.int32) for name, values in lists.items()}
    logits = np.full((len(rows), program.vocab_size), np.nan, np.float32)
    library = KernelLibrary((folder / "kernels" / f"{isa.name}.so").read_bytes(), isa.name)
    weights = [_bytes(memory, p) for memory, p in zip(held, packed, strict=True)]
    handle = library.create(2, weights, arena.address, kv.address, (blocks,) * groups)
    own = [np.frombuffer(extras[array.name], np.uint8) for array in program.inputs]
    library.bind_inputs(handle, [rows.ctypes.data for rows in own])
    sizes = {"num_tokens": tokens, "num_seqs": 1, "num_logit_rows": len(rows), "max_blocks": blocks}
    addresses = {name: array.ctypes.data for name, array in arrays.items()}
    batch = IccBatch(**sizes, **addresses, logits=logits.ctypes.data)
    views = (IccBatch * groups)(*[batch] * groups)
    last = np.array([-1] * (tokens - 1) + [0], np.int32)  # the block that gets the state after the last token
    for view, group in zip(views, program.kv.groups, strict=True):
        if group.holds_states:
            view.slot_mapping = last.ctypes.data
    library.step(handle, views)
    library.destroy(handle)
    return logits
