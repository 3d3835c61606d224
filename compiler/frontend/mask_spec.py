"""What stands for an attention mask while a model is traced: nothing is computed, and nobody may look inside.

But for one use: scores of an index (DeepSeek-V3.2's sparse attention and its like) may be masked with it, and the best
picked. Where the compiled length is within what is picked, that is every token that the mask lets through; else scores
stay with what was picked, and become an operand of attention.
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
    """Trace for sequences of at most so many tokens."""
    token = _longest.set(tokens)
    try:
        yield
    finally:
        _longest.reset(token)


class _Opaque:
    """What nobody may look inside, but by what its own class says."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise MaskUsed()


@dataclass(frozen=True)
class MaskSpec(_Opaque):
    """What a mask allows, in the words of icc::attention: by default, to be causal. Models hand it to the attention
    function without looking inside. refused: why it cannot be compiled, where some attention uses it."""

    window: int = 0
    chunk: int = 0
    ahead: int = 0
    refused: str = ""

    @property
    def dtype(self) -> torch.dtype:
        """Masks are added to scores."""
        return torch.float32

    def __getitem__(self, index: Any) -> MaskSpec:
        """The mask without its axes of sequences and heads."""
        parts = index if isinstance(index, tuple) else (index,)
        if any(not _is_whole(part) for part in parts):
            raise MaskUsed()
        return self

    def __eq__(self, other: object) -> bool:
        if isinstance(other, (int, float, torch.Tensor)):  # which of its places are seen
            raise MaskUsed()
        return isinstance(other, MaskSpec) and vars(self) == vars(other)

    def __ne__(self, other: object) -> Any:
        """Which places are not seen, of a mask that is not 0 there."""
        return AllVisible(self, hidden=True) if type(other) is int and other == 0 else not self == other

    def __radd__(self, other: Any) -> MaskedScores:
        if not isinstance(other, torch.Tensor):
            raise MaskUsed()
        return MaskedScores(self, other)

    def masked_fill(self, where: Any, value: float) -> MaskSpec:
        """The same where only what is not seen anyway is masked."""
        if where != AllVisible(self, hidden=True):
            raise MaskUsed()
        return self

    def _used(self, *args: Any) -> Any:
        raise MaskUsed()

    __add__ = __mul__ = __rmul__ = __sub__ = __rsub__ = __and__ = __rand__ = __invert__ = __ge__ = __gt__ = _used


def _is_whole(part: Any) -> bool:
    """Whether a part of an index leaves out an axis of one, or takes all keys."""
    if isinstance(part, slice) and isinstance(part.stop, torch.SymInt):
        return part.start is None and part.step is None and bool(part.stop.node.expr.is_Symbol)
    return (type(part) is int and part == 0) or part == slice(None)


def picking(tokens: int) -> None:
    """UnsupportedModel if an index that picks so many tokens does not pick all."""
    longest = _longest.get()
    if longest is not None and tokens < longest:
        raise UnsupportedModel(
            f"an index picks the {tokens} tokens that attention reads, of sequences of up to {longest} tokens",
            f"--max-seq-len {tokens} compiles it: attention then reads all tokens",
            op="topk",
        )


class _Keys:
    """How many keys there are: compared with how many of them are to be picked."""

    def __lt__(self, picked: Any) -> bool:
        longest = _longest.get()
        return type(picked) is not int or longest is None or longest <= picked

    def __gt__(self, picked: Any) -> bool:
        return not self < picked


@dataclass(frozen=True)
class MaskedScores(_Opaque):
    """Scores [1, T, T] that a mask was added to, of which only the best may be picked."""

    mask: MaskSpec
    scores: torch.Tensor

    @property
    def shape(self) -> tuple[Any, ...]:
        """Of which only how many keys there are is known."""
        return (None, None, _Keys())

    def topk(self, count: Any, dim: int = -1, **kwargs: Any) -> AllVisible | Picked:
        """All that the mask lets through, where that is not more than is picked."""
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
    """Indices of keys, in any type."""

    @property
    def indices(self) -> Self:
        """They are nothing else."""
        return self

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """In any type."""
        return self

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise MaskUsed()


@dataclass(frozen=True)
class Picked(_Indices):
    """The indices of the `count` keys that have the highest scores [1, T, T], of those that a mask lets through."""

    mask: MaskSpec
    scores: torch.Tensor
    count: int


@dataclass(frozen=True)
class AllVisible(_Indices):
    """The indices of all keys that a mask lets through, or which keys these are. hidden: the others instead."""

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
    """A mask, and what is added to the scores of a key, whatever the query: row[1, Hkv, 1, T] of whole[1, Hkv, T, T].
    Repeated for the queries' heads it is the same."""

    mask: MaskSpec
    whole: torch.Tensor
    row: torch.Tensor

    @property
    def shape(self) -> tuple[Any, ...]:
        """That of the whole."""
        return self.whole.shape

    def __getitem__(self, index: Any) -> KeyBias:
        if any(part not in (None, slice(None)) for part in index):
            raise MaskUsed()
        return self

    def expand(self, *sizes: Any) -> KeyBias:
        """The same for every query's head."""
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
