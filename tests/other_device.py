"""A fake device beside the CPU: its tensors are wrappers that claim to be on "meta" and compute on the CPU, and code
that mixes them with CPU tensors fails as it does on a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

DEVICE = torch.device("meta")
_MOVES = {"_to_copy", "_local_scalar_dense", "copy_", "equal"}


class There(Tensor):
    """A tensor on the fake device."""

    here: Tensor

    @staticmethod
    def __new__(cls, here: Tensor) -> There:
        found = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, here.shape, here.stride(), here.storage_offset(), dtype=here.dtype, device=DEVICE
        )
        found.here = here
        return found

    def tolist(self) -> Any:
        return self.here.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    __torch_function__ = torch._C._disabled_torch_function_impl


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
    wanted = kwargs.get("device")
    moves = func._schema.name.removeprefix("aten::") in _MOVES
    there = any(isinstance(x, There) for x in tensors)
    if there and not moves and any(not isinstance(x, There) and x.dim() for x in tensors):
        raise RuntimeError(f"Expected all tensors to be on the same device: {func}")
    plain = {name: value for name, value in kwargs.items() if name != "device"}
    given, named = tree_map(lambda x: x.here if isinstance(x, There) else x, (args, plain))
    if wanted is not None:
        there = torch.device(wanted).type == DEVICE.type
        named["device"] = torch.device("cpu")
    found = func(*given, **named)
    if func._schema.is_mutable and args and isinstance(args[0], Tensor) and not isinstance(args[0], There):
        return args[0]
    same = {id(x.here): x for x in tensors if isinstance(x, There)}
    return tree_map(lambda x: same.get(id(x), There(x) if there else x) if isinstance(x, Tensor) else x, found)


class _Mode(TorchDispatchMode):
    """Wraps tensors that are created on the device. ran: the names of the ops that ran there."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(isinstance(x, There) for x in tree_flatten((args, kwargs))[0]):
            self.ran.append(func._schema.name.removeprefix("aten::"))
        return _run(func, args, kwargs or {})


@contextlib.contextmanager
def other_device() -> Iterator[list[str]]:
    """Inside the block, `meta` is the fake device; yields a list of the names of ops that ran there."""
    with _Mode() as mode:
        yield mode.ran
