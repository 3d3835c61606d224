"""Proofs kernel by kernel, at the limits of a large engine, that every access lies in its buffer and every index fits
32 bits: states, indexes, latents, blocks, experts, caches of every type; and planted faults of both kinds.

Kernels are compiled only to Triton's IR without layouts, by one process for all.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from icc.compiler.backends.triton.backend import LAYOUTS
from icc.compiler.backends.triton.bounds.addresses import IndexFault
from icc.compiler.backends.triton.plan import Planned, plan_program
from icc.compiler.backends.triton.reach import plan_faults
from icc.compiler.backends.triton.spec import Shape
from icc.compiler.backends.triton.tiling.choice import Tuner
from icc.compiler.program.program import Program
from icc.compiler.program.steps.base import Step
from icc.compiler.targets import TARGETS
from icc.runtime.format.elements import ITEM_SIZE
from icc.runtime.format.kv import KVGroup, KVLayer, KVLayout
from icc.runtime.format.manifest import Limits
from icc.runtime.format.operands import BufferOperand, WeightOperand
from icc.runtime.format.program import Buffer, WeightEntry
from on_ptx import plain_ir
from paged import cache
from sizes import soak
from snapshot_point import AROUND
from step_making import make_step, rotary
from test_triton_snapshots import POINTS

LIMITS = Limits(max_seq_len=131072, max_batch_size=256, max_step_tokens=8192)
SHAPES = (Shape(256, True), Shape(64, False), Shape(8192, False))
QUERY = ("bf16", "f32", "f32", "", "", "", "", "", "bf16")


PLACED = "page.to(tl.int64)"


def attention(key: int, value: int, dtype: str, **facts: Any) -> tuple[str, dict[str, Any], tuple[str, ...]]:
    heads = 1 if facts.get("shared") else 8
    kv = cache(heads, key, value, dtype, 32, shared=facts.pop("shared", False))
    return "attention", {**kv, "rotary": rotary(16, 131072, "half"), "q_heads": 32, "scale": 0.1, **facts}, QUERY


# steps of real sizes, in addition to the snapshots': op, facts, types of operands
LARGE: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "latents": attention(576, 512, "bf16", shared=True),
    "latents of 8 bits": attention(576, 512, "i8", shared=True),
    **{f"cache of {kind}, heads of 100": attention(100, 100, kind) for kind in ("bf16", "i8", "f8", "i4", "i2")},
    "first tokens and a window": attention(128, 128, "bf16", window=1024, front=4),
    "index": ("choose_keys", {**cache(1, 128, 128, "bf16", 32, shared=True), "heads": 64, "count": 2048,
                              "width": 131072}, ("bf16", "bf16", "bf16")),
    "experts": ("expert_linear", {"k": 2048, "n": 1408, "stored": "bf16", "experts": 128, "topk": 8},
                ("bf16", "bf16", "", "i32", "bf16")),
    "delta rule": ("gated_scan", {"heads": 32, "shared": 16, "key_dim": 128, "value_dim": 128, "chunk": 0,
                                  "delta": True, "block_size": 32}, ("bf16", "bf16", "bf16", "f32", "f32", "bf16")),
    **{f"blocks of {kind}": ("linear_q", {"k": 4096, "n": 1024, "stored": kind}, ("bf16", "u8", "", "bf16"))
       for kind in ("q4_k", "q6_k", "mxfp4", "nf4g64", "iq2_xs")},
}  # fmt: skip
STEPS = {  # except points with a stride of 0
    **{
        name: (p.op, p.params, p.types)
        for name, p in POINTS.items()
        if p.op not in AROUND and 0 not in p.params.get("strides", {}).values()
    },
    **LARGE,
}
USUAL = ("gated_chunks__delta_bf16", "choose_scores__i4", "blocks of q4_k")


def program_of(step: Step) -> Program:
    """A program of this step alone, with buffers, weights and a cache of the sizes that it states."""
    step = msgspec.structs.replace(step, layer=0) if hasattr(step, "kv") or hasattr(step, "state") else step
    widths, buffers, weights = step.widths(), [], {}
    for name, operand in step.operands.items():
        match operand:
            case BufferOperand():
                rows = step.rows_of(name)[0]
                buffers.append(Buffer(operand.name, operand.dtype, [operand.stride], rows, 0))
            case WeightOperand():
                weights[operand.name] = WeightEntry(operand.dtype, [], nbytes_of(step, name, operand, widths))
            case _:
                pass
    groups = tuple(groups_of(step))
    return Program({step.kernel: step.op}, (step,), buffers, weights, KVLayout(groups), 0, 32000, samples=False)


def nbytes_of(step: Any, name: str, operand: WeightOperand, widths: dict[str, int]) -> int:
    if name in widths:
        return (operand.offset + widths[name]) * ITEM_SIZE[operand.dtype]
    shape = (step.n, step.k) if hasattr(step, "k") else (step.table_rows, step.n)
    layout = LAYOUTS.find(step.stored.storage, step.stored.role)
    return layout.nbytes((step.experts, *shape) if getattr(step, "experts", 0) else shape)


def groups_of(step: Any) -> Iterator[KVGroup]:
    if hasattr(step, "kv"):
        yield KVGroup(step.block_size, step.cache, {0: step.kv})
    elif hasattr(step, "state"):
        yield KVGroup(step.block_size, "f32", {0: KVLayer(state=step.state)}, "state", 2)


def planned_alone(program: Program, shapes: tuple[Shape, ...] = SHAPES) -> Planned:
    """The plan of a program without the launches before and after its steps."""
    found = plan_program(program, LIMITS, Tuner(TARGETS["h100"]), shapes)
    return replace(found, phases=tuple(replace(phase, before=(), after=()) for phase in found.phases))


def faults(program: Program, planned: Planned) -> list[str]:
    every = plan_faults(program, LIMITS, planned, {key: plain_ir(spec) for key, spec in planned.specs().items()})
    return [fault for of in every.values() for fault in of]


@pytest.mark.parametrize("name", [*USUAL, *soak(*(name for name in STEPS if name not in USUAL))])
def test_every_access_is_shown_to_lie_in_its_buffer(name: str) -> None:
    op, facts, types = STEPS[name]
    program = program_of(make_step(op, types, **facts))
    assert faults(program, planned_alone(program)) == []


@pytest.fixture(scope="module")
def decoding() -> tuple[Program, Planned]:
    op, facts, types = STEPS["cache of i8, heads of 100"]
    program = program_of(make_step(op, types, **facts))
    return program, planned_alone(program, SHAPES[:1])


def test_a_cache_whose_blocks_are_smaller_is_found(decoding: tuple[Program, Planned]) -> None:
    """As if vectors were not padded in the layout that determines the cache's memory."""
    program, planned = decoding
    assert faults(program, planned) == []
    [group] = program.kv.groups
    smaller = msgspec.structs.replace(group, layers={0: msgspec.structs.replace(group.layers[0], align=1)})
    found = faults(msgspec.structs.replace(program, kv=KVLayout((smaller,))), planned)
    assert found and all("behind the end of argument" in fault for fault in found)


def test_pages_that_are_placed_by_32_bits_are_found(decoding: tuple[Program, Planned]) -> None:
    """With 1,048,576 blocks of 59,392 bytes."""
    program, planned = decoding
    [phase] = planned.phases
    [(name, [spec])] = phase.specs.items()
    assert spec.source.count(PLACED) == 1
    narrow = replace(spec, source=spec.source.replace(PLACED, "page"))
    short = replace(planned, phases=(replace(phase, specs={name: (narrow,)}),))
    found = faults(program, short)
    assert any(isinstance(fault, IndexFault) and "an index of 32 bits" in fault for fault in found)
