"""What passes and the lowering may ask of an op. They ask a trait; no list of op names stands anywhere else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Division:
    """A way in which several ranks do a call in parts: each has its part of these axes, and does what is left.

    axes: by argument, the axis that is divided, counted behind the rows where there are any. Sizes may differ where
    elements share: attention's query heads share those of keys. result: the axis of the result that is divided; None
    where results add up. once: arguments that only one rank adds to a sum. Arguments without an axis are whole.
    """

    axes: Mapping[str, int]
    result: int | None
    once: tuple[str, ...] = ()


@dataclass(frozen=True)
class Traits:
    """Facts of an op. A tuple of numbers names arguments by position.

    What it does with elements:
        moves_only: the result's elements are its operands', in another order or number; the storage type stays.
        strided: such an op that needs no copy, only new strides over argument 0.
        elementwise: an element of the result depends on the operands' elements at its place, broadcast.
        homogeneous: scaling the elements of all these arguments by s > 0 scales the result's by s, at the same place.
        selects_rows: argument 1 picks rows of argument 0; the result has the rows of argument 1.
    What it does with rows and steps:
        mixes_tokens: a row of the result depends on other rows, so that it cannot be computed for some rows alone.
        stateful: each call owns something that lives longer than a step, such as a layer of the KV cache.
        collective: it takes the values of all ranks, see collective.py.
        by_line: each line of the last axis gives one of the result, whatever the other lines are.
        divisions: how ranks may divide a call, the first that fits what they have.
        attention: arguments 0, 1, 2 are queries, keys and values [T, heads, dim]; a result is a mean of values.
    What it does with numbers and weights:
        product: a matrix product: these arguments are rounded to the back end's activation type, and so is the result.
        weights: arguments that are weights of the model in every graph, or None.
        absorbs: weights that scale the last axis of the result: the first, [..., N, K] of a product or [N], with what
            is added after it. An absent first one counts as ones.
        abstract: it has no kernel on any back end; a pass replaces it before the lowering.
        selects: which of its inputs is larger decides what it gives: rounding them may change it altogether.
        routes: hands scores on to a selection (what an MoE router does between its linear layer and the choice).
    """

    moves_only: bool = False
    strided: bool = False
    elementwise: bool = False
    homogeneous: tuple[int, ...] = ()
    selects_rows: bool = False
    mixes_tokens: bool = False
    stateful: bool = False
    collective: bool = False
    by_line: bool = False
    divisions: tuple[Division, ...] = field(default=(), hash=False)
    attention: bool = False
    product: tuple[int, ...] = ()
    weights: tuple[int, ...] = ()
    absorbs: tuple[int, ...] = ()
    abstract: bool = False
    selects: bool = False
    routes: bool = False


NO_TRAITS = Traits()
