"""Makes steps for tests of kernels: by default with float32 operands and contiguous rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from icc.compiler.program.layout import Stored
from icc.compiler.program.program import FAMILIES
from icc.compiler.program.steps.attention import Rotary
from icc.compiler.program.steps.base import STEPS, QuantizedRows, Step, operand_fields
from icc.compiler.program.steps.linear import Product
from icc.runtime.format.kv import KVLayer
from icc.runtime.format.operands import BufferOperand, Operand, WeightOperand

assert FAMILIES  # their steps are known

_WEIGHTS = {"w", "bias", "table", "cos", "sin", "sinks", "alibi"}
_OPTIONAL = {"bias", "row_bias", "key_bias", "cos", "sin", "sinks", "alibi", "src", "beta"}
_WHOLE = {"ids", "index", "indices"}


def make_step(
    op: str,
    types: Sequence[str] = (),
    aligned: Sequence[bool] = (),
    strides: dict[str, int] | None = None,
    int8_rows: bool = False,
    **facts: Any,
) -> Step:
    """A step of an op.

    types: of the operands in order (see `operand_names`), "" for an absent one. By default operands are float32 or
    int32, and optional ones are absent except a norm's weight; `present` and `absent` name others. aligned: whether
    each begins at a multiple of 16 bytes. strides: by operand, for rows that are not contiguous; None: all are.
    int8_rows: x is given as codes. stored: a storage format, and after a colon the role that its layout is for.
    """
    cls, strides = STEPS[op], strides or {}
    if "stored" in cls.__struct_fields__:
        form, _, role = facts.get("stored", "f32").partition(":")
        facts["stored"] = Stored(form, role or ("table" if op == "embedding" else "product"))  # type: ignore[arg-type]
    present, absent = facts.pop("present", ()), facts.pop("absent", ())
    extras = len(types) - len(_fields(cls)) if types else 0
    names = _fields(cls, extras)
    if not types:
        types = tuple("" if name in absent else _default_type(cls, name, present) for name in names)
    aligned = aligned or (True,) * len(names)
    found = {
        name: _operand(name, kind, even, strides.get(name, -1))
        for name, kind, even in zip(names, types, aligned, strict=True)
    }
    widths = _assemble(cls, found, facts).widths()
    placed = {
        name: BufferOperand(o.name, o.dtype, widths[name], o.offset) if o and o.stride < 0 else o
        for name, o in found.items()
    }
    made = _assemble(cls, placed, facts)
    if "residual" in present:
        assert isinstance(made, Product)
        made = msgspec.structs.replace(made, residual=BufferOperand("residual", "f32", made.n))
    if int8_rows:
        assert isinstance(made, Product)
        made = msgspec.structs.replace(made, x=quantized_rows(made.k, int(made.stored.format.rpartition("g")[2])))
    return made


def operand_names(step: Step) -> tuple[list[str], list[str]]:
    """The inputs and outputs in the order of `types`: extras last, without the residual of products and the outputs of
    attention."""
    names = _fields(type(step), len(getattr(step, "args", getattr(step, "extras", ()))))
    outputs = [name for name in names if name.split(".")[0] in type(step).OUTPUTS]
    return [name for name in names if name not in outputs], outputs


def _fields(cls: type[Step], extras: int = 0) -> list[str]:
    many = "args" if "args" in operand_fields(cls) else "extras"
    names = [
        name
        for name in operand_fields(cls)
        if name
        not in (
            "args",
            "extras",
            "new",
            "norm_in",
            "norm_out",
            "residual",
            "results",
            "coded",
            "x_coded",
            "low",
            "up",
            "shift",
            "slot",
        )
    ]
    outputs = [name for name in names if name in cls.OUTPUTS]
    ins = [name for name in names if name not in outputs]
    return [*ins, *(f"{many}.{i}" for i in range(extras)), *outputs]


def _default_type(cls: type[Step], name: str, present: Sequence[str]) -> str:
    if name in _OPTIONAL and name not in present:
        return ""
    return "i32" if name in _WHOLE else "f32"


def _operand(name: str, kind: str, aligned: bool, stride: int) -> Operand | None:
    if not kind:
        return None
    offset = 0 if aligned else 1
    if name in _WEIGHTS and stride < 0:
        return WeightOperand(name, kind, offset)
    return BufferOperand(name, kind, stride, offset)


def _assemble(cls: type[Step], found: dict[str, Operand | None], facts: dict[str, Any]) -> Step:
    fields: dict[str, Any] = {"args": ()} if "args" in operand_fields(cls) else {}
    fields |= {name: o for name, o in found.items() if "." not in name}
    for name, operand in found.items():
        if "." in name:
            fields[name.split(".")[0]] = (*fields.get(name.split(".")[0], ()), operand)
    return cls(kernel=f"{cls.__name__}_0", **fields, **facts)


def quantized_rows(k: int, group: int) -> QuantizedRows:
    """The operand of a product of int8 rows."""
    codes = BufferOperand("codes", "i8", k)
    return QuantizedRows(codes, *(BufferOperand(name, "f32", k // group) for name in ("scales", "sums")))


def cache(
    kv_heads: int, key_dim: int, value_dim: int, dtype: str, block_size: int, shared: bool = False, align: int = 1
) -> dict[str, Any]:
    """The arguments of steps that describe a layer's cache."""
    layer = KVLayer(kv_heads, key_dim, value_dim, shared=shared, align=align)
    return {"kv": layer, "cache": dtype, "block_size": block_size}


def rotary(dim: int, rows: int, style: Any) -> Rotary:
    """The rotary embedding of a step."""
    return Rotary(dim, rows if dim else 0, style)
