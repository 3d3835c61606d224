"""A race detector over Triton's interpreter: finds programs of one launch that touch the same bytes without an order.

Programs of a launch run concurrently, in any order. Two of them may touch a byte only if both read it, or if one
executes an atomic after its access and the other one before its own: an atomic at an address orders all that its
program did before ahead of all that a program does after a later atomic there. The interpreter runs programs one after
the other, so a race has no effect there; instead the bytes that each touches are recorded. Programs can also run in
another order: `reverse` and `shuffle` renumber them. An access outside the tensors of the launch is also an error.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

Order = Callable[[int], list[int]]  # number of programs -> their order


def in_order(count: int) -> list[int]:
    return list(range(count))


def reverse(count: int) -> list[int]:
    return list(range(count))[::-1]


def shuffle(count: int) -> list[int]:
    order = list(range(count))
    random.Random(count).shuffle(order)
    return order


class Race(AssertionError):
    """Two programs of a launch touch the same byte, and nothing orders them."""


class OutOfBounds(AssertionError):
    """A program touches memory outside all arguments."""


class Launch:
    """The bytes that the programs of one launch have touched. A segment is the part of a program between two atomics.

    places: the first address and the end of each tensor argument.
    """

    def __init__(self, places: Sequence[tuple[int, int]] = ()) -> None:
        self.places = np.array(sorted(places), dtype=np.uint64).reshape(-1, 2)
        self.programs: list[int] = []  # by segment
        self.before: list[frozenset[int]] = []  # by segment: the segments that are ordered before it
        self.counted: dict[int, frozenset[int]] = {}  # by address of an atomic: the segments before the last one there
        self.touched: dict[bool, list[tuple[int, np.ndarray]]] = {False: [], True: []}  # reads and writes, by byte

    def enter(self, program: int, before: frozenset[int] = frozenset()) -> None:
        self.programs.append(program)
        self.before.append(before)

    def touch(self, addresses: np.ndarray, mask: np.ndarray, width: int, writes: bool) -> None:
        kept = np.unique(addresses[mask.astype(bool)])
        if len(kept):
            self._check_bounds(kept, width)
            self.touched[writes].append(
                (len(self.programs) - 1, (kept[:, None] + np.arange(width, dtype=np.uint64)).ravel())
            )

    def _check_bounds(self, addresses: np.ndarray, width: int) -> None:
        """Raise OutOfBounds if an element is not within one of the places, which may overlap."""
        inside = np.zeros(len(addresses), dtype=bool)
        for begin, end in self.places:
            inside |= (addresses >= begin) & (addresses + np.uint64(width) <= end)
        if not inside.all():
            raise OutOfBounds(f"{len(inside) - inside.sum()} of {len(inside)} elements are in no argument")

    def count(self, addresses: np.ndarray, mask: np.ndarray) -> None:
        """Record an atomic: the program sees what others did before theirs, and continues in a new segment."""
        segment = len(self.programs) - 1
        done = self.before[segment] | {segment}
        for address in np.unique(addresses[mask.astype(bool)]).tolist():
            done |= self.counted.get(address, frozenset())
        for address in np.unique(addresses[mask.astype(bool)]).tolist():
            self.counted[address] = done
        self.enter(self.programs[segment], done)

    def check(self, name: str) -> None:
        """Raise Race if there is one."""
        if not self.touched[True]:
            return
        written, writer = _flat(self.touched[True])
        order = np.argsort(written, kind="stable")
        written, writer = written[order], writer[order]
        for kind in (True, False):
            if not self.touched[kind]:
                continue
            byte, segment = _flat(self.touched[kind])
            first, end = np.searchsorted(written, byte, "left"), np.searchsorted(written, byte, "right")
            for step in range(int((end - first).max(initial=0))):
                there = first + step < end
                pairs = np.stack([writer[(first + step)[there]], segment[there]])
                for one, other in np.unique(pairs, axis=1).T.tolist():
                    self._check_pair(
                        name, one, other, "written by two programs" if kind else "written by one, read by another"
                    )

    def _check_pair(self, name: str, one: int, other: int, what: str) -> None:
        if (
            self.programs[one] != self.programs[other]
            and one not in self.before[other]
            and other not in self.before[one]
        ):
            raise Race(f"{name}: a byte is {what}, programs {self.programs[one]} and {self.programs[other]}")


def _flat(touched: list[tuple[int, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """The addresses of touched bytes, and the segment of each."""
    segments = np.concatenate([np.full(len(found), segment) for segment, found in touched])
    return np.concatenate([found for _, found in touched]), segments


@contextmanager
def detecting(order: Order = in_order) -> Iterator[list[str]]:
    """Launches inside run their programs in this order, and raise Race. Yields a list of the kernels that ran."""
    import triton.runtime.interpreter as interpreter

    native, builder = interpreter._interpreter, interpreter.interpreter_builder  # type: ignore[attr-defined]
    place, dim, call = builder.set_grid_idx, builder.set_grid_dim, interpreter.GridExecutor.__call__
    now = SimpleNamespace(launch=Launch(), order=[0], next=0)
    seen: list[str] = []

    def set_dim(nx: int, ny: int, nz: int) -> None:
        dim(nx, ny, nz)
        now.order, now.next = order(nx * ny * nz), 0

    def set_place(x: int, y: int, z: int) -> None:
        program = now.order[now.next]
        now.next += 1
        _, ny, nz = builder.grid_dim
        place(program // (ny * nz), program // nz % ny, program % nz)
        now.launch.enter(program)

    def load(ptrs: np.ndarray, mask: np.ndarray, other: np.ndarray, kind: Any) -> Any:
        now.launch.touch(ptrs, mask, np.dtype(kind).itemsize, False)
        return native.load(ptrs, mask, other, kind)

    def store(ptrs: np.ndarray, value: np.ndarray, mask: np.ndarray) -> Any:
        now.launch.touch(ptrs, mask, value.dtype.itemsize, True)
        return native.store(ptrs, value, mask)

    def atomic_rmw(operation: Any, ptrs: np.ndarray, value: np.ndarray, mask: np.ndarray, sem: Any) -> Any:
        found = native.atomic_rmw(operation, ptrs, value, mask, sem)
        now.launch.count(ptrs, mask)
        return found

    def run(self: Any, *args: Any, **options: Any) -> Any:
        tensors = [value for value in (*args, *options.values()) if isinstance(value, torch.Tensor)]
        now.launch = Launch([(t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for t in tensors])
        found = call(self, *args, **options)
        seen.append(self.fn.__name__)
        now.launch.check(self.fn.__name__)
        return found

    hooks = {"load": load, "store": store, "atomic_rmw": atomic_rmw}
    proxy = SimpleNamespace(
        **{name: getattr(native, name) for name in dir(native) if not name.startswith("__")} | hooks
    )
    interpreter._interpreter = proxy  # type: ignore[attr-defined]
    builder.set_grid_idx, builder.set_grid_dim, interpreter.GridExecutor.__call__ = set_place, set_dim, run
    try:
        yield seen
    finally:
        interpreter._interpreter, interpreter.GridExecutor.__call__ = native, call  # type: ignore[attr-defined]
        del builder.set_grid_idx, builder.set_grid_dim
