"""Lowering of the dialect's ops: one function each, from node to steps."""

from __future__ import annotations

from math import isfinite, prod
from typing import TypedDict

from torch import fx

from ..graph.tensor_types import type_of
from ..ops import OPS
from ..ops.body import Body
from .context import Lowerer, row_kind
from .placed import Placed
from .steps.embedding import Embedding, SelectRows
from .steps.linear import ExpertLinear, ExpertLinearQ, Linear, LinearQ
from .steps.norm import AddLayerNorm, AddRmsNorm, LayerNorm, RmsNorm
from .steps.rowwise import Bmm, Cumsum, Gather, Hadamard, Reduce, Scatter, Softmax, Topk

_ADD = Body.parse("t0 = add a0 a1")


class _NormFacts(TypedDict):
    d: int
    groups: int
    eps: float


def embedding(low: Lowerer, node: fx.Node) -> Placed:
    """Row gather from a table, in the layout of linear layers if one shares the table, else row-major."""
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
        stored=weight.stored, screened=weight.layout.screens and low.gives_logits(node),
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
    index = None if node.args[3] is None else low.placed(node.args[3])
    if index is not None and not (index.space == "input" and index.is_dense):
        index = low.dense(index)
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
    kind, facts = row_kind(y), _norm_facts(x, node)
    at, added, out, kept = x.operand, r.operand, y.operand, total.operand
    if len(vectors) == 1:
        step = AddRmsNorm(rows=kind, x=at, r=added, w=vectors[0], y=out, sum=kept, **facts)
    else:
        step = AddLayerNorm(rows=kind, x=at, r=added, w=vectors[0], bias=vectors[1], y=out, sum=kept, **facts)
    low.emit(step, node)
    return y, total


def _norm_facts(x: Placed, node: fx.Node) -> _NormFacts:
    d = x.shape[-1]
    return _NormFacts(d=d, groups=x.size // d, eps=float(node.args[-1]))  # type: ignore[arg-type]


def pointwise(low: Lowerer, node: fx.Node) -> Placed:
    """A generated elementwise kernel."""
    inputs = [low.placed(n) if n.op != "get_attr" else low.constant(n) for n in node.args[0]]  # type: ignore[union-attr]
    out = low.new(node)
    low.elementwise(Body.parse(str(node.args[1])), inputs, out, node)
    return out


def reduce(low: Lowerer, node: fx.Node) -> Placed:
    """A reduction over one axis."""
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


_FUNCTIONS = {
    "embedding": embedding, "select_rows": select_rows, "linear": linear, "expert_linear": expert_linear,
    "bmm": bmm, "rms_norm": norm, "layer_norm": norm, "add_rms_norm": add_norm, "add_layer_norm": add_norm,
    "pointwise": pointwise, "reduce": reduce, "softmax": along_last, "cumsum": along_last, "topk": topk,
    "gather": gather, "columns": columns, "expert_columns": expert_columns, "scatter": scatter, "hadamard": hadamard,
}  # fmt: skip
COMPUTE_LOWERING = {OPS[name].overload: fn for name, fn in _FUNCTIONS.items()}
