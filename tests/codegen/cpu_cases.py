"""One case per lowered op and odd shape, each with its numpy float64 reference; attention has its own file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from icc.compiler.codegen.cpu import pack
from icc.runtime.engine.program import Operand

from cpu_harness import NONE, Builder, Case

Arrays = dict[str, np.ndarray]


def normal(*shape: int, scale: float = 1.0) -> Callable[[np.random.Generator, int], np.ndarray]:
    return lambda rng, rows: (rng.standard_normal((rows, *shape)) * scale).astype(np.float32)


def _column_slice(b: Builder, name: str, width: int, slice_: bool, rows: str = "tokens") -> tuple[Operand, int, int]:
    """A buffer of `width`, or a wider one of which columns 8.. are used: operand, row stride, first column."""
    if slice_:
        return b.buffer(name, [width + 24], rows=rows, offset=8), width + 24, 8
    return b.buffer(name, [width], rows=rows), width, 0


def add_linear(b: Builder, rng: np.random.Generator, k: int, n: int, fmt: str, extra: bool, rows: str) -> None:
    name = f"linear_{fmt}_{k}x{n}_{rows}{'_bias_residual_slice' if extra else ''}"
    w = rng.standard_normal((n, k)).astype(np.float32) / np.sqrt(k)
    packed = pack.pack_dense(w, f"tile_{fmt}")
    exact = pack.unpack_dense(packed, f"tile_{fmt}", (n, k)).astype(np.float64)
    bias = rng.standard_normal(n).astype(np.float32)
    x, x_stride, start = _column_slice(b, f"{name}.x", k, extra, rows)
    y, y_stride, y_start = _column_slice(b, f"{name}.y", n, extra, rows)
    feeds = {x.name: normal(x_stride)}
    inputs = [x, b.weight(f"{name}.w", packed, f"tile_{fmt}", (n, k)), NONE, NONE]
    params: dict[str, Any] = dict(k=k, n=n, format=fmt, x_stride=x_stride, y_stride=y_stride, rows=rows)
    params |= dict(has_bias=extra, has_residual=extra, residual_stride=n)
    if extra:
        inputs[2:] = [b.plain(f"{name}.b", bias), b.buffer(f"{name}.r", [n], rows=rows)]
        feeds[f"{name}.r"] = normal(n)
    b.step("linear", params, inputs, [y])

    def expect(a: Arrays) -> Arrays:
        out = a[y.name].astype(np.float64)
        out[:, y_start : y_start + n] = a[x.name][:, start : start + k].astype(np.float64) @ exact.T
        if extra:
            out[:, y_start : y_start + n] += bias + a[f"{name}.r"]
        return {y.name: out}

    b.cases.append(Case(name, feeds, expect))


def quantized_weight(rng: np.random.Generator, n: int, k: int, bits: int, group: int) -> tuple[np.ndarray, np.ndarray]:
    """Packed bytes and the float64 matrix they stand for, with scales from 1e-7 to 1."""
    codes = rng.integers(0, 2**bits, (n, k)).astype(np.uint8)
    zeros = rng.integers(0, 2**bits, (n, k // group)).astype(np.uint8)
    scales = (rng.uniform(0.5, 1.0, (n, k // group)) * 10.0 ** rng.integers(-1, 1)).astype(np.float32)
    if n > 8:
        scales[3] *= 1e-6
    packed = pack.pack_quantized(codes, scales, zeros, bits, group)
    got_codes, got_scales, got_zeros = pack.unpack_quantized(packed, (n, k), bits, group)
    wide = (got_codes.astype(np.float64).reshape(n, -1, group) - got_zeros[..., None]) * got_scales[..., None]
    return packed, wide.reshape(n, k)


def dequantize(q: np.ndarray, s: np.ndarray) -> np.ndarray:
    groups = s.shape[-1]
    return (q.astype(np.float64).reshape(*q.shape[:-1], groups, -1) * s[..., None]).reshape(q.shape)


def add_quantize(b: Builder, name: str, k: int, group: int, slice_: bool, scale: float = 1.0) -> list[Operand]:
    """quantize_rows of a new buffer; its outputs."""
    x, x_stride, start = _column_slice(b, f"{name}.x", k, slice_)
    outs = [
        b.buffer(f"{name}.q", [k], "i8"),
        b.buffer(f"{name}.s", [k // group]),
        b.buffer(f"{name}.sum", [k // group]),
    ]
    b.step("quantize_rows", dict(k=k, group=group, x_stride=x_stride, rows="tokens"), [x], outs)

    def expect(a: Arrays) -> Arrays:
        groups = a[x.name][:, start : start + k].reshape(len(a[x.name]), -1, group)
        peak = np.abs(groups).max(-1)
        q = np.rint(
            groups * np.where(peak > 0, np.float32(127) / np.where(peak > 0, peak, 1), 0)[..., None].astype(np.float32)
        )
        return {f"{name}.q": q.reshape(-1, k), f"{name}.s": peak / 127, f"{name}.sum": q.sum(-1)}

    b.cases.append(Case(f"quantize_{name}", {x.name: normal(x_stride, scale=scale)}, expect))
    return outs


def add_linear_q(b: Builder, rng: np.random.Generator, k: int, n: int, bits: int, group: int, extra: bool) -> None:
    name = f"linear_q{bits}_g{group}_{k}x{n}{'_bias_residual_slice' if extra else ''}"
    packed, exact = quantized_weight(rng, n, k, bits, group)
    q, s, sums = add_quantize(b, name, k, group, extra)
    bias = rng.standard_normal(n).astype(np.float32)
    y, y_stride, y_start = _column_slice(b, f"{name}.y", n, extra)
    inputs = [q, s, sums, b.weight(f"{name}.w", packed, f"q{bits}", (n, k)), NONE, NONE]
    feeds = {}
    if extra:
        inputs[4:] = [b.plain(f"{name}.b", bias), b.buffer(f"{name}.r", [n + 3])]
        feeds[f"{name}.r"] = normal(n + 3)
    params = dict(
        k=k, n=n, bits=bits, group=group, y_stride=y_stride, rows="tokens", has_bias=extra, has_residual=extra
    )
    b.step("linear_q", params | dict(residual_stride=n + 3), inputs, [y])

    def expect(a: Arrays) -> Arrays:
        out = a[y.name].astype(np.float64)
        out[:, y_start : y_start + n] = dequantize(a[q.name], a[s.name].astype(np.float64)) @ exact.T
        if extra:
            out[:, y_start : y_start + n] += bias + a[f"{name}.r"][:, :n]
        return {y.name: out}

    b.cases.append(Case(name, feeds, expect, 1e-5))


def add_experts(b: Builder, rng: np.random.Generator, bits: int, per_slot: bool) -> None:
    e, topk, k, n, group = 5, 3, 48, 21, 16
    name = f"experts_{'q' + str(bits) if bits else 'bf16'}{'_per_slot' if per_slot else ''}"
    bias = rng.standard_normal((e, n)).astype(np.float32)
    index = b.buffer(f"{name}.index", [topk], "i32")
    y = b.buffer(f"{name}.y", [topk, n])
    width = k * topk if per_slot else k
    feeds: dict[str, Any] = {index.name: lambda rng, rows: rng.integers(-1, e + 1, (rows, topk))}
    if bits:
        parts = [quantized_weight(rng, n, k, bits, group) for _ in range(e)]
        exact = np.stack([p[1] for p in parts])
        weight = b.weight(f"{name}.w", np.concatenate([p[0] for p in parts]), f"q{bits}", (e, n, k))
        q, s, sums = add_quantize(b, name, width, group, False)
        params = dict(k=k, n=n, experts=e, topk=topk, x_per_slot=per_slot, bits=bits, group=group, has_bias=True)
        b.step("expert_linear_q", params, [q, s, sums, weight, b.plain(f"{name}.b", bias), index], [y])
    else:
        packed = pack.pack_dense(rng.standard_normal((e, n, k)).astype(np.float32), "tile_bf16")
        exact = pack.unpack_dense(packed, "tile_bf16", (e, n, k)).astype(np.float64)
        x = b.buffer(f"{name}.x", [width])
        feeds[x.name] = normal(width)
        params = dict(k=k, n=n, experts=e, topk=topk, x_per_slot=per_slot, format="bf16", has_bias=True, x_stride=width)
        weight = b.weight(f"{name}.w", packed, "tile_bf16", (e, n, k))
        b.step("expert_linear", params, [x, weight, b.plain(f"{name}.b", bias), index], [y])

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


def add_norm(b: Builder, rng: np.random.Generator, kind: str, d: int, groups: int, add: bool, weight: bool) -> None:
    name = f"{'add_' if add else ''}{kind}_{groups}x{d}{'' if weight else '_plain'}"
    total, eps = d * groups, 1e-5
    w, bias = rng.standard_normal((2, d)).astype(np.float32)
    x, x_stride, start = _column_slice(b, f"{name}.x", total, not add)
    y = b.buffer(f"{name}.y", [total])
    feeds = {x.name: lambda rng, rows: (rng.standard_normal((rows, x_stride)) + 0.5).astype(np.float32)}
    inputs, outputs = [x], [y]
    params: dict[str, Any] = dict(d=d, eps=eps, x_stride=x_stride, y_stride=total, has_weight=weight)
    if add:
        inputs.append(b.buffer(f"{name}.r", [total]))
        outputs.append(b.buffer(f"{name}.sum", [total]))
        feeds[f"{name}.r"] = normal(total)
    if groups > 1:
        params["groups"] = groups
    inputs.append(b.plain(f"{name}.w", w) if weight else NONE)
    if kind == "layer_norm":
        inputs.append(b.plain(f"{name}.b", bias) if weight else NONE)
        params["has_bias"] = weight
    b.step(("add_" if add else "") + kind, params, inputs, outputs)

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
        packed, exact = quantized_weight(rng, 50, n, int(fmt[1:]), 16)
    else:
        packed = pack.pack_dense(table, fmt)
        exact = pack.unpack_dense(packed, fmt, (50, n)).astype(np.float64)
    y = b.buffer(f"{name}.y", [n])
    weight = b.weight(f"{name}.w", packed, fmt, (50, n))
    b.step("embedding", dict(n=n, table_rows=50, format=fmt, group=16), [Operand("input", source), weight], [y])
    b.cases.append(Case(name, {}, lambda a: {y.name: exact[np.clip(a[source], 0, 49)]}))


def add_rowwise(b: Builder, op: str, params: dict[str, Any], operands: list[tuple[list[int], str, Any]],
                outputs: list[tuple[list[int], str]], expect: Callable[..., list[np.ndarray]], label: str = "") -> None:  # fmt: skip
    """A step whose operands are all contiguous buffers of (shape, dtype, feed)."""
    name = f"{op}{label}"
    ins = [b.buffer(f"{name}.in{i}", shape, dtype) for i, (shape, dtype, _) in enumerate(operands)]
    outs = [b.buffer(f"{name}.out{i}", shape, dtype) for i, (shape, dtype) in enumerate(outputs)]
    b.step(op, params, ins, outs)
    feeds = {o.name: feed for o, (_, _, feed) in zip(ins, operands, strict=True)}
    b.cases.append(
        Case(name, feeds, lambda a: dict(zip((o.name for o in outs), expect(*(a[o.name] for o in ins)), strict=True)))
    )


def _softmax(x: np.ndarray) -> list[np.ndarray]:
    e = np.exp(x.astype(np.float64) - x.max(-1, keepdims=True))
    return [e / e.sum(-1, keepdims=True)]


def _topk(x: np.ndarray, k: int, largest: bool) -> list[np.ndarray]:
    order = np.argsort(-x if largest else x, axis=-1, kind="stable")[..., :k]
    return [np.take_along_axis(x, order, -1), order]


def _scatter(x: np.ndarray, index: np.ndarray, src: np.ndarray | float, add: bool) -> list[np.ndarray]:
    out = x.astype(np.float64)
    if add:
        for at in np.ndindex(index.shape):
            out[(*at[:-1], index[at])] += np.broadcast_to(src, index.shape)[at]
    else:
        np.put_along_axis(out, index, src, -1)
    return [out]


def add_all_rowwise(b: Builder) -> None:
    distinct = lambda rng, rows: np.stack([[rng.permutation(7)[:4] for _ in range(2)] for _ in range(rows)])  # noqa: E731
    ties = lambda rng, rows: rng.integers(0, 4, (rows, 2, 33)).astype(np.float32)  # noqa: E731
    x = normal(2, 7, 3)
    references: dict[str, Callable[..., np.ndarray]] = {
        "sum": np.sum, "mean": np.mean, "amax": np.max, "amin": np.min, "prod": np.prod, "argmax": np.argmax,
    }  # fmt: skip
    for op, fn in references.items():
        kind = "i32" if op == "argmax" else "f32"
        for inner, shape in ((3, [2, 7, 3]), (1, [2, 21])):
            out = [2, 3] if inner == 3 else [2]
            axis = 2
            add_rowwise(
                b, "reduce", dict(op=op, outer=2, n=7 if inner == 3 else 21, inner=inner, dtype="f32"),
                [(shape, "f32", x if inner == 3 else normal(2, 21))], [(out, kind)],
                lambda v, fn=fn, axis=axis: [fn(v.astype(np.float64), axis=axis)], f"_{op}_{inner}",
            )  # fmt: skip
    ints = lambda rng, rows: rng.integers(-9, 9, (rows, 1, 5))  # noqa: E731
    add_rowwise(b, "reduce", dict(op="sum", outer=1, n=5, inner=1, dtype="i32"), [([1, 5], "i32", ints)], [([1], "i32")],
                lambda v: [v.sum(-1)], "_i32")  # fmt: skip
    for n in (1, 17, 64):
        add_rowwise(b, "softmax", dict(outer=2, n=n), [([2, n], "f32", normal(2, n, scale=5))], [([2, n], "f32")], _softmax,
                    f"_{n}")  # fmt: skip
    for k, largest in ((1, True), (5, True), (33, False)):
        add_rowwise(b, "topk", dict(outer=2, n=33, k=k, largest=largest), [([2, 33], "f32", ties)],
                    [([2, k], "f32"), ([2, k], "i32")], lambda v, k=k, m=largest: _topk(v, k, m), f"_{k}_{largest}")  # fmt: skip
    add_rowwise(b, "gather", dict(outer=2, n=7, m=4), [([2, 7], "f32", normal(2, 7)), ([2, 4], "i32", distinct)],
                [([2, 4], "f32")], lambda v, i: [np.take_along_axis(v, i, -1)])  # fmt: skip
    two = [([2, 7], "f32", normal(2, 7)), ([2, 4], "i32", distinct)]
    params = dict(outer=2, n=7, m=4)
    add_rowwise(b, "scatter", params | dict(reduce="none", src="value", value=-np.inf), two, [([2, 7], "f32")],
                lambda v, i: _scatter(v, i, -np.inf, False), "_value")  # fmt: skip
    for reduce in ("none", "add"):
        add_rowwise(b, "scatter", params | dict(reduce=reduce, src="tensor", value=0.0),
                    [*two, ([2, 4], "f32", normal(2, 4))], [([2, 7], "f32")],
                    lambda v, i, s, add=reduce == "add": _scatter(v, i, s, add), f"_{reduce}")  # fmt: skip
    add_rowwise(b, "cumsum", dict(outer=2, n=9, dtype="f32"), [([2, 9], "f32", normal(2, 9))], [([2, 9], "f32")],
                lambda v: [np.cumsum(v.astype(np.float64), -1)])  # fmt: skip
    add_rowwise(b, "cumsum", dict(outer=1, n=5, dtype="i32"), [([1, 5], "i32", ints)], [([1, 5], "i32")],
                lambda v: [np.cumsum(v, -1)], "_i32")  # fmt: skip
    for transposed in (False, True):
        shape = [2, 17, 9] if transposed else [2, 9, 17]
        add_rowwise(b, "bmm", dict(batch=2, m=3, k=9, n=17, b_transposed=transposed),
                    [([2, 3, 9], "f32", normal(2, 3, 9)), (shape, "f32", normal(*shape))], [([2, 3, 17], "f32")],
                    lambda u, v, t=transposed: [u.astype(np.float64) @ (np.swapaxes(v, -1, -2) if t else v)],
                    f"_{transposed}")  # fmt: skip
