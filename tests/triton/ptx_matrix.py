"""Matrix instructions of PTX for all warps at once (see ptx_machine.py): mma, wgmma, and moves of their fragments.

Layouts are those of the PTX ISA, sections "Matrix fragments for mma" and "Asynchronous warpgroup level matrix shared
memory layout"; products are added up in float64.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np
import ptx
import torch

if TYPE_CHECKING:
    from ptx_machine import Line, Machine

Lanes = np.ndarray


def _numbers(raw: np.ndarray, kind: str) -> np.ndarray:
    """Bytes [.., n] as float64 numbers [.., n / size]."""
    if kind == "bf16":
        return ptx.bf16(raw.view(np.uint16)).astype(np.float64)
    if kind in ("e4m3", "e5m2"):
        form = torch.float8_e4m3fn if kind == "e4m3" else torch.float8_e5m2
        return torch.from_numpy(np.ascontiguousarray(raw)).view(form).to(torch.float64).numpy()
    if kind == "tf32":
        return (raw.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)
    return raw.view({"f16": np.float16, "f32": np.float32, "s8": np.int8, "u8": np.uint8}[kind]).astype(np.float64)


def _size(kind: str) -> int:
    return {"bf16": 2, "f16": 2, "tf32": 4, "f32": 4}.get(kind, 1)


def _warps(machine: Machine, names: list[str]) -> np.ndarray:
    """The registers of all warps: bytes [warps, 32, registers, 4]."""
    values = np.stack([machine.get(name, "b32") for name in names], 1)
    return np.ascontiguousarray(values).view(np.uint8).reshape(-1, 32, len(names), 4)


def _left(machine: Machine, names: list[str], kind: str) -> np.ndarray:
    """A [warps, 16, K] from registers, four or two per lane."""
    raw = _warps(machine, names)
    found = np.zeros((len(raw), 16, 8 * len(names)), np.uint8)  # K has 32 or 16 bytes
    lane = np.arange(32)
    for register in range(len(names)):
        row = lane // 4 + 8 * (register % 2)
        byte = (lane % 4) * 4 + 16 * (register // 2)
        for each in range(4):
            found[:, row, byte + each] = raw[:, :, register, each]
    return _numbers(found, kind)


def _right(machine: Machine, names: list[str], kind: str) -> np.ndarray:
    """B [warps, 8, K] from registers, two or one per lane."""
    raw = _warps(machine, names)
    found = np.zeros((len(raw), 8, 16 * len(names)), np.uint8)
    lane = np.arange(32)
    for register in range(len(names)):
        for each in range(4):
            found[:, lane // 4, (lane % 4) * 4 + 16 * register + each] = raw[:, :, register, each]
    return _numbers(found, kind)


def _add(machine: Machine, names: list[str], product: np.ndarray, sums: list[str] | None, kind: str) -> None:
    """Add products [warps, 16, N] to the lanes' sums; None: there are no earlier sums."""
    lane = np.arange(32)
    for number, name in enumerate(names):
        row = lane // 4 + 8 * (number % 4 // 2)
        column = 8 * (number // 4) + (lane % 4) * 2 + number % 2
        value = product[:, row, column].reshape(-1)
        if sums is not None:
            value = value + machine.get(sums[number], kind).astype(np.float64)
        machine.put(name, value.astype(np.float32 if kind == "f32" else np.int32))


def fragment_product(machine: Machine, line: Line) -> None:
    """mma.sync.aligned.m16n8kK.row.col.D.A.B.C"""
    result, a, b, c = (machine.vector(word) for word in line.operands)
    kind, right, sums = line.name.split(".")[-3:]
    product = np.einsum("wmk,wnk->wmn", _left(machine, a, kind), _right(machine, b, right))
    _add(machine, result, product, c, sums)


def group_product(machine: Machine, line: Line) -> None:
    """wgmma.mma_async.sync.aligned.m64nNkK.D.A.B, executed at once."""
    found = re.match(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k(\d+)\.(\w+)\.(\w+)\.(\w+)", line.name)
    assert found is not None
    columns, depth, (sums, left, right) = int(found[1]), int(found[2]), found.groups()[2:]
    names, a, b, keep, *flags = line.operands
    warps = machine.count // 32
    row = np.arange(16)
    transposed = [int(flag) for flag in flags[2:]]
    if a.startswith("{"):
        lefts = _left(machine, machine.vector(a), left)
    else:
        own = row[None, :] + 16 * (np.arange(warps) % (machine.threads // 32) % 4)[:, None]
        lefts = _operand(machine, a, own, depth, left, bool(transposed and transposed[0]))
    every = np.broadcast_to(np.arange(columns), (warps, columns))
    rights = _operand(machine, b, every, depth, right, bool(transposed and transposed[-1]))
    product = np.einsum("wmk,wnk->wmn", lefts, rights)
    kept = machine.get(keep, "pred")
    registers = machine.vector(names)
    lane = np.arange(32)
    for number, name in enumerate(registers):
        at = lane // 4 + 8 * (number % 4 // 2), 8 * (number // 4) + (lane % 4) * 2 + number % 2
        value = product[:, at[0], at[1]].reshape(-1)
        if name in machine.registers:
            value = value + np.where(kept, machine.get(name, sums), 0).astype(np.float64)
        machine.put(name, value.astype(np.float32 if sums == "f32" else np.int32))


def _operand(machine: Machine, name: str, rows: np.ndarray, depth: int, kind: str, transposed: bool) -> np.ndarray:
    """An operand [warps, rows, K] in shared memory, located by its descriptor."""
    from ptx_machine import Fault

    size = _size(kind)
    described = machine.get(name, "u64").astype(np.int64)[::32, None, None]
    start, leading, stride = ((described >> bit & 0x3FFF) << 4 for bit in (0, 16, 32))
    mode = int(machine.get(name, "u64")[machine.mask][0] >> np.uint64(62))
    width = {0: 16, 1: 128, 2: 64, 3: 32}[mode]  # bytes per row of the swizzle pattern
    k, row = np.arange(depth)[None, None, :], rows[:, :, None].astype(np.int64)
    if transposed:  # rows are contiguous
        each = width // size
        across, along = (leading, stride) if mode else (stride, leading)
        at = start + row // each * across + row % each * size + k // 8 * along + k % 8 * width
    else:
        at = (
            start
            + row // 8 * stride
            + row % 8 * width
            + (k * size if mode else k * size // 16 * leading + k * size % 16)
        )
    at = at ^ ((at >> 7 & (width // 16 - 1)) << 4)
    active = machine.mask.reshape(-1, 32)[:, 0]
    reached = at[active]
    if reached.min() < 1024 or reached.max() + size > machine.shared.shape[1]:
        raise Fault(f"operand of matrix units at {reached.min()} to {reached.max()} of {machine.shared.shape[1]}")
    at = np.where(active[:, None, None], at, 1024)
    block = (np.arange(len(at)) * 32 // machine.threads)[:, None, None, None]
    raw = machine.shared[block, at[..., None] + np.arange(size)]
    return _numbers(raw.reshape(*at.shape[:2], -1), kind)


def load_matrix(machine: Machine, line: Line) -> None:
    """ldmatrix: eight rows of 16 bytes per matrix; the lanes hold the rows' addresses."""
    names = machine.vector(line.operands[0])
    place = machine.place(line.operands[1])
    asks = machine.mask & (machine.thread % 32 < 8 * len(names))
    rows = machine.read("shared", place, 16, asks).reshape(-1, 32, 16)
    lane = np.arange(32)
    for number, name in enumerate(names):
        matrix = rows[:, 8 * number : 8 * number + 8].copy().view(np.uint16)  # [warps, 8, 8]
        if "trans" in line.name:
            matrix = matrix.transpose(0, 2, 1)
        pair = np.stack([matrix[:, lane // 4, lane % 4 * 2 + each] for each in range(2)], -1)
        machine.put(name, np.ascontiguousarray(pair).view(np.uint32).reshape(-1))


def store_matrix(machine: Machine, line: Line) -> None:
    """stmatrix: the inverse of ldmatrix."""
    names = machine.vector(line.operands[1])
    place = machine.place(line.operands[0])
    lane = np.arange(32)
    rows = np.zeros((machine.count // 32, 32, 8), np.uint16)
    for number, name in enumerate(names):
        pair = machine.get(name, "b32").view(np.uint16).reshape(-1, 32, 2)
        matrix = np.zeros((len(rows), 8, 8), np.uint16)
        for each in range(2):
            matrix[:, lane // 4, lane % 4 * 2 + each] = pair[:, :, each]
        rows[:, 8 * number : 8 * number + 8] = matrix.transpose(0, 2, 1) if "trans" in line.name else matrix
    asks = machine.mask & (machine.thread % 32 < 8 * len(names))
    machine.write("shared", place, rows.view(np.uint8).reshape(machine.count, 16), asks)
