"""Renders a program to one self-contained C++ translation unit for one ISA level."""

from __future__ import annotations

import re
from dataclasses import MISSING, dataclass, fields
from typing import ClassVar

from ....runtime.format.program import DRAFTS, ITEM_SIZE, Kernel, Operand, Program, Step
from ...program.params import read
from ..errors import CodegenError
from ..render import read_header, render
from .isa import Isa
from .kernels.attention import AttentionParams, CacheParams, KvWriteParams
from .kernels.micro import micro_sources
from .kernels.params import (
    SCREENED_ROWS,
    DenseParams,
    EmbeddingParams,
    ExpertLinearParams,
    ExpertLinearQParams,
    KernelParams,
    LayerNormParams,
    LinearParams,
    LinearQParams,
    QuantizeRowsParams,
    QuantParams,
    RmsNormParams,
    SelectRowsParams,
)
from .kernels.pointwise import pointwise_params
from .kernels.rowwise import (
    BmmParams,
    CumsumParams,
    GatherParams,
    ReduceParams,
    ScatterParams,
    SoftmaxParams,
    TopkParams,
)
from .layouts.elements import C_TYPES, PLAIN, round_up

OPS: dict[str, type[KernelParams]] = {
    "embedding": EmbeddingParams,
    "linear": LinearParams,
    "quantize_rows": QuantizeRowsParams,
    "linear_q": LinearQParams,
    "rms_norm": RmsNormParams,
    "add_rms_norm": RmsNormParams,
    "layer_norm": LayerNormParams,
    "add_layer_norm": LayerNormParams,
    "reduce": ReduceParams,
    "softmax": SoftmaxParams,
    "topk": TopkParams,
    "gather": GatherParams,
    "scatter": ScatterParams,
    "cumsum": CumsumParams,
    "bmm": BmmParams,
    "select_rows": SelectRowsParams,
    "kv_write": KvWriteParams,
    "attention": AttentionParams,
    "expert_linear": ExpertLinearParams,
    "expert_linear_q": ExpertLinearQParams,
}

HEADERS = (
    "abi.h", "simd.h", "sha256.h", "vmath.h", "team.h", "rows.h", "gemm.h", "screen.h", "kv.h", "attention.h",
    "pointwise/access.h",
)  # fmt: skip
PANEL_BYTES = 512 << 10  # activation panels of one M-chunk: half of a common L2
PARTIAL_BYTES = 8 << 20  # attention partials when a long context is split over threads


@dataclass(frozen=True)
class StepParams:
    """One row of the step table, operands as C++ initialisers."""

    fn: str
    group: int
    kv_offset: int
    kv_block_bytes: int
    inputs: str
    outputs: str


@dataclass(frozen=True)
class LayerParams:
    """The KV cache of one layer: where it lies in its group, in bytes, and the shape of its blocks."""

    group: int
    offset: int
    block_bytes: int
    ctype: str
    heads: int
    key_dim: int
    value_dim: int
    block_size: int


@dataclass(frozen=True)
class ProgramParams:
    """The step table; sections are (shared, begin, end), the first is the program's own. group_bytes: of one block over
    all layers, for each KV group."""

    steps: tuple[StepParams, ...]
    sections: tuple[tuple[int, int, int], ...]
    layers: tuple[LayerParams, ...]
    group_bytes: tuple[int, ...]
    max_inputs: int = 10
    max_outputs: int = 4
    template: ClassVar[str] = "cpp/program.cpp.jinja"


def kernel_params(name: str, fn: str, kernel: Kernel, isa: Isa) -> KernelParams:
    """The typed params of one kernel; `CodegenError` names an op, a param or a value that does not fit."""
    try:
        values = read(kernel)
    except ValueError as error:
        raise CodegenError(f"kernel {name} ({kernel.op}): {error}") from None
    if kernel.op == "pointwise":
        try:
            return pointwise_params(fn, **values)
        except (TypeError, ValueError) as error:
            raise CodegenError(f"kernel {name} (pointwise): {error}") from None
    cls = OPS.get(kernel.op)
    if cls is None:
        raise CodegenError(f"kernel {name}: the CPU backend has no op {kernel.op!r}")
    if kernel.op.startswith("add_"):
        values["add"] = True
    if kernel.op == "attention":
        values["vectors"] = isa.attention_vectors
    if kernel.op == "embedding" and isinstance(values.get("rows"), int):
        values["table_rows"] = values.pop("rows")
    known = {f.name: f for f in fields(cls)}
    unknown = sorted(set(values) - set(known))
    missing = sorted(k for k, f in known.items() if f.default is MISSING and k not in values and k != "fn")
    if unknown or missing:
        raise CodegenError(f"kernel {name} ({kernel.op}): missing params {missing}, unknown params {unknown}")
    params = cls(fn=fn, **values)  # type: ignore[arg-type]
    _check(name, kernel.op, params)
    return params


def _check(name: str, op: str, p: KernelParams) -> None:
    """Refuse what the templates cannot express."""
    reason = ""
    if isinstance(p, (QuantParams, QuantizeRowsParams)) and (p.group % 16 or p.k % p.group):
        reason = f"group {p.group} must be a multiple of 16 that divides k = {p.k}"
    elif isinstance(p, QuantParams) and p.bits not in (4, 8):
        reason = f"bits must be 4 or 8, not {p.bits}"
    elif isinstance(p, DenseParams) and p.format not in ("f32", "bf16", "f16"):
        reason = f"unknown weight format {p.format!r}"
    elif isinstance(p, EmbeddingParams) and not p.bits and p.format.removeprefix("tile_") not in PLAIN:
        reason = f"unknown table format {p.format!r}"
    elif isinstance(p, CacheParams) and p.dtype not in ("f32", "bf16", "f16", "i8"):
        reason = f"unknown cache type {p.dtype!r}"
    elif isinstance(p, CacheParams) and p.block_size % 16:
        reason = f"blocks of {p.block_size} tokens: must be a multiple of 16"
    elif isinstance(p, CacheParams) and (p.rotary_dim % 2 or p.rotary_dim > p.key_dim):
        reason = f"rotary_dim {p.rotary_dim} must be even and at most key_dim {p.key_dim}"
    elif isinstance(p, AttentionParams) and p.q_heads % p.kv_heads:
        reason = f"{p.q_heads} query heads are no multiple of {p.kv_heads} KV heads"
    elif isinstance(p, TopkParams) and p.k > p.n:
        reason = f"k = {p.k} exceeds n = {p.n}"
    elif getattr(p, "dtype", "f32") not in C_TYPES:
        reason = f"unknown dtype {getattr(p, 'dtype', '')!r}"
    if reason:
        raise CodegenError(f"kernel {name} ({op}): {reason}")


def _scratch_bytes(kernels: list[KernelParams], isa: Isa) -> int:
    """Scratch per thread: the panel budget, or more where one panel or one attention tile needs it."""
    need = PANEL_BYTES
    for k in kernels:
        if isinstance(k, DenseParams):
            need = max(need, isa.dense_blocks[-1].rows * k.k * 4 + 64)
        elif isinstance(k, QuantParams):
            need = max(need, isa.quant_blocks[-1].rows * (k.k + 8 * k.groups) + 64)
            if isinstance(k, LinearQParams) and k.screened:
                need = max(need, k.screen_bytes())
        elif isinstance(k, AttentionParams):
            need = max(need, k.scratch_bytes())
    return round_up(need, 4096)


def _operand(program: Program, weights: dict[str, int], offsets: dict[str, tuple[int, int]], operand: Operand) -> str:
    """C++ initialiser of one operand. `offsets` maps a buffer to its arena offset and item size."""
    if operand.space == "none":
        return "{NONE, 0, 0}"
    if operand.space == "buffer":
        at, item = offsets[operand.name]
        return f"{{BUFFER, {at}, {operand.offset * item}}}"
    if operand.space == "weight":
        item = ITEM_SIZE.get(program.weights[operand.name].format, 1)
        return f"{{WEIGHT, {weights[operand.name]}, {operand.offset * item}}}"
    if operand.space == "input":
        space = {"token_ids": "TOKEN_IDS", "positions": "POSITIONS"}[operand.name]
        return f"{{{space}, 0, {operand.offset * 4}}}"
    if operand.space == "output":
        return "{DRAFTS, 0, 0}" if operand.name == DRAFTS else "{LOGITS, 0, 0}"
    raise CodegenError(f"unknown operand space {operand.space!r}")


def _steps(program: Program, functions: dict[str, str]) -> tuple[StepParams, ...]:
    weights = {name: i for i, name in enumerate(program.weights)}
    offsets = {b.name: (b.offset, ITEM_SIZE[b.dtype]) for b in program.buffers}
    layers = _layers(program)

    def step_params(step: Step) -> StepParams:
        try:
            ins = [_operand(program, weights, offsets, o) for o in step.inputs]
            outs = [_operand(program, weights, offsets, o) for o in step.outputs]
            fn = functions[step.kernel]
        except KeyError as error:
            raise CodegenError(f"step of kernel {step.kernel}: {error.args[0]!r} is not in the program") from None
        if step.layer >= 0 and step.layer not in layers:
            raise CodegenError(f"step of kernel {step.kernel}: there is no KV layer {step.layer}")
        kv = layers.get(step.layer)
        place = (kv.group, kv.offset, kv.block_bytes) if kv is not None else (0, 0, 0)
        return StepParams(fn, *place, ", ".join(ins), ", ".join(outs))

    return tuple(step_params(step) for step in program.steps)


def _layers(program: Program) -> dict[int, LayerParams]:
    """By the number of the layer."""
    found: dict[int, LayerParams] = {}
    for number, group in enumerate(program.kv.groups):
        offset = 0
        for layer, kv in group.layers.items():
            shape = (kv.kv_heads, kv.key_dim, kv.value_dim, group.block_size)
            nbytes = group.layer_bytes(layer)
            found[layer] = LayerParams(number, offset, nbytes, C_TYPES[group.dtype], *shape)
            offset += nbytes
    return dict(sorted(found.items()))


def _sections(program: Program) -> tuple[tuple[int, int, int], ...]:
    return ((0, 0, len(program.own_steps)), *((s.shared, s.begin, s.end) for s in program.sections))


def _header(path: str) -> str:
    """A header as part of the translation unit: includes of `HEADERS` are left out, others take their place."""

    def include(match: re.Match[str]) -> str:
        return "" if match[1] in HEADERS else _header(match[1])

    return re.sub(r'(?m)^#include "(.*)"\n', include, read_header("cpp/" + path).replace("#pragma once\n", ""))


def emit_source(program: Program, isa: Isa) -> str:
    """The whole library for `isa` as one C++ source without local includes. The same program gives the same text."""
    if not program.steps:
        raise CodegenError("the program has no steps")
    functions = {
        name: f"k{i}_{re.sub(r'[^0-9a-zA-Z]', '_', kernel.op)}"
        for i, (name, kernel) in enumerate(program.kernels.items())
    }
    kernels = [kernel_params(name, functions[name], kernel, isa) for name, kernel in program.kernels.items()]
    for step in program.steps:
        inputs, outputs = len(step.inputs), len(step.outputs)
        if inputs > ProgramParams.max_inputs or outputs > ProgramParams.max_outputs:
            raise CodegenError(f"step of kernel {step.kernel} has {inputs} inputs and {outputs} outputs")
    shared = PARTIAL_BYTES if any(isinstance(k, AttentionParams) for k in kernels) else 64
    parts = [
        f"// Generated by icc for {isa.name}: do not edit.\n#include <new>",
        "#pragma GCC visibility push(default)\n" + _header("abi.h") + "#pragma GCC visibility pop",
        (
            f"constexpr int64_t ICC_PANEL_BYTES = {PANEL_BYTES}, ICC_SCRATCH_BYTES = {_scratch_bytes(kernels, isa)}, "
            f"ICC_SHARED_BYTES = {shared};\nconstexpr int SCREENED_ROWS = {SCREENED_ROWS};"
        ),
        *(_header(path) for path in HEADERS[1:]),
        *micro_sources(kernels, isa),
        *(render(k.template, k) for k in kernels),
    ]
    group_bytes = tuple(group.block_bytes() for group in program.kv.groups)
    table = ProgramParams(_steps(program, functions), _sections(program), tuple(_layers(program).values()), group_bytes)
    return "\n".join([*parts, render(table.template, table)])
