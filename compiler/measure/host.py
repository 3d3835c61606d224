"""This machine, as far as engines feel it."""

from __future__ import annotations

from ...runtime.executor.cpu.bandwidth import read_bandwidth
from ...runtime.executor.cpu.memory import available_bytes, default_threads

__all__ = ["available_bytes", "default_threads", "read_bandwidth"]
