"""Renders a program to one self-contained C++ translation unit for one ISA level."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any, ClassVar

from ....runtime.format.batch import OPERANDS
from ....runtime.format.elements import ITEM_SIZE
from ....runtime.format.operands import BufferOperand, InputOperand, Operand, WeightOperand
from ...program.own_rows import least_rows, own_row_steps
from ...program.program import Program
from ...program.stages import stages_of
from ...program.steps.base import Step
from ...program.steps.collective import Collective, Transfer
from ..errors import CodegenError
from ..render import read_header, render
from .isa import Isa
from .kernels.base import KernelParams
from .kernels.caches import CPU_CACHES
from .kernels.linear import SCREENED_ROWS
from .kernels.micro import micro_sources
from .kernels.table import CPU_KERNELS
from .layouts.elements import round_up

HEADERS = (
    "abi.h", "simd.h", "system_linux.h", "blake3.h", "vmath.h", "team.h", "rows.h", "gemm.h", "screen.h", "kv.h",
    "attention.h", "pointwise/access.h",
)  # fmt: skip
LEAST_INPUTS = 10  # team.h has space for this many inputs of a step; more if a step has more
PANEL_BYTES = 512 << 10  # activation panels of one M-chunk: half of a common L2


@dataclass(frozen=True)
class StepParams:
    """One row of the step table, operands as C++ initialisers. stages: a bit for each rank of a pipeline that runs the
    step. own: whether each rank runs the step for its own rows."""

    fn: str
    group: int
    kv_offset: int
    kv_block_bytes: int
    inputs: str
    outputs: str
    stages: int = 0
    own: bool = False


@dataclass(frozen=True)
class LayerParams:
    """The KV cache of one layer: its offset in the group, in bytes, and the shape of its blocks. A layer that keeps a
    state has no shape."""

    group: int
    offset: int
    block_bytes: int
    ctype: str
    heads: int
    key_dim: int
    value_dim: int
    block_size: int
    shared: bool


@dataclass(frozen=True)
class ProgramParams:
    """The step table. sections: (shared, begin, end); the first is the program's own. instead: the numbers of the
    sections that run in place of the first. group_bytes: bytes of one block over all layers, for each KV group.
    fixed_inputs: the names of the inputs that come before those the program declares. together: whether several ranks
    run the program together. stages: how many groups of ranks run only the steps marked for them; 0 if every rank runs
    every step. own_inputs: how many inputs the program declares. max_inputs: the most inputs of a step. least_rows: the
    number of rows from which ranks divide them; 0: never."""

    steps: tuple[StepParams, ...]
    sections: tuple[tuple[int, int, int], ...]
    instead: tuple[int, ...]
    layers: tuple[LayerParams, ...]
    group_bytes: tuple[int, ...]
    together: bool = False
    stages: int = 0
    least_rows: int = 0
    own_inputs: int = 0
    max_inputs: int = 0
    fixed_inputs: tuple[str, ...] = tuple(array.name for array in OPERANDS)
    max_outputs: int = 4
    template: ClassVar[str] = "cpp/program.cpp.jinja"


def kernel_params(step: Step, fn: str, isa: Isa) -> KernelParams[Any]:
    """The kernel of a step; CodegenError names an op, or a fact, that the backend has no kernel for."""
    return CPU_KERNELS.find(step)(step, fn, isa)


@dataclass(frozen=True)
class _Places:
    """The places of operands: the numbers of weights and inputs, and the offsets of buffers in the arena, by name."""

    weights: dict[str, int]
    inputs: dict[str, int]
    buffers: dict[str, int]

    @classmethod
    def of(cls, program: Program) -> _Places:
        """The places of a program's operands."""
        inputs = (*ProgramParams.fixed_inputs, *(array.name for array in program.inputs))
        return cls(
            {name: number for number, name in enumerate(program.weights)},
            {name: number for number, name in enumerate(inputs)},
            {buffer.name: buffer.offset for buffer in program.buffers},
        )


def _operand(operand: Operand | None, places: _Places, by_rows: bool) -> str:
    """C++ initialiser of one operand. by_rows: include the stride of its rows."""
    space, at, moved, row = "NONE", 0, 0, 0
    if operand is not None:
        size = ITEM_SIZE[operand.dtype]
        space, moved, row = "LOGITS", operand.offset * size, operand.stride * size
    if isinstance(operand, BufferOperand):
        space, at = "BUFFER", places.buffers[operand.name]
    if isinstance(operand, WeightOperand):
        space, at = "WEIGHT", places.weights[operand.name]
    if isinstance(operand, InputOperand):
        space, at = "INPUT", places.inputs[operand.name]
    return f"{{{space}, {at}, {moved}{f', {row}' if by_rows else ''}}}"


def _steps(program: Program, functions: dict[str, str]) -> tuple[StepParams, ...]:
    places, layers, own = _Places.of(program), _layers(program), own_row_steps(program)
    by_rows = bool(least_rows(program))

    def step_params(number: int, step: Step, stages: frozenset[int]) -> StepParams:
        try:
            ins = [_operand(o, places, by_rows) for o in step.inputs.values()]
            outs = [_operand(o, places, by_rows) for o in step.outputs.values()]
            fn = functions[step.kernel]
        except KeyError as error:
            raise CodegenError(f"step of kernel {step.kernel}: {error.args[0]!r} is not in the program") from None
        if len(outs) > ProgramParams.max_outputs:
            raise CodegenError(f"step of kernel {step.kernel} has {len(outs)} outputs")
        if step.layer >= 0 and step.layer not in layers:
            raise CodegenError(f"step of kernel {step.kernel}: there is no KV layer {step.layer}")
        kv = layers.get(step.layer)
        place = (kv.group, kv.offset, kv.block_bytes) if kv is not None else (0, 0, 0)
        bits = sum(1 << stage for stage in stages)
        return StepParams(fn, *place, ", ".join(ins), ", ".join(outs), bits, number in own)

    return tuple(map(step_params, count(), program.steps, stages_of(program)))


def _layers(program: Program) -> dict[int, LayerParams]:
    """The parameters of each KV layer, by the number of the layer."""
    found: dict[int, LayerParams] = {}
    for number, group in enumerate(program.kv.groups):
        offset = 0
        for layer, kv in group.layers.items():
            shape = (kv.kv_heads, kv.key_dim, kv.value_dim, group.block_size, kv.shared)
            nbytes = group.layer_bytes(layer)
            found[layer] = LayerParams(number, offset, nbytes, CPU_CACHES.find(group.dtype).ctype, *shape)
            offset += nbytes
    return dict(sorted(found.items()))


def _sections(program: Program) -> tuple[tuple[int, int, int], ...]:
    return ((0, 0, program.num_own_steps), *((s.shared, s.begin, s.end) for s in program.sections))


def _header(path: str, isa: Isa) -> str:
    """The text of a header, or of the header with which the level replaces it: includes of `HEADERS` are dropped, other
    local includes are expanded. A replacement that includes the header it replaces gets the original."""
    own = dict(isa.headers)

    def include(match: re.Match[str]) -> str:
        local, system = match.groups()
        if local == path:
            return _text(local, include)
        if system is not None:
            return _header(system, isa) if system in own else match[0]
        return "" if local in HEADERS else _header(local, isa)

    return _text(own.get(path, path), include)


def _text(path: str, include: Callable[[re.Match[str]], str]) -> str:
    text = read_header("cpp/" + path).replace("#pragma once\n", "")
    return re.sub(r'(?m)^#include (?:"(.*)"|<(.*)>)\n', include, text)


def _with_inputs(text: str, count: int) -> str:
    """The headers with space for `count` inputs of a step; team.h has LEAST_INPUTS. CodegenError if team.h does not
    have the expected line: steps would write past the array."""
    room = f"void* in[{LEAST_INPUTS}];"
    if room not in text:
        raise CodegenError(f"team.h has no {room!r}, which LEAST_INPUTS is")
    return text.replace(room, f"void* in[{count}];")


def emit_source(program: Program, isa: Isa) -> str:
    """The whole library for `isa` as one C++ source without local includes. The same program gives the same text.
    CodegenError if it has no steps."""
    if not program.steps:
        raise CodegenError("the program has no steps")
    functions = {
        name: f"k{i}_{re.sub(r'[^0-9a-zA-Z]', '_', op)}" for i, (name, op) in enumerate(program.kernels.items())
    }
    found = program.kernel_steps
    kernels = [kernel_params(found[name], fn, isa) for name, fn in functions.items()]
    scratch = round_up(max(PANEL_BYTES, *(k.scratch_bytes for k in kernels)), 4096)
    shared = max(64, *(k.shared_bytes for k in kernels))
    inputs = max(LEAST_INPUTS, *(len(step.inputs) for step in found.values()))
    partials = ", ".join(f"{{{parts}, {size}}}" for parts, size in dict.fromkeys(k.partials for k in kernels))
    parts = [
        f"// Generated by icc for {isa.name}: do not edit.\n#include <new>",
        "#pragma GCC visibility push(default)\n" + _header("abi.h", isa) + "#pragma GCC visibility pop",
        (
            f"constexpr int64_t ICC_PANEL_BYTES = {PANEL_BYTES}, ICC_SCRATCH_BYTES = {scratch}, "
            f"ICC_SHARED_BYTES = {shared};\nconstexpr int SCREENED_ROWS = {SCREENED_ROWS};\n"
            f"constexpr int64_t ICC_PARTIALS[][2] = {{{partials}}};"
        ),
        _with_inputs("\n".join(_header(path, isa) for path in HEADERS[1:]), inputs),
        *(_header(path, isa) for path in dict.fromkeys(header for kernel in kernels for header in kernel.headers)),
        *micro_sources(kernels, isa),
        *(k.source() for k in kernels),
    ]
    group_bytes = tuple(group.block_bytes() for group in program.kv.groups)
    layers = tuple(layer for layer in _layers(program).values() if layer.heads)
    instead = tuple(number for number, s in enumerate(program.sections, start=1) if s.instead)
    together = any(isinstance(step, Collective) for step in found.values())
    last = max((step.stage for step in program.steps if isinstance(step, Transfer)), default=-1)
    steps, sections = _steps(program, functions), _sections(program)
    table = ProgramParams(
        steps,
        sections,
        instead,
        layers,
        group_bytes,
        together,
        last + 1,
        least_rows(program),
        len(program.inputs),
        inputs,
    )
    return "\n".join([*parts, render(table.template, table)])
