"""Launches prepared when the engine is loaded: a step fills in only what depends on its sizes."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...format.plan import FIRST_OWN, HIDDEN_POINTERS, Exchange, KernelObject, Launch
from ..walk import LaunchArgument, exchanged
from .driver import Cuda
from .nccl import Communicator

FLOAT32 = 4  # bytes


class ReadyLaunch:
    """One launch of a loaded kernel. Its parameters lie in memory as the driver takes them: 8 bytes each; of an integer
    the kernel reads the first 4."""

    __slots__ = (
        "_dependent", "_function", "_grid", "_moving", "_own", "_params", "_pointers", "_shared", "_sizes", "_threads",
        "_values", "moves",
    )  # fmt: skip

    def __init__(
        self,
        function: Any,
        found: KernelObject,
        launch: Launch,
        arguments: Sequence[LaunchArgument],
        address: Callable[[LaunchArgument], int],
    ) -> None:
        """address: gives the address of a pointer argument in a step of 0 tokens."""
        self._function, self._grid = function, launch.grid
        self.moves = launch.makes_moves
        self._dependent = found.dependent
        self._threads, self._shared = found.warps * found.warp_size, found.shared_bytes
        count = len(arguments) + HIDDEN_POINTERS
        self._values = (ctypes.c_uint64 * count)()
        first = ctypes.addressof(self._values)
        self._pointers = (ctypes.c_uint64 * count)(*(first + 8 * i for i in range(count)))
        self._params = ctypes.addressof(self._pointers)
        self._sizes = [(i, argument.name) for i, argument in enumerate(arguments) if not argument.space]
        self._moving: list[tuple[int, int, int]] = []
        self._own: list[tuple[int, int]] = []
        for i, argument in enumerate(arguments):
            if argument.per_token or argument.per_own:
                self._moving.append((i, address(argument), argument.per_token))
                self._own += [(i, argument.per_own)] if argument.per_own else []
            elif argument.space:
                self._values[i] = address(argument)

    def put(self, cuda: Cuda, sizes: Mapping[str, int]) -> None:
        """Put the launch on the stream, unless its grid is empty. sizes: those of the step, see `Phase.rank_sizes`."""
        x, y, z = (dim.value(sizes) if dim.terms else dim.constant for dim in self._grid)
        if not x * y * z:
            return
        values = self._values
        for i, name in self._sizes:
            values[i] = sizes[name]
        tokens = sizes["num_tokens"]
        for i, base, per_token in self._moving:
            values[i] = base + per_token * tokens
        for i, per_own in self._own:
            values[i] += per_own * sizes[FIRST_OWN]
        cuda.launch(self._function, (x, y, z), self._threads, self._shared, self._params, self._dependent)


class ReadyExchange:
    """The calls of a communicator that replace a launch."""

    moves = False

    def __init__(
        self,
        communicator: Communicator,
        facts: Exchange,
        arguments: Sequence[LaunchArgument],
        address: Callable[[LaunchArgument], int],
    ) -> None:
        self._communicator, self._facts = communicator, facts
        self._places = [(address(argument), argument.per_token) for argument in arguments[:2]]

    def put(self, cuda: Cuda, sizes: Mapping[str, int]) -> None:
        """Put the calls on the stream, unless there is nothing to exchange. sizes: those of the step, see
        `Phase.rank_sizes`."""
        source, target = (base + per_token * sizes["num_tokens"] for base, per_token in self._places)
        for one in exchanged(self._facts, sizes):
            places = source + FLOAT32 * one.source, target + FLOAT32 * one.target
            self._communicator.exchange(one.op, *places, one.count, cuda.stream)
