"""Lowering of the dialect's ops: one function each, from node to steps."""

from __future__ import annotations

from math import isfinite, prod
from typing import Any

from torch import fx

from ...runtime.format.kv import KVLayer
from ...runtime.format.program import Operand
from ..graph.graph import type_of
from ..ops import OPS
from ..ops.body import Body
from .builder import ABSENT
from .context import Lowerer
from .placed import Placed

_ADD = Body.parse("t0 = add a0 a1")
# the two halves of a rotated vector: x cos - other sin and x cos + other sin
_TURNS = [Body.parse(f"t0 = mul a0 a2; t1 = mul a1 a3; t2 = {sign} t0 t1") for sign in ("sub", "add")]


def embedding(low: Lowerer, node: fx.Node) -> Placed:
    """Row gather from a table that lies as the linear layers want it, if one shares it, else row-major."""
    ids = low.placed(node.args[0])
    table, params = low.table(node.args[1])
    out = low.new(node)
    if ids.space == "buffer":
        ids = low.dense(ids)
    low.step("embedding", {**params, "n": out.size, "y_stride": out.row_stride}, [ids.operand, table], [out], node)
    return out


def select_rows(low: Lowerer, node: fx.Node) -> Placed:
    """The rows whose logits are wanted."""
    x = low.dense(low.placed(node.args[0]))
    out = low.new(node)
    params = {"n": x.size, "x_stride": x.row_stride, "y_stride": out.row_stride, "dtype": x.dtype}
    low.step("select_rows", params, [x.operand], [out], node, rows="tokens")
    return out


def linear(low: Lowerer, node: fx.Node) -> Placed:
    """A product per row; several vectors per row share one weight through bmm."""
    x = low.dense(low.placed(node.args[0]))
    n, k = type_of(node.args[1]).shape  # type: ignore[arg-type]
    if x.size != k:
        return _linear_many(low, node, x, n, k)
    out = low.new(node)
    has_bias = node.args[2] is not None
    bias = low.vector(node.args[2]) if has_bias else ABSENT
    params: dict[str, Any] = {"k": k, "n": n, "y_stride": out.row_stride, "has_bias": has_bias}
    weight = low.matrix(node.args[1])
    op, facts, rows = low.product(x, k, weight)
    if "split" in facts:
        facts["screened"] = out.space == "output"
    residual = [] if low.options.profile.epilogues else [ABSENT]
    low.step(op, {**params, **facts}, [*rows, weight.operand, bias, *residual], [out], node)
    return out


def _linear_many(low: Lowerer, node: fx.Node, x: Placed, n: int, k: int) -> Placed:
    out = low.new(node)
    weight = low.plain(node.args[1])
    params = {
        "batch": 1, "m": x.size // k, "k": k, "n": n, "b_transposed": True,
        "a_row_stride": x.row_stride, "b_row_stride": 0, "c_row_stride": out.row_stride,
    }  # fmt: skip
    low.step("bmm", params, [x.operand, weight], [out], node)
    if node.args[2] is None:
        return out
    total = low.new(node)
    low.elementwise(_ADD, [out, low.constant(node.args[2])], total, node)
    return total


def expert_linear(low: Lowerer, node: fx.Node) -> Placed:
    """Each token's product with the experts it was sent to."""
    x = low.dense(low.placed(node.args[0]))
    index = low.dense(low.placed(node.args[3]))
    experts, n, k = type_of(node.args[1]).shape  # type: ignore[arg-type]
    out = low.new(node)
    has_bias = node.args[2] is not None
    bias = low.vector(node.args[2]) if has_bias else ABSENT
    weight = low.matrix(node.args[1])
    per_slot = len(x.shape) == 2
    params: dict[str, Any] = {
        "k": k, "n": n, "experts": experts, "topk": index.size, "x_per_slot": per_slot, "has_bias": has_bias,
    }  # fmt: skip
    op, facts, rows = low.product(x, x.size, weight)
    low.step(f"expert_{op}", {**params, **facts}, [*rows, weight.operand, bias, index.operand], [out], node)
    return out


def bmm(low: Lowerer, node: fx.Node) -> Placed:
    """Per-token product."""
    a, b = (low.dense(low.placed(n)) for n in node.args[:2])
    batch = prod(a.shape[:-2])
    m, k = a.shape[-2:]
    if prod(b.shape[:-2]) != batch:
        b = low.dense(b.expand((*a.shape[:-2], *b.shape[-2:])))
    out = low.new(node)
    params = {
        "batch": batch, "m": m, "k": k, "n": b.shape[-1],
        "a_row_stride": a.row_stride, "b_row_stride": b.row_stride, "c_row_stride": out.row_stride,
    }  # fmt: skip
    low.step("bmm", params, [a.operand, b.operand], [out], node)
    return out


def norm(low: Lowerer, node: fx.Node) -> Placed:
    """rms_norm and layer_norm; leading axes are groups of one row."""
    name = low.op_name(node)
    x = low.dense(low.placed(node.args[0]))
    vectors = [low.vector(a) if a is not None else ABSENT for a in node.args[1:-1]]
    out = low.new(node)
    d = x.shape[-1]
    params = {"d": d, "groups": x.size // d, "eps": float(node.args[-1]), "x_stride": x.row_stride}  # type: ignore[arg-type]
    params |= {"y_stride": out.row_stride, "has_weight": node.args[1] is not None}
    if name == "layer_norm":
        params["has_bias"] = node.args[2] is not None
    low.step(name, params, [x.operand, *vectors], [out], node)
    return out


def add_norm(low: Lowerer, node: fx.Node) -> tuple[Placed, Placed]:
    """The residual addition and the norm after it."""
    name = low.op_name(node)
    x, r = (low.dense(low.placed(n)) for n in node.args[:2])
    vectors = [low.vector(a) if a is not None else ABSENT for a in node.args[2:-1]]
    y, total = low.new(node, 0), low.new(node, 1)
    d = x.shape[-1]
    params = {
        "d": d, "groups": x.size // d, "eps": float(node.args[-1]), "has_weight": node.args[2] is not None,  # type: ignore[arg-type]
        "x_stride": x.row_stride, "r_stride": r.row_stride,
        "y_stride": y.row_stride, "sum_stride": total.row_stride,
    }  # fmt: skip
    if name == "add_layer_norm":
        params["has_bias"] = node.args[3] is not None
    low.step(name, params, [x.operand, r.operand, *vectors], [y, total], node)
    return y, total


def pointwise(low: Lowerer, node: fx.Node) -> Placed:
    """A generated chain."""
    inputs = [low.placed(n) if n.op != "get_attr" else low.constant(n) for n in node.args[0]]  # type: ignore[union-attr]
    out = low.new(node)
    low.elementwise(Body.parse(str(node.args[1])), inputs, out, node)
    return out


def reduce(low: Lowerer, node: fx.Node) -> Placed:
    """One axis reduced away."""
    x = low.dense(low.placed(node.args[0]))
    axis: int = node.args[2] - 1  # type: ignore[operator, assignment]
    out = low.new(node)
    params = {
        "op": node.args[1], "outer": prod(x.shape[:axis]), "n": x.shape[axis], "inner": prod(x.shape[axis + 1 :]),
        "dtype": x.dtype, "x_stride": x.row_stride, "y_stride": out.row_stride,
    }  # fmt: skip
    low.step("reduce", params, [x.operand], [out], node)
    return out


def along_last(low: Lowerer, node: fx.Node) -> Placed:
    """softmax and cumsum."""
    x = low.dense(low.placed(node.args[0]))
    out = low.new(node)
    n = x.shape[-1]
    params = {"outer": x.size // n, "n": n, "dtype": x.dtype, "x_stride": x.row_stride, "y_stride": out.row_stride}
    low.step(low.op_name(node), params, [x.operand], [out], node)
    return out


def topk(low: Lowerer, node: fx.Node) -> tuple[Placed, Placed]:
    """Values and indices."""
    x = low.dense(low.placed(node.args[0]))
    values, indices = low.new(node, 0), low.new(node, 1)
    n = x.shape[-1]
    params = {
        "outer": x.size // n, "n": n, "k": node.args[1], "largest": node.args[2], "dtype": x.dtype,
        "x_stride": x.row_stride, "values_stride": values.row_stride, "indices_stride": indices.row_stride,
    }  # fmt: skip
    low.step("topk", params, [x.operand], [values, indices], node)
    return values, indices


def gather(low: Lowerer, node: fx.Node) -> Placed:
    """Indexed read along the last axis."""
    x, index = (low.dense(low.placed(n)) for n in node.args[:2])
    out = low.new(node)
    params = {
        "outer": x.size // x.shape[-1], "n": x.shape[-1], "m": index.shape[-1], "dtype": x.dtype,
        "x_stride": x.row_stride, "index_stride": index.row_stride, "y_stride": out.row_stride,
    }  # fmt: skip
    low.step("gather", params, [x.operand, index.operand], [out], node)
    return out


def scatter(low: Lowerer, node: fx.Node) -> Placed:
    """Indexed write along the last axis."""
    x, index = (low.dense(low.placed(n)) for n in node.args[:2])
    source = None if node.args[2] is None else low.dense(low.placed(node.args[2]))
    out = low.new(node)
    value = float(node.args[3])  # type: ignore[arg-type]
    params: dict[str, Any] = {
        "outer": x.size // x.shape[-1], "n": x.shape[-1], "m": index.shape[-1], "dtype": x.dtype,
        "reduce": "add" if node.args[4] else "none", "src": "tensor" if source else "value",
        "value": value if isfinite(value) else str(value),  # JSON has no infinities
        "x_stride": x.row_stride, "index_stride": index.row_stride, "y_stride": out.row_stride,
    }  # fmt: skip
    if source:
        params["src_stride"] = source.row_stride
    operands = [x.operand, index.operand, source.operand if source else ABSENT]
    low.step("scatter", params, operands, [out], node)
    return out


def rope(low: Lowerer, node: fx.Node) -> Placed:
    """Rotary embedding outside attention, as three elementwise kernels: rare, so not a kernel of its own."""
    x = low.placed(node.args[0])
    cos, sin = (low.placed(n) for n in node.args[1:3])
    dim = x.shape[-1]
    r = cos.shape[-1]
    out = low.new(node)
    rows = [t.view((1, t.shape[-1])) for t in (cos, sin)]
    half = node.args[3] == "half"
    pieces = [(0, r // 2, r // 2, r, 1), (r // 2, r, 0, r // 2, 1)] if half else [(0, r, 1, r, 2), (1, r, 0, r, 2)]
    for turn, (start, end, other, other_end, step) in zip(_TURNS, pieces, strict=True):
        parts = [x.slice(1, start, end, step), x.slice(1, other, other_end, step)]
        tables = [t.slice(1, start, end, step) for t in rows if t is not None]
        low.elementwise(turn, [*parts, *tables], out.slice(1, start, end, step), node)
    if r < dim:
        low.copy(x.slice(1, r, dim, 1), out.slice(1, r, dim, 1), node)
    return out


def paged_attention(low: Lowerer, node: fx.Node) -> Placed:
    """Two steps: write rotated K and V into the pages, then attend."""
    q, k, v = (low.dense(low.placed(n)) for n in node.args[:3])
    q_cos, q_sin, k_cos, k_sin, sinks, alibi = (low.plain(a) if a is not None else ABSENT for a in node.args[4:10])
    layer, scale, window, chunk, softcap, style = node.args[10:]
    layer = low.kv_layer(int(layer))  # type: ignore[call-overload]
    low.cache(layer, KVLayer(k.shape[0], k.shape[1], v.shape[1]), int(window))  # type: ignore[call-overload]
    shared = {
        "kv_heads": k.shape[0], "key_dim": k.shape[1], "value_dim": v.shape[1],
        "dtype": low.options.kv_dtype, "block_size": low.options.block_size, "rope_style": style,
    }  # fmt: skip

    def tables(cos: Any) -> dict[str, int]:
        if cos is None:
            return {"rotary_dim": 0, "table_rows": 0}
        rows, width = type_of(cos).shape
        return {"rotary_dim": width, "table_rows": rows}

    write = {**shared, **tables(node.args[6]), "k_stride": k.row_stride, "v_stride": v.row_stride}
    operands: list[Operand] = [k.operand, v.operand, k_cos, k_sin]
    low.step("kv_write", write, operands, [], node, layer=layer, rows="tokens")
    out = low.new(node)
    attend = {
        **shared, **tables(node.args[4]), "q_heads": q.shape[0], "q_stride": q.row_stride, "o_stride": out.row_stride,
        "scale": float(scale), "window": window, "chunk": chunk, "softcap": float(softcap),  # type: ignore[arg-type]
        "has_sinks": node.args[8] is not None, "has_alibi": node.args[9] is not None,
    }  # fmt: skip
    low.step("attention", attend, [q.operand, q_cos, q_sin, sinks, alibi], [out], node, layer=layer)
    return out


_FUNCTIONS = {
    "embedding": embedding, "select_rows": select_rows, "linear": linear, "expert_linear": expert_linear,
    "bmm": bmm, "rms_norm": norm, "layer_norm": norm, "add_rms_norm": add_norm, "add_layer_norm": add_norm,
    "pointwise": pointwise, "reduce": reduce, "softmax": along_last, "cumsum": along_last, "topk": topk,
    "gather": gather, "scatter": scatter, "rope": rope, "paged_attention": paged_attention,
}  # fmt: skip
COMPUTE_LOWERING = {OPS[name].overload: fn for name, fn in _FUNCTIONS.items()}
