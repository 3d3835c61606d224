"""The operands and results of a layer: tensors and plain values, in tuples, lists and mappings.

A value of any other kind might hide state that the layer reads or writes. A call with such a value is `Opaque`, and its
layer is not cut out.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, MutableMapping
from types import NoneType
from typing import Any

import torch
from torch import Tensor

from ..mask_spec import AllVisible, MaskSpec

PLAIN = (NoneType, bool, int, float, str, torch.dtype, torch.device, MaskSpec, AllVisible)


class Opaque(Exception):
    """A value whose content cannot be inspected."""


def mapped(value: Any, fn: Callable[[Any], Any]) -> Any:
    """A copy of `value` with `fn` applied to every leaf: everything in it that is no tuple, list or mapping."""
    if type(value) is tuple:
        return tuple(mapped(v, fn) for v in value)
    if type(value) is list:
        return [mapped(v, fn) for v in value]
    if isinstance(value, MutableMapping):
        new = copy.copy(value)
        for key, item in value.items():
            new[key] = mapped(item, fn)
        return new
    return fn(value)


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors in a value, of any shape, in order; with duplicates."""
    found: list[Tensor] = []
    mapped(value, lambda leaf: found.append(leaf) if isinstance(leaf, Tensor) else None)
    return found


class LayerCall:
    """The arguments of a call of a layer.

    tensors: its tensors, each once, in order of first appearance. description: everything else; two calls with equal
    descriptions differ only in the values of their tensors. Raises Opaque.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._args, self._kwargs = args, kwargs
        self._lent = _writable((args, tuple(kwargs.values())))
        self._numbers: dict[int, int] = {}
        self.tensors: list[Tensor] = []
        self.description = self._described((args, kwargs))

    def run(self, layer: Callable[..., Any], tensors: list[Tensor]) -> Any:
        """Call a layer with other tensors, of any shape. Returns its result, and the content of its lists and mappings
        afterwards."""

        def other(leaf: Any) -> Any:
            return tensors[self._numbers[id(leaf)]] if isinstance(leaf, Tensor) else leaf

        args, kwargs = mapped((self._args, self._kwargs), other)
        lent = _writable((args, tuple(kwargs.values())))
        return layer(*args, **kwargs), lent

    def settle(self, outcome: Any) -> Any:
        """Copy the content of lists and mappings in `outcome`, as returned by `run`, into the caller's, and return its
        result."""
        result, lent = outcome
        for mine, theirs in zip(self._lent, lent, strict=True):
            mine.clear()
            mine.extend(theirs) if isinstance(mine, list) else mine.update(theirs)
        return result

    def _described(self, value: Any) -> Any:
        if type(value) in (tuple, list):
            return type(value), [self._described(v) for v in value]
        if isinstance(value, MutableMapping):
            return type(value), [(self._described(k), self._described(v)) for k, v in value.items()]
        if isinstance(value, Tensor):
            if id(value) not in self._numbers:
                self._numbers[id(value)] = len(self.tensors)
                self.tensors.append(value)
            return value.dtype, [str(s) for s in value.shape], self._numbers[id(value)]
        if isinstance(value, torch.SymInt):
            return torch.SymInt, str(value)  # its expression: comparing two of them would add a guard
        if type(value) in PLAIN:
            return type(value), value
        raise Opaque(type(value).__name__)


def _writable(value: Any) -> list[Any]:
    """The lists and mappings in `value`, which a layer can write to. Raises Opaque for one inside another."""
    if type(value) is tuple:
        return [c for v in value for c in _writable(v)]
    if isinstance(value, (list, MutableMapping)):
        if _writable(tuple(value) if isinstance(value, list) else tuple(value.values())):
            raise Opaque("a container in a container")
        return [value]
    return []
