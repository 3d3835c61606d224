"""Records the attributes of modules that some code reads, and whether it writes any: its result can depend on nothing
else."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import MethodType
from typing import Any
from unittest import mock

from torch import Tensor, nn

_WRITERS = frozenset({"register_buffer", "register_parameter", "register_module", "add_module"})
# these are part of a module's structure
_STRUCTURE = frozenset({"__dict__", "__class__", "_modules", "_parameters", "_buffers"})


@dataclass
class Reads:
    """Names of the attributes that were read, by the `state_id` of the module. wrote: whether any module was
    changed."""

    names: dict[int, set[str]] = field(default_factory=dict)
    wrote: bool = False

    def of(self, module: nn.Module) -> set[str]:
        """Names of attributes that were read from a module, without those of its structure."""
        return self.names.get(state_id(module), set()) - _STRUCTURE


def state_id(module: nn.Module) -> int:
    """The identity of a module's state, which torch.export's proxies share with the module."""
    return id(object.__getattribute__(module, "__dict__"))


@contextlib.contextmanager
def recorded_reads() -> Iterator[Reads]:
    """A context that records the attributes that code reads from modules."""
    reads = Reads()
    read, write = nn.Module.__getattribute__, nn.Module.__setattr__

    def reading(self: nn.Module, name: str) -> Any:
        reads.names.setdefault(state_id(self), set()).add(name)
        reads.wrote |= name in _WRITERS
        return read(self, name)

    def writing(self: nn.Module, name: str, value: Any) -> None:
        reads.wrote |= name not in ("__dict__", "__class__")  # torch.export sets these of its proxies
        write(self, name, value)

    with (
        mock.patch.object(nn.Module, "__getattribute__", reading),
        mock.patch.object(nn.Module, "__setattr__", writing),
    ):
        yield reads


def same_state(names: set[str], a: dict[str, Any], b: dict[str, Any], twins: dict[int, nn.Module]) -> bool:
    """Whether code that reads `names` from a module finds the same values in state `b` as in `a`. twins: the module of
    `b` for each module of `a`, by the latter's id.
    """
    return all((n in a) == (n in b) and _equal(a.get(n), b.get(n), twins) for n in names)


def _equal(a: Any, b: Any, twins: dict[int, nn.Module]) -> bool:
    if a is b:
        return True
    if type(a) is not type(b) or isinstance(a, Tensor):
        return False
    if isinstance(a, nn.Module):
        return twins.get(id(a)) is b
    if isinstance(a, MethodType):
        return a.__func__ is b.__func__ and _equal(a.__self__, b.__self__, twins)
    if isinstance(a, functools.partial):
        return _equal((a.func, a.args, a.keywords), (b.func, b.args, b.keywords), twins)
    if isinstance(a, dict):
        return list(a) == list(b) and all(_equal(a[k], b[k], twins) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(_equal(x, y, twins) for x, y in zip(a, b, strict=True))
    try:
        return (a == b) is True
    except (RuntimeError, ValueError, TypeError):
        return False  # values that cannot be compared, such as arrays
