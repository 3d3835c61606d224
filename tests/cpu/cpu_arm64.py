"""Runs a library for arm64 in an emulated process, by arm64_step.py: what cpu_harness.Runner does in this one."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
from cpu_harness import DTYPES, Batch, Builder
from icc.runtime.executor.cpu.library import IccBatch

ARM64_PYTHON = os.environ.get("ICC_ARM64_PYTHON", "")
needs_arm64 = pytest.mark.skipif(not ARM64_PYTHON, reason="ICC_ARM64_PYTHON names no arm64 Python (arm64_python.sh)")
KV_BLOCKS = 32
Arrays = dict[str, np.ndarray]


def steps_on_arm64(
    library: Path, builder: Builder, steps: list[tuple[Batch, Arrays]], folder: Path, cpu: str = "max", threads: int = 2
) -> list[Arrays]:
    """The buffers and "logits" after each step. folder: an empty one for the files that the process reads and
    writes."""
    program = builder.program()
    kv = np.full(max(64, program.kv.groups[0].block_bytes() * KV_BLOCKS), 0xFF, np.uint8)
    for number, packed in enumerate([*builder.packed, kv]):
        packed.tofile(folder / ("kv" if number == len(builder.packed) else f"weight{number}"))
    plan = {
        "library": str(library), "threads": threads, "blocks": KV_BLOCKS, "steps": [],
        "weights": [f"weight{number}" for number in range(len(builder.packed))],
        "arena": max(64, program.arena_bytes_per_token * max(batch.tokens for batch, _ in steps)),
    }  # fmt: skip
    for number, (batch, feeds) in enumerate(steps):
        plan["steps"].append(_write_step(builder, batch, feeds, folder, str(number)))
    (folder / "plan.json").write_text(json.dumps(plan))
    script = Path(__file__).with_name("arm64_step.py")
    command = [ARM64_PYTHON, "-S", "-E", str(script), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | {"CPU": cpu})
    assert done.returncode == 0, done.stderr
    return [_read_step(builder, batch, folder, str(number)) for number, (batch, _) in enumerate(steps)]


def _views(builder: Builder, batch: Batch, arena: np.ndarray) -> Arrays:
    """The live contents of every buffer, as views of the arena."""
    views: Arrays = {}
    for buffer in builder.program().buffers:
        rows = len(batch.arrays()["logit_rows"]) if buffer.rows == "logit_rows" else batch.tokens
        dtype, start = np.dtype(DTYPES[buffer.dtype]), buffer.offset * batch.tokens
        size = int(np.prod(buffer.shape)) * rows * dtype.itemsize
        views[buffer.name] = arena[start : start + size].view(dtype).reshape(rows, *buffer.shape)
    return views


def _write_step(builder: Builder, batch: Batch, feeds: Arrays, folder: Path, name: str) -> dict[str, object]:
    program, arrays = builder.program(), batch.arrays(builder.holds_states)
    arena = np.zeros(max(64, program.arena_bytes_per_token * batch.tokens), np.uint8)
    views = _views(builder, batch, arena)
    for buffer, value in feeds.items():
        views[buffer][...] = value
    arena.tofile(folder / f"{name}.arena")
    wanted = len(arrays["logit_rows"])
    arrays["logits"] = np.zeros((max(1, wanted), program.vocab_size), np.float32)
    raw = IccBatch(
        num_tokens=batch.tokens, num_seqs=len(batch.sequences), num_logit_rows=wanted, greedy=batch.greedy,
        max_blocks=arrays["block_tables"].shape[1], num_moves=len(batch.moves),
    )  # fmt: skip
    files: dict[int, str] = {}
    for array, value in arrays.items():
        if array != "parents" or batch.trees:
            value.tofile(folder / f"{name}.{array}")
            files[getattr(IccBatch, array).offset] = f"{name}.{array}"
    return {"arena": f"{name}.arena", "batch": bytes(raw).hex(), "arrays": files}


def _read_step(builder: Builder, batch: Batch, folder: Path, name: str) -> Arrays:
    arena = np.fromfile(folder / f"{name}.arena", np.uint8)
    logits = np.fromfile(folder / f"{name}.logits", np.float32).reshape(-1, builder.program().vocab_size)
    return {"logits": logits, **_views(builder, batch, arena)}
