"""PTX instructions that do not access memory, computed for all threads at once (see ptx_machine.py)."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import ptx

if TYPE_CHECKING:
    from ptx_machine import Line, Machine

Lanes = np.ndarray
VALUES: dict[str, type] = {
    "u8": np.uint8, "s8": np.int8, "b8": np.uint8, "u16": np.uint16, "s16": np.int16, "b16": np.uint16,
    "u32": np.uint32, "s32": np.int32, "b32": np.uint32, "f32": np.float32, "u64": np.uint64, "s64": np.int64,
    "b64": np.uint64, "f64": np.float64, "pred": np.bool_, "f16": np.float16, "bf16": np.uint16, "bf16x2": np.uint32,
    "f16x2": np.uint32,
}  # fmt: skip
FLOATS = ("f16", "f32", "f64")
_WIDER = {"s16": "s32", "u16": "u32", "s32": "s64", "u32": "u64"}
_COMPARE: dict[str, Callable[[Lanes, Lanes], Lanes]] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
}  # fmt: skip


def number(text: str, kind: str) -> object:
    """The value of a constant: 0f and eight hexadecimal digits are the bits of a float."""
    text = text.rstrip("U")
    if text.lower().startswith(("0f", "0d")):
        bits = bytes.fromhex(text[2:])
        found = struct.unpack(">f" if len(bits) == 4 else ">d", bits)[0]
        return found if kind in FLOATS else int(text[2:], 16)
    value = int(text, 0)
    if kind == "pred":
        return bool(value)
    kind = VALUES[kind]  # type: ignore[assignment]
    if np.issubdtype(kind, np.floating):  # type: ignore[arg-type]
        return value
    width = 8 * np.dtype(kind).itemsize
    return np.array(value & (1 << width) - 1, f"u{width // 8}").view(kind)[()]


def compute(machine: Machine, line: Line) -> None:
    """Execute an instruction whose first operand is its result."""
    name, *rest = line.name.split(".")
    kind = rest[-1]
    get = machine.get
    result = line.operands[0]
    given = line.operands[1:]
    if name == "mov":
        _move(machine, result, given[0], kind)
    elif name == "setp":
        compared = _compare(rest[0], get(given[0], kind), get(given[1], kind), kind)
        joined = [part for part in rest[1:-1] if part in ("and", "or", "xor")]
        if joined:
            other = get(given[2], "pred")
            compared = {"and": compared & other, "or": compared | other, "xor": compared ^ other}[joined[0]]
        machine.put(result, compared)
    elif name == "selp":
        machine.put(result, np.where(get(given[2], "pred"), get(given[0], kind), get(given[1], kind)))
    elif name == "cvt":
        machine.put(result, _convert(machine, rest, given))
    elif kind in ("bf16x2", "f16x2", "bf16"):
        machine.put(result, _halves(name, rest, [get(word, kind) for word in given], kind))
    elif name in ("mul", "mad") and ("wide" in rest or "hi" in rest):
        machine.put(result, _long(machine, rest, given, kind))
    elif name in ("shl", "shr"):
        machine.put(result, _shift(name, get(given[0], kind), get(given[1], "u32")))
    elif name == "bfe":
        machine.put(result, _field(*(get(given[0], kind), get(given[1], "u32"), get(given[2], "u32"))))
    elif name == "prmt":
        machine.put(result, _bytes(*(get(word, "u32") for word in given)))
    elif name == "lop3":
        a, b, c = (get(word, "u32") for word in given[:3])
        machine.put(result, ptx._lop3(a, b, c, np.uint32(int(given[3].rstrip("U"), 0))))
    else:
        machine.put(result, _OPERATIONS[name](*(get(word, kind) for word in given)))


def _move(machine: Machine, result: str, given: str, kind: str) -> None:
    if result.startswith("{"):
        names = machine.vector(result)
        whole = machine.get(given, kind)
        part = whole.view(f"u{whole.dtype.itemsize // len(names)}").reshape(len(whole), len(names))
        for number_, name in enumerate(names):
            machine.put(name, np.ascontiguousarray(part[:, number_]))
    elif given.startswith("{"):
        names = machine.vector(given)
        size = np.dtype(VALUES[kind]).itemsize // len(names)
        values = np.stack([machine.get(name, f"b{8 * size}") for name in names], 1)
        machine.put(result, np.ascontiguousarray(values).view(VALUES[kind])[:, 0])
    else:
        machine.put(result, machine.get(given, kind).copy())


def _compare(how: str, a: Lanes, b: Lanes, kind: str) -> Lanes:
    if kind in FLOATS:
        unordered = np.isnan(a) | np.isnan(b)
        if how in ("nan", "num"):
            return unordered if how == "nan" else ~unordered
        if how in ("equ", "neu", "ltu", "leu", "gtu", "geu"):
            return _COMPARE[how[:2]](a, b) | unordered
        return _COMPARE[how](a, b) & ~unordered
    return _COMPARE[how](a, b)


def _convert(machine: Machine, how: list[str], given: tuple[str, ...]) -> Lanes:
    target, source = how[-2], how[-1]
    if target in ("bf16x2", "f16x2"):
        high, low = (_rounded(machine.get(word, "f32"), target[:-2]).astype(np.uint32) for word in given)
        return low | high << np.uint32(16)
    if source == "bf16":
        value = ptx.bf16(machine.get(given[0], "b16"))
    else:
        value = machine.get(given[0], source)
    if target == "bf16":
        return _rounded(value, "bf16").astype(np.uint16)
    wanted = VALUES[target]
    if np.issubdtype(value.dtype, np.floating) and np.issubdtype(wanted, np.integer):
        rounding = next((part for part in how if part in ("rzi", "rni", "rmi", "rpi")), "rni")
        value = {"rzi": np.trunc, "rni": np.rint, "rmi": np.floor, "rpi": np.ceil}[rounding](value.astype(np.float64))
        limits = np.iinfo(wanted)  # type: ignore[arg-type]
        value = np.nan_to_num(value, nan=0.0).clip(limits.min, limits.max)
    elif target in FLOATS and source in FLOATS and "rzi" in how:
        value = np.trunc(value)
    return value.astype(wanted)


def _rounded(value: Lanes, kind: str) -> Lanes:
    """The bits of float32 numbers rounded to a 16-bit type, to nearest even."""
    if kind == "f16":
        return value.astype(np.float16).view(np.uint16)
    bits = value.astype(np.float32).view(np.uint32)
    found = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(value), np.uint32(0x7FFF), found)


def _halves(name: str, how: list[str], given: list[Lanes], kind: str) -> Lanes:
    """The result of an instruction on one or two 16-bit numbers per register."""
    found = []
    for shift in (0, 16) if kind.endswith("x2") else (0,):
        halves = [(value.astype(np.uint32) >> np.uint32(shift)) & np.uint32(0xFFFF) for value in given]
        if kind.startswith("bf16"):
            numbers = [ptx.bf16(half).astype(np.float64) for half in halves]
        else:
            numbers = [half.astype(np.uint16).view(np.float16).astype(np.float64) for half in halves]
        value = _OPERATIONS[name](*numbers).astype(np.float32)  # rounded twice, seen only near halves of the last bit
        found.append(_rounded(value, kind.removesuffix("x2")).astype(np.uint32))
    return found[0] | found[1] << np.uint32(16) if len(found) == 2 else found[0].astype(np.uint16)


def _long(machine: Machine, how: list[str], given: tuple[str, ...], kind: str) -> Lanes:
    """The upper half of a product, or the whole product, plus an optional third operand of its width."""
    a, b = (machine.get(word, kind) for word in given[:2])
    if "hi" in how:
        return _high(a, b)
    wide = VALUES[_WIDER[kind]]
    value = a.astype(wide) * b.astype(wide)
    return value + machine.get(given[2], _WIDER[kind]) if len(given) > 2 else value


def _high(a: Lanes, b: Lanes) -> Lanes:
    width = 8 * a.dtype.itemsize
    if width < 64:
        wide = np.int64 if a.dtype.kind == "i" else np.uint64
        return (a.astype(wide) * b.astype(wide) >> wide(width)).astype(a.dtype)
    return np.array([int(x) * int(y) >> 64 for x, y in zip(a, b, strict=True)]).astype(a.dtype)


def _shift(name: str, value: Lanes, by: Lanes) -> Lanes:
    width = 8 * value.dtype.itemsize
    near = np.minimum(by, width - 1).astype(value.dtype)
    if name == "shl":
        return np.where(by < width, value << near, value.dtype.type(0))
    if value.dtype.kind == "i":
        return value >> near
    return np.where(by < width, value >> near, value.dtype.type(0))


def _field(value: Lanes, start: Lanes, length: Lanes) -> Lanes:
    width = np.uint32(8 * value.dtype.itemsize)
    up = (width - start - length).astype(value.dtype)
    return (value << up) >> (width - length).astype(value.dtype)


def _bytes(a: Lanes, b: Lanes, selector: Lanes) -> Lanes:
    both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    result = np.zeros(len(a), np.uint32)
    for place in range(4):
        choice = selector >> np.uint32(4 * place) & np.uint32(15)
        byte = (both >> (np.uint64(8) * (choice & np.uint32(7)).astype(np.uint64))).astype(np.uint32) & np.uint32(255)
        sign = np.where(byte & np.uint32(128), np.uint32(255), np.uint32(0))
        result |= np.where(choice & np.uint32(8), sign, byte) << np.uint32(8 * place)
    return result


def _divided(a: Lanes, b: Lanes) -> Lanes:
    if a.dtype.kind == "f":
        return a / b
    whole = np.where(b == 0, 1, b)
    return (
        (np.abs(a) // np.abs(whole) * np.sign(a) * np.sign(whole)).astype(a.dtype)
        if a.dtype.kind == "i"
        else a // whole
    )


def _remainder(a: Lanes, b: Lanes) -> Lanes:
    return (a - _divided(a, b) * b).astype(a.dtype)


_OPERATIONS: dict[str, Callable[..., Lanes]] = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b, "mad": lambda a, b, c: a * b + c,
    "fma": lambda a, b, c: (a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)).astype(a.dtype),
    "neg": lambda a: -a, "abs": np.abs, "not": lambda a: ~a, "and": lambda a, b: a & b, "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b, "min": np.fmin, "max": np.fmax, "div": _divided, "rem": _remainder,
    "rcp": lambda a: 1 / a, "ex2": np.exp2, "lg2": np.log2, "sqrt": np.sqrt, "rsqrt": lambda a: 1 / np.sqrt(a),
    "sin": np.sin, "cos": np.cos, "tanh": np.tanh, "cvta": lambda a: a,
    "popc": lambda a: np.bitwise_count(a).astype(np.uint32),
}  # fmt: skip
