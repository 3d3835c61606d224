"""The traits of an op that passes and the lowering ask for, instead of keeping lists of op names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Division:
    """A way to divide a call among ranks: each rank has its part of these axes and computes with that part.

    axes: by argument, the axis that is divided, not counting the row axis if there is one. Sizes may differ if elements
    share others, as attention's query heads share heads of keys. result: the axis of the result that is divided; None
    if the ranks' results must be summed. once: arguments that only one rank adds to a sum. Arguments without an axis
    are whole.
    """

    axes: Mapping[str, int]
    result: int | None
    once: tuple[str, ...] = ()


@dataclass(frozen=True)
class Traits:
    """Facts of an op. A tuple of numbers names arguments by position.

    What it does with elements:
        moves_only: the result's elements are its operands', in another order or number, with the same storage type.
        strided: a moves_only op that needs no copy, only new strides over argument 0.
        elementwise: an element of the result depends only on the operands' elements at the same place, broadcast.
        homogeneous: scaling the elements of all these arguments by s > 0 scales the result's by s, at the same place.
        selects_rows: argument 1 picks rows of argument 0; the result has the rows of argument 1.
    What it does with rows and steps:
        mixes_tokens: a row of the result depends on other rows, so that it cannot be computed for some rows alone.
        stateful: each call owns something that lives longer than a step, such as a layer of the KV cache.
        collective: it takes the values of all ranks, see collective.py.
        by_line: each line of the last axis gives one line of the result, independent of other lines.
        divisions: how ranks may divide a call; the first that fits what they have is used.
        attention: arguments 0, 1, 2 are queries, keys and values [T, heads, dim]; a result is a mean of values.
    What it does with numbers and weights:
        product: a matrix product: these arguments are rounded to the back end's activation type, and so is the result.
        weights: arguments that are weights of the model in every graph, or None.
        absorbs: weights that can absorb a scale of the result's last axis: the first, [..., N, K] of a product or [N],
            and those added after it. If the first is None, it counts as ones.
        abstract: it has no kernel on any back end; a pass replaces it before the lowering.
        selects: the result depends on which input is larger, so rounding may change it altogether.
        routes: passes scores to a selection (the ops of an MoE router between its linear layer and the choice).
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
