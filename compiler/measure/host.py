"""Facts of this machine that matter to engines."""

from __future__ import annotations

from ...runtime.executor.cpu.bandwidth import read_bandwidth
from ...runtime.executor.cpu.cores import usable_cores
from ...runtime.executor.cpu.memory import available_bytes

__all__ = ["available_bytes", "read_bandwidth", "usable_cores"]
