"""Rotations that do not change the model's results but even out its channels, so that none is an outlier (QuaRot,
Ashkboos et al. 2024, arXiv:2404.00456; SpinQuant, Liu et al. 2024, arXiv:2405.16406).

The residual stream x becomes x Q. Ops that write it absorb Q in the rows of their weights (linear layers, embeddings),
ops that read it in the columns; an RMSNorm in between is invariant to Q once its gain has moved to the layers that read
it. The values of the stream are found by data flow: from the inputs of norms along additions, scalings and views, until
every path ends at a writer or a reader. If a path ends at any other op, the stream is not rotated, and the reason is
reported. The same is done within each head between the values of attention and the reader of its result.

Other inputs, such as a gated product before a down projection, have no weight before them that could absorb a rotation.
For these the rotation is computed at run time (`hadamard`), after the op that makes the values and before all layers
that read them and will be quantized; the columns of these layers absorb its inverse, which is the rotation itself.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from ...compiler.errors import UsageError
from ...compiler.graph.graph import Graph
from ...compiler.graph.printer import target_name
from ...compiler.ops import OPS, traits_of
from ...compiler.ops.hadamard import MAX_BLOCK, MIN_BLOCK, walsh_hadamard
from ...compiler.weights.formats.base import Misfit
from ...compiler.weights.formats.registry import find_format
from ...compiler.weights.handles import Derived, RoundedWeight, Weight
from ..base import PassContext, PassResult, Refusal
from .element_ties import full_shape
from .hadamard import Rotation
from .residual_stream import RMS, Pinned, Stream
from .select import EMBEDDING, LINEAR, QuantizePass, retype, set_weight

HADAMARD = OPS["hadamard"].overload


@dataclass(frozen=True)
class Rotate(QuantizePass):
    """Rotates the model before a quantization with the same options.

    table: the storage format of an embedding that shared a matrix with the LM head and is separated, because only the
    head absorbs the gain of the last norm; None leaves it a float matrix. required: raise UsageError if nothing can be
    rotated. online: rotate inputs at run time if the rotation cannot be folded.
    """

    name: ClassVar[str] = "rotate"
    tolerance: ClassVar[float | None] = 1e-4

    table: str | None = None
    seed: int = 0
    required: bool = False
    online: bool = True

    def run(self, graph: Graph, ctx: PassContext) -> PassResult:
        counts: Counter[str] = Counter()
        refusals: list[Refusal] = []
        folded: set[fx.Node] = set()
        for node in _heads(graph):
            self._try(graph, node, lambda g, n, p: _rotate_heads(g, n, p, folded), "rotated-heads", counts, refusals)
        seen: set[fx.Node] = set()
        for node in list(graph.nodes):
            if node.target is RMS and node.args[0] not in seen and node.args[1] is not None:
                turn = partial(_rotate_stream, seen=seen, folded=folded)
                self._try(graph, node, turn, "rotated", counts, refusals)
        if self.online:
            counts["rotated-online"] += _rotate_inputs(graph, self, folded, refusals)
        ctx.refusals += refusals
        if self.required and not counts.total():
            reason = refusals[-1].reason if refusals else "it has no RMSNorm, no attention and no linear layer"
            raise UsageError(f"--rotate: nothing of this model can be rotated: {reason}", "leave --rotate out")
        retype(graph)
        return PassResult(counts.total() > 0, +counts)

    def _try(
        self,
        graph: Graph,
        node: fx.Node,
        rotate: Callable[[Graph, fx.Node, Rotate], None],
        rule: str,
        counts: Counter[str],
        refusals: list[Refusal],
    ) -> None:
        try:
            rotate(graph, node, self)
            counts[rule] += 1
        except Pinned as pinned:
            refusals.append(Refusal("rotate", node.name, str(pinned)))


# -- the residual stream ----------------------------------------------------------------------------------------------


def _rotate_stream(graph: Graph, norm: fx.Node, options: Rotate, seen: set[fx.Node], folded: set[fx.Node]) -> None:
    source: Any = norm.args[0]
    stream = Stream(graph, full_shape(source)[-1])
    stream.add(source)
    try:
        stream.grow()
    finally:
        seen.update(stream.inside)
    q = Rotation(stream.width, options.seed)
    for node in stream.tables:
        _rotate_table(graph, node, q, options)
    for node, gain in stream.readers:
        scale = graph.weight(gain.args[1]) if gain is not None else None  # type: ignore[arg-type]
        _derive(graph, node, 1, lambda w, *g: q(w.to(torch.float32) * g[0].to(torch.float32)) if g else q(w), scale)
        folded.add(node)
    for node in stream.writers:
        _rotate_output(graph, node, q)
    for node in stream.norms:
        node.update_arg(1, None)


def _rotate_table(graph: Graph, node: fx.Node, q: Rotation, options: Rotate) -> None:
    source: Any = node.args[1]
    weight, tied = graph.weight(source), any(user.target is LINEAR for user in _readers(graph, source))
    rotated: Weight = Derived(lambda w: q(w).to(w.dtype), (weight,), weight.shape, weight.dtype)
    if tied and options.table is not None:
        with contextlib.suppress(Misfit):  # an odd width: it stays a float matrix, like the head
            rotated = RoundedWeight(rotated, find_format(options.table).fitted(weight.shape[-1]))
    set_weight(graph, [(node, 1)], rotated)


def _readers(graph: Graph, weight: fx.Node) -> Iterator[fx.Node]:
    for node in graph.nodes:
        if node.op == "get_attr" and node.target == weight.target:
            yield from node.users


def _rotate_output(graph: Graph, node: fx.Node, q: Rotation) -> None:
    _derive(graph, node, 1, q.rows)
    if node.args[2] is not None:
        _derive(graph, node, 2, q)


def _derive(graph: Graph, node: fx.Node, arg: int, fn: Callable[..., Tensor], *more: Weight | None) -> None:
    """Replace weight `arg` of a node by `fn` of it and of `more`."""
    source: Any = node.args[arg]
    weight = graph.weight(source)
    sources = (weight, *(extra for extra in more if extra is not None))
    set_weight(graph, [(node, arg)], Derived(fn, sources, weight.shape, torch.float32))


# -- heads ------------------------------------------------------------------------------------------------------------


def _heads(graph: Graph) -> list[fx.Node]:
    return [n for n in graph.nodes if n.op == "call_function" and traits_of(n.target).attention]


def _rotate_heads(graph: Graph, node: fx.Node, options: Rotate, folded: set[fx.Node]) -> None:
    """Rotate the values of attention, head by head, between the layer that makes them and the layer that reads the
    result."""
    maker: Any = node.args[2]
    size = full_shape(maker)[-1]
    while maker.target is not LINEAR:
        if len(maker.users) != 1 or not _is_view(maker):
            raise Pinned(f"the values of attention come through {target_name(maker.target)}")
        maker = maker.args[0]
    if len(maker.users) != 1:
        raise Pinned("the values of attention are read by something else")
    value = node
    while True:
        if len(value.users) != 1:
            raise Pinned("the result of attention is read by several ops")
        [reader] = value.users
        if reader.target is LINEAR and reader.args[0] is value:
            break
        if not _is_view(reader):
            raise Pinned(f"the result of attention is read by {target_name(reader.target)}")
        value = reader
    q = Rotation(size, options.seed + 1)
    _rotate_output(graph, maker, q)
    _derive(graph, reader, 1, q)
    folded.add(reader)


def _is_view(node: fx.Node) -> bool:
    """Whether an op keeps the order of elements."""
    if node.op != "call_function" or not traits_of(node.target).moves_only or not isinstance(node.args[0], fx.Node):
        return False
    shape = full_shape(node.args[0])
    index = node.target(torch.arange(shape.numel()).view(shape), *node.args[1:]).reshape(-1)  # type: ignore[operator]
    return torch.equal(index, torch.arange(shape.numel()))


# -- online -----------------------------------------------------------------------------------------------------------


def _rotate_inputs(graph: Graph, options: Rotate, folded: set[fx.Node], refusals: list[Refusal]) -> int:
    """Rotate the inputs of layers whose codes the quantization chooses and that no folded rotation reaches; returns how
    many values."""
    found: dict[fx.Node, fx.Node] = {}
    for job in options.jobs(graph, PassContext()):
        weight: Any = job.node.args[1]
        block = min(job.shape[-1] & -job.shape[-1], MAX_BLOCK)
        if folded.intersection(job.nodes) or not job.own or any(user.target is EMBEDDING for user in weight.users):
            continue
        if any(node.args[0].target is HADAMARD for node in job.nodes):  # type: ignore[union-attr]
            continue  # by an earlier run
        if block < MIN_BLOCK:
            refusals.append(Refusal("rotate", job.name, f"{job.shape[-1]} inputs: no multiple of {MIN_BLOCK}"))
            continue
        for node in job.nodes:
            value: Any = node.args[0]
            if value not in found:
                with graph.fx.inserting_after(value):
                    found[value] = graph.call(HADAMARD, value, block, origin=node)
            node.update_arg(0, found[value])
        turned = Derived(partial(_turned, block=block), (graph.weight(weight),), job.shape, torch.float32)
        set_weight(graph, [(node, 1) for node in job.nodes], turned)
    return len(found)


def _turned(weight: Tensor, block: int) -> Tensor:
    return walsh_hadamard(weight.unflatten(-1, (-1, block))).flatten(-2)
