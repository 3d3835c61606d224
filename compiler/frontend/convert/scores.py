"""The state of attention scores while a model writes them out, and how each operation changes it.

An operation that attention scores cannot go through is a ValueError with the reason.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NoReturn

from torch import Tensor, fx

from .conversion import Conversion
from .masks import MASKED, SMALL_TABLE, MaskStep
from .row_bias import PairBias, pair_dims
from .values import Dims, T, TracedValue


@dataclass(frozen=True)
class AttentionScores:
    """scale * q k^T, soft-capped if `softcap` is not 0, with `steps` applied; after the softmax, probabilities.

    dims: end in (T, T). by_pair: a PairBias that is also added, or None. order: the current order of the axes longer
    than 1, if it differs from that of `dims`; else ().
    """

    q: TracedValue
    k: TracedValue
    dims: tuple[Any, ...]
    scale: float = 1.0
    softcap: float = 0.0
    steps: tuple[MaskStep, ...] = ()
    by_pair: PairBias | None = None
    probabilities: bool = False
    order: tuple[int, ...] = ()

    @property
    def is_bare(self) -> bool:
        """Whether nothing has been added or masked."""
        return self.by_pair is None and all(step.kind == "view" for step in self.steps)


def with_bias(conv: Conversion, scores: AttentionScores, node: fx.Node) -> AttentionScores:
    """Scores of a baddbmm, with its bias. ValueError if the bias is scaled or depends on the tokens."""
    beta, alpha = float(node.kwargs.get("beta", 1)), float(node.kwargs.get("alpha", 1))  # type: ignore[arg-type]
    scores = replace(scores, scale=alpha)
    if beta == 0:
        return scores
    steps = (MaskStep("add", node.args[0]),)
    if beta != 1:
        raise ValueError("a scaled bias of the attention scores")
    return replace(scores, steps=steps if is_static(conv, node.args[0]) else refuse_dynamic())


def refuse_dynamic() -> NoReturn:
    """Raise ValueError for a bias of the scores that depends on the tokens."""
    raise ValueError("attention scores with a bias that depends on the tokens")


def is_static(conv: Conversion, operand: Any) -> bool:
    """Whether an operand is a number, or a tensor that does not depend on the tokens."""
    return not isinstance(operand, fx.Node) or operand in conv.static.nodes


def _longer(dims: Dims) -> tuple[Any, ...]:
    return tuple(d for d in dims if d != 1)


def permuted(scores: AttentionScores, node: fx.Node) -> AttentionScores:
    """Scores with permuted axes, as einsum permutes them forth and back; axes of size 1 do not count."""
    before = pair_dims(node.args[0].meta["val"])  # type: ignore[union-attr]
    axes = iter(scores.order or range(len(_longer(scores.dims))))
    numbers = [next(axes) if d != 1 else None for d in before]
    order = tuple(n for n in (numbers[axis] for axis in node.args[1]) if n is not None)  # type: ignore[union-attr, index]
    if order != tuple(sorted(order)):
        return replace(scores, order=order)
    return reshaped(replace(scores, order=()), pair_dims(node.meta["val"]))


def reshaped(scores: AttentionScores, dims: tuple[Any, ...]) -> AttentionScores:
    """Scores viewed with `dims`. ValueError if `dims` do not end in (T, T), apart from axes of size 1, or have another
    order."""
    if scores.order:
        own = _longer(scores.dims)
        if _longer(dims) != tuple(own[axis] for axis in scores.order):
            raise ValueError("attention scores in another order")
        return scores
    if T in dims and tuple(d for d in dims[dims.index(T) :] if d != 1) == (
        T,
        T,
    ):  # einsum leaves axes of size 1 in between
        dims = (*dims[: dims.index(T)], T, T)
    if dims[-2:] != (T, T):
        raise ValueError("attention scores in another order")
    if dims == scores.dims:
        return scores
    return replace(scores, dims=dims, steps=(*scores.steps, MaskStep("view", (scores.dims, dims))))


def arithmetic(conv: Conversion, node: fx.Node, short: str, scores: AttentionScores) -> AttentionScores:
    """Scores after an elementwise operation `short`, such as "mul" or "masked_fill", with a static operand or a
    PairBias. ValueError for other operands."""
    args = list(node.args)
    at = next(
        i for i, a in enumerate(args) if isinstance(a, fx.Node) and isinstance(conv.values.get(a), AttentionScores)
    )
    others = [a for i, a in enumerate(args) if i != at]
    if short == "add" and not node.kwargs and isinstance(added := conv.values.get(others[0]), PairBias):  # type: ignore[arg-type]
        parts = scores.by_pair.parts if scores.by_pair is not None else ()
        return replace(scores, by_pair=PairBias((*parts, *added.parts)))
    if not all(is_static(conv, o) for o in others):
        refuse_dynamic()
    if short == "tanh" and not scores.softcap and scores.is_bare:
        return replace(scores, softcap=1.0)
    if short in ("maximum", "clamp_min", "clamp") and len(others) == 1:
        if _number(conv, others[0]) > MASKED:
            raise ValueError("clamped attention scores")
        return scores
    if short in ("mul", "div"):
        return _scaled(conv, short, at, scores, others[0])
    if short in ("add", "sub") and not node.kwargs:
        if short == "sub" and at != 0:
            raise ValueError("attention scores subtracted from a bias")
        return replace(scores, steps=(*scores.steps, MaskStep(short, others[0])))
    if short == "masked_fill":
        return replace(scores, steps=(*scores.steps, MaskStep("mask", args[1], args[2])))
    if short == "where" and at > 0:
        kind = "keep" if at == 1 else "mask"
        return replace(scores, steps=(*scores.steps, MaskStep(kind, args[0], args[3 - at])))
    raise ValueError(f"{short} of attention scores")


def _number(conv: Conversion, operand: Any) -> float:
    """The value of a static operand of one element. ValueError for other operands."""
    if isinstance(operand, fx.Node):
        value = conv.static.evaluate(operand, SMALL_TABLE)
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ValueError("attention scores times a tensor")
        return float(value)
    return float(operand)


def _scaled(conv: Conversion, short: str, at: int, scores: AttentionScores, operand: Any) -> AttentionScores:
    if isinstance(operand, fx.Node) and pair_dims(operand.meta["val"])[-2:] == (T, T) and short == "mul":
        return replace(scores, steps=(*scores.steps, MaskStep("mul", operand)))
    factor = _number(conv, operand)
    if short == "div":
        if at != 0:
            raise ValueError("a division by attention scores")
        factor = 1 / factor
    by_pair = scores.by_pair and scores.by_pair.times(conv, factor)
    steps = scores.steps if scores.is_bare else (*scores.steps, MaskStep("mul", factor))
    return replace(scores, scale=scores.scale * factor, softcap=scores.softcap * factor, steps=steps, by_pair=by_pair)
