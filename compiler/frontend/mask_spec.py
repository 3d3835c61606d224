"""Placeholders for an attention mask while a model is traced: they compute nothing, and using their values is an error.

There is one exception: the scores of an indexer (such as DeepSeek-V3.2's sparse attention) may be masked with one, and
the best keys selected. If the longest sequence has no more tokens than are selected, the result is all keys that the
mask allows; else it keeps the scores, which become an operand of attention.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Self

import torch

from ..errors import UnsupportedModel

_longest: ContextVar[int | None] = ContextVar("longest sequence", default=None)


@contextlib.contextmanager
def longest_sequence(tokens: int) -> Iterator[None]:
    """A context in which models are traced for sequences of at most `tokens` tokens."""
    token = _longest.set(tokens)
    try:
        yield
    finally:
        _longest.reset(token)


class _Opaque:
    """A placeholder that raises MaskUsed for everything that its own class does not define."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise MaskUsed()


@dataclass(frozen=True)
class MaskSpec(_Opaque):
    """The keys that a mask allows, in the form that icc::attention takes; by default causal attention.

    window: number of tokens that a query sees, 0: all. chunk: tokens per chunk, if only tokens of a chunk see each
    other, 0: no chunks. ahead: number of later tokens that a query sees. refused: why attention with this mask cannot
    be compiled; "": it can.
    """

    window: int = 0
    chunk: int = 0
    ahead: int = 0
    refused: str = ""

    @property
    def dtype(self) -> torch.dtype:
        """float32, the dtype of the scores that masks are added to."""
        return torch.float32

    def __getitem__(self, index: Any) -> MaskSpec:
        """The mask without its sequence and head axes, which changes nothing. Raises MaskUsed for another index."""
        parts = index if isinstance(index, tuple) else (index,)
        if any(not _is_whole(part) for part in parts):
            raise MaskUsed()
        return self

    def __eq__(self, other: object) -> bool:
        if isinstance(other, (int, float, torch.Tensor)):  # this would ask for the mask's values
            raise MaskUsed()
        return isinstance(other, MaskSpec) and vars(self) == vars(other)

    def __ne__(self, other: object) -> Any:
        """The hidden keys, for a comparison with 0: the mask is not 0 at these."""
        return AllVisible(self, hidden=True) if type(other) is int and other == 0 else not self == other

    def __radd__(self, other: Any) -> MaskedScores:
        if not isinstance(other, torch.Tensor):
            raise MaskUsed()
        return MaskedScores(self, other)

    def masked_fill(self, where: Any, value: float) -> MaskSpec:
        """This mask, if `where` is the keys that it hides already; MaskUsed otherwise."""
        if where != AllVisible(self, hidden=True):
            raise MaskUsed()
        return self

    def _used(self, *args: Any) -> Any:
        raise MaskUsed()

    __add__ = __mul__ = __rmul__ = __sub__ = __rsub__ = __and__ = __rand__ = __invert__ = __ge__ = __gt__ = _used


def _is_whole(part: Any) -> bool:
    """Whether a part of an index removes an axis of size 1, or takes all keys."""
    if isinstance(part, slice) and isinstance(part.stop, torch.SymInt):
        return part.start is None and part.step is None and bool(part.stop.node.expr.is_Symbol)
    return (type(part) is int and part == 0) or part == slice(None)


def picking(tokens: int) -> None:
    """Raise UnsupportedModel if an indexer that selects `tokens` tokens does not select all of the longest sequence."""
    longest = _longest.get()
    if longest is not None and tokens < longest:
        raise UnsupportedModel(
            f"an index picks the {tokens} tokens that attention reads, of sequences of up to {longest} tokens",
            f"--max-seq-len {tokens} compiles it: attention then reads all tokens",
            op="topk",
        )


class _Keys:
    """The number of keys, which can only be compared with the number of keys to select."""

    def __lt__(self, picked: Any) -> bool:
        longest = _longest.get()
        return type(picked) is not int or longest is None or longest <= picked

    def __gt__(self, picked: Any) -> bool:
        return not self < picked


@dataclass(frozen=True)
class MaskedScores(_Opaque):
    """Scores [1, T, T] that a mask was added to. The only operation is the selection of the best keys."""

    mask: MaskSpec
    scores: torch.Tensor

    @property
    def shape(self) -> tuple[Any, ...]:
        """(None, None, the number of keys)."""
        return (None, None, _Keys())

    def topk(self, count: Any, dim: int = -1, **kwargs: Any) -> AllVisible | Picked:
        """The best keys: AllVisible if all keys are selected, else Picked. MaskUsed for another axis or for the lowest
        scores."""
        if dim != -1 or not kwargs.get("largest", True):
            raise MaskUsed()
        if isinstance(count, _Keys):
            return AllVisible(self.mask)
        if type(count) is not int:
            raise MaskUsed()
        return Picked(self.mask, self.scores, count)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise MaskUsed()


class _Indices(_Opaque):
    """Indices of keys, in any integer dtype."""

    @property
    def indices(self) -> Self:
        """The indices themselves, like the second result of topk."""
        return self

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """The indices themselves, whatever the dtype."""
        return self

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise MaskUsed()


@dataclass(frozen=True)
class Picked(_Indices):
    """The indices of the `count` keys with the highest scores [1, T, T] among those that a mask allows."""

    mask: MaskSpec
    scores: torch.Tensor
    count: int


@dataclass(frozen=True)
class AllVisible(_Indices):
    """The indices of all keys that a mask allows, or a boolean table that is true at these keys. hidden: the keys that
    it hides instead."""

    mask: MaskSpec
    hidden: bool = False

    def __invert__(self) -> AllVisible:
        return AllVisible(self.mask, not self.hidden)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is not torch.Tensor.masked_fill or not isinstance(args[1], AllVisible) or not args[1].hidden:
            raise MaskUsed()
        return KeyBias(args[1].mask, args[0], args[0][:, :, :1])


@dataclass(frozen=True)
class KeyBias(_Opaque):
    """A mask, and a number that is added to all scores of a key: row[1, Hkv, 1, T] of whole[1, Hkv, T, T].

    Repeating it for the queries' heads changes nothing.
    """

    mask: MaskSpec
    whole: torch.Tensor
    row: torch.Tensor

    @property
    def shape(self) -> tuple[Any, ...]:
        """The shape of `whole`."""
        return self.whole.shape

    def __getitem__(self, index: Any) -> KeyBias:
        if any(part not in (None, slice(None)) for part in index):
            raise MaskUsed()
        return self

    def expand(self, *sizes: Any) -> KeyBias:
        """The bias itself, which all query heads of these keys share."""
        return self

    reshape = expand


class MaskUsed(UnsupportedModel):
    """A model computes with its attention mask instead of handing it to an attention function."""

    def __init__(self) -> None:
        super().__init__(
            "the model computes with its attention mask (attention of its own, such as learned sparse attention)",
            "icc compiles causal, sliding-window, chunked and ALiBi attention",
            op="attention_mask",
        )
