"""Cases of the kernels over one axis of each row, with their numpy references."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from cpu_cases import normal
from cpu_harness import Builder, Case
from icc.compiler.program.steps.base import STEPS, operand_fields


def add_rowwise(
    b: Builder,
    op: str,
    params: dict[str, Any],
    operands: list[tuple[list[int], str, Any]],
    outputs: list[tuple[list[int], str]],
    expect: Callable[..., list[np.ndarray]],
    label: str = "",
) -> None:
    """A step whose operands are all contiguous buffers of (shape, dtype, feed)."""
    name = f"{op}{label}"
    ins = [b.buffer(f"{name}.in{i}", shape, dtype) for i, (shape, dtype, _) in enumerate(operands)]
    outs = [b.buffer(f"{name}.out{i}", shape, dtype) for i, (shape, dtype) in enumerate(outputs)]
    cls = STEPS[op]
    names = operand_fields(cls)
    fields = dict(zip(names, (*ins, *(None for _ in range(len(names) - len(ins) - len(outs))), *outs), strict=True))
    b.step(cls(**fields, **params))
    feeds = {o.name: feed for o, (_, _, feed) in zip(ins, operands, strict=True)}
    b.cases.append(
        Case(name, feeds, lambda a: dict(zip((o.name for o in outs), expect(*(a[o.name] for o in ins)), strict=True)))
    )


def _softmax(x: np.ndarray) -> list[np.ndarray]:
    e = np.exp(x.astype(np.float64) - x.max(-1, keepdims=True))
    return [e / e.sum(-1, keepdims=True)]


def sylvester(n: int) -> np.ndarray:
    """The orthonormal Hadamard matrix whose element (i, j) has the sign of the parity of i & j."""
    i = np.arange(n)
    parity = np.bitwise_count(i[:, None] & i[None, :]) % 2
    return (1 - 2.0 * parity) / np.sqrt(n)


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


def distinct(rng: np.random.Generator, rows: int) -> np.ndarray:
    """Four different columns of seven, twice per row."""
    return np.stack([[rng.permutation(7)[:4] for _ in range(2)] for _ in range(rows)])


def ties(rng: np.random.Generator, rows: int) -> np.ndarray:
    """Few different values, so that many are equal."""
    return rng.integers(0, 4, (rows, 2, 33)).astype(np.float32)


def ints(rng: np.random.Generator, rows: int) -> np.ndarray:
    return rng.integers(-9, 9, (rows, 1, 5))


def add_all_rowwise(b: Builder) -> None:
    x = normal(2, 7, 3)
    references: dict[str, Callable[..., np.ndarray]] = {
        "sum": np.sum,
        "mean": np.mean,
        "amax": np.max,
        "amin": np.min,
        "prod": np.prod,
        "argmax": np.argmax,
    }
    for op, fn in references.items():
        kind = "i32" if op == "argmax" else "f32"
        for inner, shape in ((3, [2, 7, 3]), (1, [2, 21])):
            out = [2, 3] if inner == 3 else [2]
            axis = 2
            add_rowwise(
                b,
                "reduce",
                {"reduction": op, "outer": 2, "n": 7 if inner == 3 else 21, "inner": inner},
                [(shape, "f32", x if inner == 3 else normal(2, 21))],
                [(out, kind)],
                lambda v, fn=fn, axis=axis: [fn(v.astype(np.float64), axis=axis)],
                f"_{op}_{inner}",
            )
    add_rowwise(
        b,
        "reduce",
        {"reduction": "sum", "outer": 1, "n": 5, "inner": 1},
        [([1, 5], "i32", ints)],
        [([1], "i32")],
        lambda v: [v.sum(-1)],
        "_i32",
    )
    for n in (1, 17, 64):
        add_rowwise(
            b,
            "softmax",
            {"outer": 2, "n": n},
            [([2, n], "f32", normal(2, n, scale=5))],
            [([2, n], "f32")],
            _softmax,
            f"_{n}",
        )
    for n in (16, 32, 512):
        add_rowwise(
            b,
            "hadamard",
            {"outer": 3, "n": n},
            [([3, n], "f32", normal(3, n))],
            [([3, n], "f32")],
            lambda v: [v.astype(np.float64) @ sylvester(v.shape[-1])],
            f"_{n}",
        )
    for k, largest in ((1, True), (5, True), (33, False)):
        add_rowwise(
            b,
            "topk",
            {"outer": 2, "n": 33, "k": k, "largest": largest},
            [([2, 33], "f32", ties)],
            [([2, k], "f32"), ([2, k], "i32")],
            lambda v, k=k, m=largest: _topk(v, k, m),
            f"_{k}_{largest}",
        )
    add_rowwise(
        b,
        "gather",
        {"outer": 2, "n": 7, "m": 4},
        [([2, 7], "f32", normal(2, 7)), ([2, 4], "i32", distinct)],
        [([2, 4], "f32")],
        lambda v, i: [np.take_along_axis(v, i, -1)],
    )
    two = [([2, 7], "f32", normal(2, 7)), ([2, 4], "i32", distinct)]
    params = {"outer": 2, "n": 7, "m": 4}
    add_rowwise(
        b,
        "scatter",
        params | {"reduce": "none", "value": "-inf"},
        two,
        [([2, 7], "f32")],
        lambda v, i: _scatter(v, i, -np.inf, False),
        "_value",
    )
    for reduce in ("none", "add"):
        add_rowwise(
            b,
            "scatter",
            params | {"reduce": reduce},
            [*two, ([2, 4], "f32", normal(2, 4))],
            [([2, 7], "f32")],
            lambda v, i, s, add=reduce == "add": _scatter(v, i, s, add),
            f"_{reduce}",
        )
    add_rowwise(
        b,
        "cumsum",
        {"outer": 2, "n": 9},
        [([2, 9], "f32", normal(2, 9))],
        [([2, 9], "f32")],
        lambda v: [np.cumsum(v.astype(np.float64), -1)],
    )
    add_rowwise(
        b,
        "cumsum",
        {"outer": 1, "n": 5},
        [([1, 5], "i32", ints)],
        [([1, 5], "i32")],
        lambda v: [np.cumsum(v, -1)],
        "_i32",
    )
    for transposed in (False, True):
        shape = [2, 17, 9] if transposed else [2, 9, 17]
        add_rowwise(
            b,
            "bmm",
            {"batch": 2, "m": 3, "k": 9, "n": 17, "b_transposed": transposed},
            [([2, 3, 9], "f32", normal(2, 3, 9)), (shape, "f32", normal(*shape))],
            [([2, 3, 17], "f32")],
            lambda u, v, t=transposed: [u.astype(np.float64) @ (np.swapaxes(v, -1, -2) if t else v)],
            f"_{transposed}",
        )
