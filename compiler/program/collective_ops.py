"""Lowering of the collective ops of ranks."""

from __future__ import annotations

from torch import fx

from ..ops import OPS
from .context import Lowerer, row_kind
from .placed import Placed
from .steps.collective import AllGather, AllReduce, GatherRows, ReduceScatter, Transfer


def all_reduce(low: Lowerer, node: fx.Node) -> Placed:
    """A sum over the ranks."""
    x, out = _packed(low, node), low.new(node)
    step = AllReduce(rows=row_kind(out), x=x.operand, y=out.operand, n=x.size, ranks=low.graph.parts)
    low.emit(step, node)
    return out


def all_gather(low: Lowerer, node: fx.Node) -> Placed:
    """The ranks' parts of lines, concatenated."""
    x, out = _packed(low, node), low.new(node)
    n = x.shape[-1]
    step = AllGather(
        rows=row_kind(out), x=x.operand, y=out.operand, n=n, outer=x.size // n, ranks=node.args[1],  # type: ignore[arg-type]
    )  # fmt: skip
    low.emit(step, node)
    return out


def reduce_scatter(low: Lowerer, node: fx.Node) -> Placed:
    """A sum over the ranks; each rank gets its own rows."""
    x, out = _packed(low, node), low.new(node)
    step = ReduceScatter(
        rows=row_kind(out), x=x.operand, y=out.operand, n=x.size, ranks=low.graph.parts, least=node.args[1],  # type: ignore[arg-type]
    )  # fmt: skip
    low.emit(step, node)
    return out


def all_gather_rows(low: Lowerer, node: fx.Node) -> Placed:
    """The other ranks' rows, written over those that this rank does not own."""
    x = _packed(low, node)
    step = GatherRows(
        rows=row_kind(x), x=x.operand, y=x.operand, n=x.size, ranks=low.graph.parts, least=node.args[1],  # type: ignore[arg-type]
    )  # fmt: skip
    low.emit(step, node)
    return x


def transfer(low: Lowerer, node: fx.Node) -> Placed:
    """A value that one pipeline stage passes to the next."""
    x, out = _packed(low, node), low.new(node)
    step = Transfer(rows=row_kind(out), x=x.operand, y=out.operand, n=x.size, stage=node.args[1])  # type: ignore[arg-type]
    low.emit(step, node)
    return out


def _packed(low: Lowerer, node: fx.Node) -> Placed:
    """The operand that a call sends to other ranks, with contiguous rows: copied if it is a slice of wider rows, such
    as one of several merged products."""
    x = low.dense(low.placed(node.args[0]))
    if x.row_stride == x.size:
        return x
    out = low.builder.buffer(x.shape, x.dtype, x.rows)
    low.copy(x, out, node)
    return out


COLLECTIVE_LOWERING = {
    OPS["all_reduce"].overload: all_reduce, OPS["all_gather"].overload: all_gather, OPS["transfer"].overload: transfer,
    OPS["reduce_scatter"].overload: reduce_scatter, OPS["all_gather_rows"].overload: all_gather_rows,
}  # fmt: skip
