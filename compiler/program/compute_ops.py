"""Lowering of the dialect's ops: one function each, from node to steps."""

from __future__ import annotations

from math import isfinite, prod
from typing import Any

from torch import fx

from ...runtime.format.kv import KVLayer
from ...runtime.format.program import LOGITS
from ..eviction import ALL, read_eviction
from ..graph.graph import type_of
from ..ops import OPS
from ..ops.body import Body
from .context import WITHIN_STEP, Lowerer, row_kind
from .placed import Placed
from .steps.attention import Attention, KVSpec, KvWrite, NewKeys, Rotary
from .steps.embedding import Embedding, SelectRows
from .steps.linear import ExpertLinear, ExpertLinearQ, Linear, LinearQ
from .steps.norm import AddLayerNorm, AddRmsNorm, LayerNorm, RmsNorm
from .steps.rowwise import Bmm, Cumsum, Gather, Hadamard, Reduce, Scatter, Softmax, Topk

MIXED = (
    "i4",
    "i2",
)  # caches whose vectors are mixed: where a value ends with MIXED_DIMS, keys may begin with it
MIXED_DIMS = 64
_ADD = Body.parse("t0 = add a0 a1")
# the two halves of a rotated vector: x cos - other sin and x cos + other sin
_TURNS = [Body.parse(f"t0 = mul a0 a2; t1 = mul a1 a3; t2 = {sign} t0 t1") for sign in ("sub", "add")]


def embedding(low: Lowerer, node: fx.Node) -> Placed:
    """Row gather from a table that lies as the linear layers want it, if one shares it, else row-major."""
    ids = low.placed(node.args[0])
    table = low.table(node.args[1])
    out = low.new(node)
    if ids.space == "buffer":
        ids = low.dense(ids)
    step = Embedding(
        rows=row_kind(out), ids=ids.operand, table=table.operand, y=out.operand, n=out.size,
        table_rows=type_of(node.args[1]).shape[0], stored=table.stored,  # type: ignore[arg-type]
    )  # fmt: skip
    low.emit(step, node)
    return out


def select_rows(low: Lowerer, node: fx.Node) -> Placed:
    """The rows whose logits are wanted."""
    x = low.dense(low.placed(node.args[0]))
    out = low.new(node)
    low.emit(SelectRows(rows=row_kind(out), x=x.operand, y=out.operand, n=x.size), node)
    return out


def linear(low: Lowerer, node: fx.Node) -> Placed:
    """A product per row; several vectors per row share one weight through bmm."""
    x = low.dense(low.placed(node.args[0]))
    n, k = type_of(node.args[1]).shape  # type: ignore[arg-type]
    if x.size != k:
        return _linear_many(low, node, x, n, k)
    out = low.new(node)
    bias = low.vector(node.args[2])
    weight = low.matrix(node.args[1])
    step = (LinearQ if weight.layout.coded else Linear)(
        rows=row_kind(out), x=low.product_rows(x, k, weight), w=weight.operand, bias=bias, y=out.operand, k=k, n=n,
        stored=weight.stored, screened=weight.layout.screens and out.name == LOGITS,
    )  # fmt: skip
    low.emit(step, node)
    return out


def _linear_many(low: Lowerer, node: fx.Node, x: Placed, n: int, k: int) -> Placed:
    out = low.new(node)
    weight = low.plain(node.args[1])
    step = Bmm(
        rows=row_kind(out), a=x.operand, b=weight, c=out.operand, batch=1, m=x.size // k, k=k, n=n, b_transposed=True
    )
    low.emit(step, node)
    if node.args[2] is None:
        return out
    total = low.new(node)
    low.elementwise(_ADD, [out, low.constant(node.args[2])], total, node)
    return total


def expert_linear(low: Lowerer, node: fx.Node) -> Placed:
    """Each token's product with the experts it was sent to."""
    x = low.dense(low.placed(node.args[0]))
    index = None if node.args[3] is None else low.dense(low.placed(node.args[3]))
    experts, n, k = type_of(node.args[1]).shape  # type: ignore[arg-type]
    out = low.new(node)
    bias = low.vector(node.args[2])
    weight = low.matrix(node.args[1])
    step = (ExpertLinearQ if weight.layout.coded else ExpertLinear)(
        rows=row_kind(out), x=low.product_rows(x, x.size, weight), w=weight.operand, bias=bias,
        index=index and index.operand, y=out.operand, k=k, n=n, stored=weight.stored, experts=experts,
        topk=experts if index is None else index.size, x_per_slot=len(x.shape) == 2,
    )  # fmt: skip
    low.emit(step, node)
    return out


def bmm(low: Lowerer, node: fx.Node) -> Placed:
    """Per-token product."""
    a, b = (low.dense(low.placed(n)) for n in node.args[:2])
    batch = prod(a.shape[:-2])
    m, k = a.shape[-2:]
    if prod(b.shape[:-2]) != batch:
        b = low.dense(b.expand((*a.shape[:-2], *b.shape[-2:])))
    out = low.new(node)
    step = Bmm(rows=row_kind(out), a=a.operand, b=b.operand, c=out.operand, batch=batch, m=m, k=k, n=b.shape[-1])
    low.emit(step, node)
    return out


def norm(low: Lowerer, node: fx.Node) -> Placed:
    """rms_norm and layer_norm; leading axes are groups of one row."""
    x = low.dense(low.placed(node.args[0]))
    vectors = [low.vector(a) for a in node.args[1:-1]]
    out = low.new(node)
    kind, facts = row_kind(out), _norm_facts(x, node)
    if len(vectors) == 1:
        step = RmsNorm(rows=kind, x=x.operand, w=vectors[0], y=out.operand, **facts)
    else:
        step = LayerNorm(rows=kind, x=x.operand, w=vectors[0], bias=vectors[1], y=out.operand, **facts)
    low.emit(step, node)
    return out


def add_norm(low: Lowerer, node: fx.Node) -> tuple[Placed, Placed]:
    """The residual addition and the norm after it."""
    x, r = (low.dense(low.placed(n)) for n in node.args[:2])
    vectors = [low.vector(a) for a in node.args[2:-1]]
    y, total = low.new(node, 0), low.new(node, 1)
    facts = _norm_facts(x, node) | {"rows": row_kind(y), "y": y.operand, "sum": total.operand}
    if len(vectors) == 1:
        step = AddRmsNorm(x=x.operand, r=r.operand, w=vectors[0], **facts)
    else:
        step = AddLayerNorm(x=x.operand, r=r.operand, w=vectors[0], bias=vectors[1], **facts)
    low.emit(step, node)
    return y, total


def _norm_facts(x: Placed, node: fx.Node) -> dict[str, Any]:
    d = x.shape[-1]
    return {"d": d, "groups": x.size // d, "eps": float(node.args[-1])}  # type: ignore[arg-type]


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
    step = Reduce(
        rows=row_kind(out), x=x.operand, y=out.operand, reduction=node.args[1],  # type: ignore[arg-type]
        outer=prod(x.shape[:axis]), n=x.shape[axis], inner=prod(x.shape[axis + 1 :]),
    )  # fmt: skip
    low.emit(step, node)
    return out


def along_last(low: Lowerer, node: fx.Node) -> Placed:
    """softmax and cumsum."""
    x = low.dense(low.placed(node.args[0]))
    out = low.new(node)
    n = x.shape[-1]
    kind = {"softmax": Softmax, "cumsum": Cumsum}[low.op_name(node)]
    low.emit(kind(rows=row_kind(out), x=x.operand, y=out.operand, outer=x.size // n, n=n), node)
    return out


def hadamard(low: Lowerer, node: fx.Node) -> Placed:
    """Each block of the last axis transformed."""
    x = low.dense(low.placed(node.args[0]))
    out = low.new(node)
    n = int(node.args[1])  # type: ignore[call-overload]
    low.emit(Hadamard(rows=row_kind(out), x=x.operand, y=out.operand, outer=x.size // n, n=n), node)
    return out


def topk(low: Lowerer, node: fx.Node) -> tuple[Placed, Placed]:
    """Values and indices."""
    x = low.dense(low.placed(node.args[0]))
    values, indices = low.new(node, 0), low.new(node, 1)
    n = x.shape[-1]
    step = Topk(
        rows=row_kind(values), x=x.operand, values=values.operand, indices=indices.operand, outer=x.size // n, n=n,
        k=node.args[1], largest=node.args[2],  # type: ignore[arg-type]
    )  # fmt: skip
    low.emit(step, node)
    return values, indices


def gather(low: Lowerer, node: fx.Node) -> Placed:
    """Indexed read along the last axis."""
    x, index = (low.dense(low.placed(n)) for n in node.args[:2])
    out = low.new(node)
    step = Gather(
        rows=row_kind(out), x=x.operand, index=index.operand, y=out.operand, outer=x.size // x.shape[-1],
        n=x.shape[-1], m=index.shape[-1],
    )  # fmt: skip
    low.emit(step, node)
    return out


def columns(low: Lowerer, node: fx.Node) -> Placed:
    """An indexed read with one index for all lines."""
    x = low.dense(low.placed(node.args[0]))
    out = low.new(node)
    index = low.plain(node.args[1])
    n = x.shape[-1]
    step = Gather(
        rows=row_kind(out), x=x.operand, index=index, y=out.operand, outer=x.size // n, n=n, m=out.shape[-1],
        one_index=True,
    )  # fmt: skip
    low.emit(step, node)
    return out


def expert_columns(low: Lowerer, node: fx.Node) -> Placed:
    """An indexed read with the index of each line's expert."""
    x, expert = (low.dense(low.placed(node.args[i])) for i in (0, 2))
    out = low.new(node)
    experts, n = type_of(node.args[1]).shape  # type: ignore[arg-type]
    step = Gather(
        rows=row_kind(out), x=x.operand, index=low.plain(node.args[1]), expert=expert.operand, y=out.operand,
        outer=expert.size, n=n, m=n, experts=experts, one_line=len(x.shape) == 1,
    )  # fmt: skip
    low.emit(step, node)
    return out


def scatter(low: Lowerer, node: fx.Node) -> Placed:
    """Indexed write along the last axis."""
    x, index = (low.dense(low.placed(n)) for n in node.args[:2])
    source = None if node.args[2] is None else low.dense(low.placed(node.args[2]))
    out = low.new(node)
    value = float(node.args[3])  # type: ignore[arg-type]
    step = Scatter(
        rows=row_kind(out), x=x.operand, index=index.operand, src=source and source.operand, y=out.operand,
        outer=x.size // x.shape[-1], n=x.shape[-1], m=index.shape[-1], reduce="add" if node.args[4] else "none",
        value=value if isfinite(value) else str(value),
    )  # fmt: skip
    low.emit(step, node)
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


def _begins(k: Placed, v: Placed) -> bool:
    """Whether values are the first elements of their head's key, in the same memory."""
    place = (k.space, k.name, k.offset, k.row_stride, k.shape[0], k.strides)
    return place == (v.space, v.name, v.offset, v.row_stride, v.shape[0], v.strides) and v.shape[1] <= k.shape[1]


def paged_attention(low: Lowerer, node: fx.Node) -> Placed:
    """Write rotated K and V into the pages, unless a layer before has, then attend: two steps, or one for both."""
    q, k = (low.dense(low.placed(n)) for n in node.args[:2])
    v = low.placed(node.args[2])
    kind = low.options.kv_dtype
    shared = _begins(k, v) and node.args[6] is None and (kind not in MIXED or v.shape[1] % MIXED_DIMS == 0)
    v = v if shared else low.dense(v)
    q_cos, q_sin, k_cos, k_sin, sinks, alibi = (low.vector(a) for a in node.args[4:10])
    given = (*node.args[10:], *(0, None, None, 0, ALL)[len(node.args) - 16 :])
    layer, scale, window, chunk, softcap, style, ahead, bias, row_bias, later, policy = given
    by_row = None if row_bias is None else low.dense(low.placed(row_bias))  # type: ignore[arg-type]
    kept = read_eviction(str(policy))
    chooses, front = kept is not None and kept.chooses, 0
    if kept is not None and not chooses:
        window, front = kept.size, kept.beside
    cached = KVLayer(k.shape[0], k.shape[1], v.shape[1], shared=shared, scored=chooses)
    layer = low.scratch_layer(cached) if ahead else low.kv_layer(int(layer))  # type: ignore[call-overload]
    low.cache(layer, cached, WITHIN_STEP if ahead else int(window), kept)  # type: ignore[call-overload]
    kv = KVSpec(k.shape[0], k.shape[1], v.shape[1], kind, low.options.block_size, shared, chooses)

    def rotary(cos: Any) -> Rotary:
        if cos is None:
            return Rotary(style=style)  # type: ignore[arg-type]
        rows, width = type_of(cos).shape
        return Rotary(width, rows, style)  # type: ignore[arg-type]

    new: dict[str, Any] = {}
    if ahead or low.first_of(layer):  # layers may read what another has written
        write = KvWrite(
            layer=layer, k=k.operand, v=None if shared else v.operand, cos=k_cos, sin=k_sin, kv=kv,
            rotary=rotary(node.args[6]),
        )  # fmt: skip
        if low.options.profile.joins:
            new = {"new": NewKeys(write.k, write.v, k_cos, k_sin), "new_rotary": write.rotary}
        else:
            low.emit(write, node)
    out = low.new(node)
    attend = Attention(
        rows=row_kind(out), layer=layer, q=q.operand, cos=q_cos, sin=q_sin, sinks=sinks, alibi=alibi, o=out.operand,
        kv=kv, rotary=rotary(node.args[4]), q_heads=q.shape[0], scale=float(scale), window=int(window),  # type: ignore[arg-type, call-overload]
        front=front, chunk=int(chunk), softcap=float(softcap), ahead=int(ahead), bias=low.vector(bias),  # type: ignore[arg-type, call-overload]
        evicts=kept.kind if kept is not None and chooses else "",  # type: ignore[arg-type]
        budget=kept.size if kept is not None and chooses else 0,
        recent=kept.beside if kept is not None and chooses else 0,
        bias_width=0 if bias is None else type_of(bias).shape[1],  # type: ignore[arg-type]
        row_bias=by_row and by_row.operand, row_bias_width=by_row.shape[1] if by_row else 0, later=int(later), **new,  # type: ignore[arg-type, call-overload]
    )  # fmt: skip
    low.emit(attend, node)
    return out


_FUNCTIONS = {
    "embedding": embedding, "select_rows": select_rows, "linear": linear, "expert_linear": expert_linear,
    "bmm": bmm, "rms_norm": norm, "layer_norm": norm, "add_rms_norm": add_norm, "add_layer_norm": add_norm,
    "pointwise": pointwise, "reduce": reduce, "softmax": along_last, "cumsum": along_last, "topk": topk,
    "gather": gather, "columns": columns, "expert_columns": expert_columns, "scatter": scatter, "hadamard": hadamard,
    "rope": rope, "paged_attention": paged_attention,
}  # fmt: skip
COMPUTE_LOWERING = {OPS[name].overload: fn for name, fn in _FUNCTIONS.items()}
