"""One case per lowered op and odd shape, each with its numpy float64 reference; attention has its own file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from cpu_harness import Builder, Case
from icc.compiler.backends.cpu.layouts.affine import AffineTiles
from icc.compiler.backends.cpu.layouts.dense import ROWS, TILES
from icc.compiler.backends.cpu.layouts.reduced import ReducedTiles
from icc.compiler.backends.cpu.layouts.split import SplitTiles
from icc.compiler.ops.body import Body
from icc.compiler.program.layout import Stored
from icc.compiler.program.steps.base import STEPS, QuantizedRows
from icc.compiler.program.steps.embedding import Embedding, SelectRows
from icc.compiler.program.steps.linear import (
    AdapterChange,
    Columns,
    Epilogue,
    ExpertLinear,
    ExpertLinearQ,
    Linear,
    LinearQ,
    QuantizeRows,
)
from icc.compiler.weights.formats.affine import GroupAffine
from icc.compiler.weights.formats.reduced import ReducedInt8
from icc.runtime.format.operands import BufferOperand, InputOperand

Arrays = dict[str, np.ndarray]


def normal(*shape: int, scale: float = 1.0) -> Callable[[np.random.Generator, int], np.ndarray]:
    return lambda rng, rows: (rng.standard_normal((rows, *shape)) * scale).astype(np.float32)


def _column_slice(
    b: Builder, name: str, width: int, slice_: bool, rows: str = "tokens"
) -> tuple[BufferOperand, int, int]:
    """A buffer of `width` columns, or a wider one whose columns from 8 on are used: operand, row stride, first
    column."""
    if slice_:
        b.columns[name] = (8, width)
        return b.buffer(name, [width + 24], rows=rows, offset=8), width + 24, 8
    return b.buffer(name, [width], rows=rows), width, 0


def add_linear(b: Builder, rng: np.random.Generator, k: int, n: int, fmt: str, extra: bool, rows: str) -> None:
    name = f"linear_{fmt}_{k}x{n}_{rows}{'_bias_slice' if extra else ''}"
    w = rng.standard_normal((n, k)).astype(np.float32) / np.sqrt(k)
    packed = TILES[fmt].pack({"values": w})
    exact = TILES[fmt].unpack(packed, (n, k))["values"].astype(np.float64)
    bias = rng.standard_normal(n).astype(np.float32)
    x, x_stride, start = _column_slice(b, f"{name}.x", k, extra, rows)
    y, _, y_start = _column_slice(b, f"{name}.y", n, extra, rows)
    feeds = {x.name: normal(x_stride)}
    w = b.weight(f"{name}.w", packed, f"tile_{fmt}", (n, k))
    added: dict[str, Any] = {}
    if extra:
        added = {"bias": b.plain(f"{name}.b", bias)}
    b.step(Linear(rows=rows, x=x, w=w, y=y, k=k, n=n, stored=Stored(fmt, "product"), **added))  # type: ignore[arg-type]

    def expect(a: Arrays) -> Arrays:
        out = a[y.name].astype(np.float64)
        out[:, y_start : y_start + n] = a[x.name][:, start : start + k].astype(np.float64) @ exact.T
        if extra:
            out[:, y_start : y_start + n] += bias
        return {y.name: out}

    b.cases.append(Case(name, feeds, expect, max(2e-6, 1e-9 * k)))


def quantized_layout(fmt: str, group: int) -> AffineTiles | ReducedTiles:
    """The layout of q4, q8, q8s or i7 weights."""
    if fmt == "i7":
        return ReducedTiles.of(ReducedInt8(group, 8))
    return SplitTiles.of(GroupAffine(group, 8)) if fmt == "q8s" else AffineTiles.of(GroupAffine(group, int(fmt[1:])))


def quantized_storage(fmt: str, group: int) -> Stored:
    """The storage format of `quantized_layout`, as a step states it."""
    return Stored(f"{fmt[:2]}g{group}", "screen" if fmt == "q8s" else "product")


def quantized_weight(rng: np.random.Generator, n: int, k: int, fmt: str, group: int) -> tuple[np.ndarray, np.ndarray]:
    """Packed bytes and the float64 matrix they stand for, with scales from 1e-7 to 1."""
    layout = quantized_layout(fmt, group)
    bits = layout.format.bits
    codes = rng.integers(0, 2**bits, (n, k)).astype(np.uint8)
    zeros = rng.integers(0, 2**bits, (n, k // group)).astype(np.uint8)
    if fmt == "i7":  # codes near 128, and the largest codes, whose sums must not overflow
        codes, zeros = (65 + codes % 127).astype(np.uint8), np.full_like(zeros, 128)
        codes[n // 2] = 191
    scales = (rng.uniform(0.5, 1.0, (n, k // group)) * 10.0 ** rng.integers(-1, 1)).astype(np.float32)
    if n > 8:
        scales[3] *= 1e-6
    packed = layout.pack({"codes": codes, "scales": scales, "zeros": zeros})
    got = layout.unpack(packed, (n, k))
    wide = (got["codes"].astype(np.float64).reshape(n, -1, group) - got["zeros"][..., None]) * got["scales"][..., None]
    return packed, wide.reshape(n, k)


def dequantize(q: np.ndarray, s: np.ndarray, zeros: np.ndarray | float = 0.0) -> np.ndarray:
    codes = q.astype(np.float64).reshape(*q.shape[:-1], s.shape[-1], -1)
    return ((codes - np.asarray(zeros)[..., None]) * s[..., None]).reshape(q.shape)


def add_quantize(
    b: Builder, name: str, k: int, group: int, slice_: bool, scale: float = 1.0, unsigned: bool = False
) -> QuantizedRows:
    """Add a quantize_rows step over a new buffer; returns its outputs."""
    x, x_stride, start = _column_slice(b, f"{name}.x", k, slice_)
    codes = b.buffer(f"{name}.q", [k], "i8")
    scales, sums = (b.buffer(f"{name}.{part}", [k // group]) for part in ("s", "sum"))
    b.step(QuantizeRows(x=x, codes=codes, scales=scales, sums=sums, k=k, group=group, unsigned=unsigned))

    def expect(a: Arrays) -> Arrays:
        groups = a[x.name][:, start : start + k].reshape(len(a[x.name]), -1, group)
        if unsigned:
            low, high = np.minimum(groups.min(-1), 0), np.maximum(groups.max(-1), 0)
            inverse = np.float32(127) / (high - low)
            zero = np.rint(-low * inverse)
            q = np.clip(np.rint(groups * inverse[..., None]) + zero[..., None], 0, 127)
            return {f"{name}.q": q.reshape(-1, k), f"{name}.s": (high - low) / 127, f"{name}.sum": zero}
        peak = np.abs(groups).max(-1)
        q = np.rint(
            groups * np.where(peak > 0, np.float32(127) / np.where(peak > 0, peak, 1), 0)[..., None].astype(np.float32)
        )
        return {f"{name}.q": q.reshape(-1, k), f"{name}.s": peak / 127, f"{name}.sum": q.sum(-1)}

    b.cases.append(Case(f"quantize_{name}", {x.name: normal(x_stride, scale=scale)}, expect))
    return QuantizedRows(codes, scales, sums)


def add_linear_q(b: Builder, rng: np.random.Generator, k: int, n: int, fmt: str, group: int, extra: bool) -> None:
    name = f"linear_{fmt}_g{group}_{k}x{n}{'_bias_slice' if extra else ''}"
    packed, exact = quantized_weight(rng, n, k, fmt, group)
    x = add_quantize(b, name, k, group, extra, scale=50.0 if fmt == "i7" else 1.0, unsigned=fmt == "i7")
    bias = rng.standard_normal(n).astype(np.float32)
    y, _, y_start = _column_slice(b, f"{name}.y", n, extra)
    w = b.weight(f"{name}.w", packed, fmt, (n, k))
    added: dict[str, Any] = {"bias": b.plain(f"{name}.b", bias)} if extra else {}
    b.step(LinearQ(x=x, w=w, y=y, k=k, n=n, stored=quantized_storage(fmt, group), **added))

    def expect(a: Arrays) -> Arrays:
        out = a[y.name].astype(np.float64)
        zeros = a[f"{name}.sum"] if fmt == "i7" else 0.0
        out[:, y_start : y_start + n] = dequantize(a[f"{name}.q"], a[f"{name}.s"].astype(np.float64), zeros) @ exact.T
        if extra:
            out[:, y_start : y_start + n] += bias
        return {y.name: out}

    b.cases.append(Case(name, {}, expect, 1e-5))


def small_products() -> Builder:
    """A program of two small products, of values and of codes."""
    b, rng = Builder(), np.random.default_rng(0)
    add_linear(b, rng, 8, 5, "f32", False, "tokens")
    add_linear_q(b, rng, 16, 17, "q4", 16, False)
    return b


def add_experts(b: Builder, rng: np.random.Generator, bits: int, topk: int, per_slot: bool) -> None:
    e, k, n, group = 23 if topk == 1 else 5, 48, 21, 16  # 23: most rows have an expert alone, some share one
    name = f"experts_{'q' + str(bits) if bits else 'bf16'}_top{topk}{'_per_slot' if per_slot else ''}"
    bias = rng.standard_normal((e, n)).astype(np.float32)
    index = b.buffer(f"{name}.index", [topk], "i32")
    y = b.buffer(f"{name}.y", [topk, n])
    width = k * topk if per_slot else k
    feeds: dict[str, Any] = {index.name: lambda rng, rows: rng.integers(-1, e + 1, (rows, topk))}
    if bits:
        parts = [quantized_weight(rng, n, k, f"q{bits}", group) for _ in range(e)]
        exact = np.stack([p[1] for p in parts])
        weight = b.weight(f"{name}.w", np.concatenate([p[0] for p in parts]), f"q{bits}", (e, n, k))
        x = add_quantize(b, name, width, group, False)
        bias_at = b.plain(f"{name}.b", bias)
        facts = {
            "k": k,
            "n": n,
            "experts": e,
            "topk": topk,
            "x_per_slot": per_slot,
            "stored": Stored(f"q{bits}g{group}", "product"),
        }
        b.step(ExpertLinearQ(x=x, w=weight, bias=bias_at, index=index, y=y, **facts))  # type: ignore[arg-type]
    else:
        packed = TILES["bf16"].pack({"values": rng.standard_normal((e, n, k)).astype(np.float32)})
        exact = TILES["bf16"].unpack(packed, (e, n, k))["values"].astype(np.float64)
        x = b.buffer(f"{name}.x", [width])
        feeds[x.name] = normal(width)
        weight = b.weight(f"{name}.w", packed, "tile_bf16", (e, n, k))
        bias_at = b.plain(f"{name}.b", bias)
        stored = Stored("bf16", "product")
        facts = {"k": k, "n": n, "experts": e, "topk": topk, "x_per_slot": per_slot, "stored": stored}
        b.step(ExpertLinear(x=x, w=weight, bias=bias_at, index=index, y=y, **facts))  # type: ignore[arg-type]

    def expect(a: Arrays) -> Arrays:
        x = dequantize(a[f"{name}.q"], a[f"{name}.s"].astype(np.float64)) if bits else a[f"{name}.x"].astype(np.float64)
        x = np.broadcast_to(x.reshape(len(x), -1, k), (len(x), topk, k))
        out = np.zeros((len(x), topk, n))
        for t, slot in np.ndindex(len(x), topk):
            chosen = a[index.name][t, slot]
            if 0 <= chosen < e:
                out[t, slot] = exact[chosen] @ x[t, slot] + bias[chosen]
        return {y.name: out}

    b.cases.append(Case(name, feeds, expect, 1e-5))


def add_changed(b: Builder, rng: np.random.Generator, fmt: str, codes: bool) -> None:
    """A product of values or codes, and the terms that adapters of two parts add to it; runs of rows share an
    adapter."""
    e, k, n, rank, ends, group = 3, 48, 53, 5, (32, 53), 16
    name = f"changed_{fmt}_{'codes' if codes else 'values'}"
    slot = b.buffer(f"{name}.slot", [1], "i32")
    y, low = b.buffer(f"{name}.y", [n]), b.buffer(f"{name}.low", [2 * rank])
    feeds: dict[str, Any] = {
        slot.name: lambda rng, rows: np.sort(rng.integers(-1, e + 1, (rows, 1)), axis=0),
        low.name: normal(2 * rank),
    }
    ups = [rng.standard_normal((e, end - begin, rank)).astype(np.float32) for begin, end in ((0, 32), (32, 53))]
    packed = [TILES[fmt].pack({"values": up}) for up in ups]
    exact_up = [TILES[fmt].unpack(p, up.shape)["values"].astype(np.float64) for p, up in zip(packed, ups, strict=True)]
    shift = [rng.standard_normal((e, up.shape[1])).astype(np.float32) for up in ups]
    change = AdapterChange(ends, rank, e, Stored(fmt, "product"))
    facts: dict[str, Any] = {
        "low": tuple(BufferOperand(low.name, "f32", 2 * rank, i * rank) for i in range(2)),
        "up": tuple(b.weight(f"{name}.up{i}", p, f"tile_{fmt}", ups[i].shape) for i, p in enumerate(packed)),
        "shift": tuple(b.plain(f"{name}.shift{i}", values) for i, values in enumerate(shift)),
        "epilogue": Epilogue(Body.parse("t0 = add a0 a1"), (Columns(0, 1), change), n),
        "slot": slot,
    }
    if codes:
        wide, exact = quantized_weight(rng, n, k, "q4", group)
        w, x = b.weight(f"{name}.w", wide, "q4", (n, k)), add_quantize(b, name, k, group, False)
        b.step(LinearQ(x=x, w=w, y=y, k=k, n=n, stored=quantized_storage("q4", group), **facts))
    else:
        wide = TILES["f32"].pack({"values": rng.standard_normal((n, k)).astype(np.float32)})
        exact = TILES["f32"].unpack(wide, (n, k))["values"].astype(np.float64)
        w, x = b.weight(f"{name}.w", wide, "tile_f32", (n, k)), b.buffer(f"{name}.x", [k])
        feeds[x.name] = normal(k)
        b.step(Linear(x=x, w=w, y=y, k=k, n=n, stored=Stored("f32", "product"), **facts))

    def expect(a: Arrays) -> Arrays:
        x = dequantize(a[f"{name}.q"], a[f"{name}.s"].astype(np.float64)) if codes else a[f"{name}.x"]
        out = x.astype(np.float64) @ exact.T
        for row, chosen in enumerate(a[slot.name][:, 0]):
            if 0 <= chosen < e:
                parts = (
                    up[chosen] @ a[low.name][row, i * rank : (i + 1) * rank].astype(np.float64) + shift[i][chosen]
                    for i, up in enumerate(exact_up)
                )
                out[row] += np.concatenate(list(parts))
        return {y.name: out}

    b.cases.append(Case(name, feeds, expect, 1e-5))


def add_norm(b: Builder, rng: np.random.Generator, kind: str, d: int, groups: int, add: bool, weight: bool) -> None:
    name = f"{'add_' if add else ''}{kind}_{groups}x{d}{'' if weight else '_plain'}"
    total, eps = d * groups, 1e-5
    w, bias = rng.standard_normal((2, d)).astype(np.float32)
    x, x_stride, start = _column_slice(b, f"{name}.x", total, not add)
    y = b.buffer(f"{name}.y", [total])
    feeds: dict[str, Any] = {x.name: lambda rng, rows: (rng.standard_normal((rows, x_stride)) + 0.5).astype(np.float32)}
    fields: dict[str, Any] = {"x": x, "y": y, "d": d, "groups": groups, "eps": eps}
    if add:
        fields |= {"r": b.buffer(f"{name}.r", [total]), "sum": b.buffer(f"{name}.sum", [total])}
        feeds[f"{name}.r"] = normal(total)
    if weight:
        fields["w"] = b.plain(f"{name}.w", w)
        if kind == "layer_norm":
            fields["bias"] = b.plain(f"{name}.b", bias)
    b.step(STEPS[("add_" if add else "") + kind](**fields))

    def expect(a: Arrays) -> Arrays:
        v = a[x.name][:, start : start + total].astype(np.float64)
        out = {}
        if add:
            out[f"{name}.sum"] = v = v + a[f"{name}.r"]
        v = v.reshape(len(v), groups, d)
        if kind == "layer_norm":
            v = v - v.mean(-1, keepdims=True)
        v = v / np.sqrt((v * v).mean(-1, keepdims=True) + eps)
        if weight:
            v = v * w + (bias if kind == "layer_norm" else 0)
        return {y.name: v.reshape(-1, total), **out}

    b.cases.append(Case(name, feeds, expect))


def add_embedding(b: Builder, rng: np.random.Generator, fmt: str, n: int, source: str) -> None:
    name, table = f"embedding_{fmt}_{source}", rng.standard_normal((50, n)).astype(np.float32)
    if fmt.startswith("q"):
        packed, exact = quantized_weight(rng, 50, n, fmt, 16)
        stored = quantized_storage(fmt, 16)
    else:
        layout = next(found for found in (*ROWS.values(), *TILES.values()) if found.name == fmt)
        packed = layout.pack({"values": table})
        exact = layout.unpack(packed, (50, n))["values"].astype(np.float64)
        stored = Stored(layout.format.name, "product" if layout.tiled else "table")
    y = b.buffer(f"{name}.y", [n])
    weight = b.weight(f"{name}.w", packed, fmt, (50, n))
    b.step(Embedding(ids=InputOperand(source), table=weight, y=y, n=n, table_rows=50, stored=stored))
    b.cases.append(Case(name, {}, lambda a: {y.name: exact[np.clip(a[source], 0, 49)]}))


def add_select_rows(b: Builder, n: int, dtype: str) -> None:
    name = f"select_rows_{dtype}"
    x, y = b.buffer(f"{name}.x", [n + 3], dtype), b.buffer(f"{name}.y", [n], dtype, rows="logit_rows")
    b.columns[x.name] = (0, n)
    b.step(SelectRows(rows="logit_rows", x=x, y=y, n=n))
    feeds = {x.name: lambda rng, rows: rng.integers(-99, 99, (rows, n + 3))}
    b.cases.append(Case(name, feeds, lambda a: {y.name: a[x.name][a["logit_rows"], :n]}))
