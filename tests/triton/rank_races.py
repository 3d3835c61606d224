"""A race detector over kernels of several ranks: finds programs that touch the same bytes without an order.

Programs of different ranks are ordered by a release of one that the other sees with an acquire, at one address; a
rank's own launches run one after the other. Unlike in races.py, an atomic orders only by its semantics, because a rank
that polls has not been notified yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from icc.compiler.backends.triton.interpreter import launch
from icc.compiler.backends.triton.lockstep import Lockstep
from icc.compiler.backends.triton.spec import LaunchSpec
from races import Launch

Arguments = Callable[[int], Sequence[torch.Tensor | int]]  # arguments of a launch by rank


class RankLaunches(Launch):
    """The bytes that the launches of all ranks have touched; programs are numbered consecutively."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.done: list[set[int]] = [set() for _ in range(ranks)]  # segments before a rank's next launch
        self.now = [0] * ranks  # the current segment of each rank
        self.numbers = 0

    def launch(self, rank: int, places: Sequence[tuple[int, int]]) -> None:
        own = np.array(sorted(places), dtype=np.uint64).reshape(-1, 2)
        self.places = np.concatenate([self.places, own])

    def program(self, rank: int) -> None:
        self.numbers += 1
        self.enter(self.numbers, frozenset(self.done[rank]))
        self.now[rank] = len(self.programs) - 1

    def ended(self, rank: int, first: int, owners: Sequence[int]) -> None:
        """A launch has ended: all that its programs did and saw comes before what the rank does next."""
        for segment in range(first, len(self.programs)):
            if owners[segment] == rank:
                self.done[rank] |= {segment, *self.before[segment]}

    def synchronize(self, rank: int, address: int, sem: str) -> None:
        segment = self.now[rank]
        done = self.before[segment] | {segment}
        if "acquire" in sem:
            done |= self.counted.get(address, frozenset())
        if "release" in sem:
            self.counted[address] = self.counted.get(address, frozenset()) | done
        self.enter(self.programs[segment], done)
        self.now[rank] = len(self.programs) - 1


def run_racing(
    ranks: int,
    launches: Sequence[tuple[LaunchSpec, tuple[int, ...], Arguments]],
    lockstep: Lockstep,
    programs: bool = False,
) -> None:
    """Run the launches on every rank, in lockstep. Raises Race if two programs touch the same byte and nothing orders
    them. programs: the ranks are the programs of each launch, which wait for each other."""
    found = RankLaunches(ranks)
    owners: list[int] = []
    with _watching(found, owners, lockstep, ranks if programs else 0):

        def run(rank: int) -> None:
            for spec, grid, arguments in launches:
                args = arguments(rank)
                tensors = [value for value in args if isinstance(value, torch.Tensor)]
                found.launch(rank, [(t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for t in tensors])
                first = len(found.programs)
                launch(spec, grid, args)
                found.ended(rank, first, owners)
                lockstep.give_way(rank)

        lockstep.run([partial(run, rank) for rank in range(ranks)])
    found.check(launches[0][0].entry)


@contextmanager
def _watching(found: RankLaunches, owners: list[int], lockstep: Lockstep, programs: int) -> Iterator[None]:
    """Record accesses inside. programs: the number of programs of a launch, each run by a rank; 0: every rank runs all
    programs of its launches."""
    import triton.runtime.interpreter as interpreter

    native, builder = interpreter._interpreter, interpreter.interpreter_builder  # type: ignore[attr-defined]
    place, dim, rmw = builder.set_grid_idx, builder.set_grid_dim, builder.create_atomic_rmw

    def own() -> None:
        owners.extend([lockstep.running] * (len(found.programs) - len(owners)))

    def set_place(x: int, y: int, z: int) -> None:
        if programs:
            dim(programs, 1, 1)
            x = lockstep.running
        place(x, y, z)
        found.program(lockstep.running)
        own()

    def touch(ptrs: np.ndarray, mask: np.ndarray, width: int, writes: bool) -> None:
        kept = np.unique(ptrs[mask.astype(bool)])
        if len(kept):
            found._check_bounds(kept, width)
            touched = (kept[:, None] + np.arange(width, dtype=np.uint64)).ravel()
            found.touched[writes].append((found.now[lockstep.running], touched))

    def load(ptrs: np.ndarray, mask: np.ndarray, other: np.ndarray, kind: Any) -> Any:
        touch(ptrs, mask, np.dtype(kind).itemsize, False)
        return native.load(ptrs, mask, other, kind)

    def store(ptrs: np.ndarray, value: np.ndarray, mask: np.ndarray) -> Any:
        touch(ptrs, mask, value.dtype.itemsize, True)
        return native.store(ptrs, value, mask)

    def atomic(op: Any, ptr: Any, val: Any, mask: Any, sem: Any, scope: Any) -> Any:
        assert str(scope).endswith("GPU" if programs else "SYSTEM"), scope
        result = rmw(op, ptr, val, mask, sem, scope)  # other ranks may have run meanwhile
        found.synchronize(lockstep.running, int(ptr.data.flat[0]), str(sem).lower())
        own()
        return result

    hooks = {"load": load, "store": store}
    names = (name for name in dir(native) if not name.startswith("__"))
    interpreter._interpreter = SimpleNamespace(**{name: getattr(native, name) for name in names} | hooks)  # type: ignore[attr-defined]
    builder.set_grid_idx, builder.create_atomic_rmw = set_place, atomic
    builder.set_grid_dim = dim
    try:
        yield
    finally:
        interpreter._interpreter = native  # type: ignore[attr-defined]
        del builder.set_grid_idx, builder.create_atomic_rmw, builder.set_grid_dim
