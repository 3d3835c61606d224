"""CUDA graphs of recurring work: captured the second time it comes; the least recently used graph is evicted."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

from .driver import Cuda

_MOST = 64


class RecurringWork:
    """Runs work by its key. Equal keys must put the same launches with the same parameters on the stream."""

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        self._known: OrderedDict[Hashable, Any] = OrderedDict()  # key -> graph; None: the work came once

    def run(self, key: Hashable, work: Callable[[], None]) -> None:
        """Put work on the stream: launch by launch the first time, as a graph from then on."""
        if key not in self._known:
            self._known[key] = None
            work()
        else:
            if self._known[key] is None:
                self._known[key] = self._cuda.capture(work)
            self._cuda.launch_graph(self._known[key])
            self._known.move_to_end(key)
        if len(self._known) > _MOST:
            _, graph = self._known.popitem(last=False)
            if graph is not None:
                self._cuda.forget_graph(graph)
