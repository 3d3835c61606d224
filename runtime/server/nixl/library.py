"""How NIXL is imported (https://github.com/ai-dynamo/nixl), and the part of its agent that icc uses."""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import Any, Protocol

from ...errors import MissingExtraError, install

# the package `nixl` brings one of the others; without their dependencies the others are enough
_PACKAGES = ("nixl_cu12", "nixl_cu13", "nixl")


class Agent(Protocol):
    """nixl_agent. Descriptors are opaque; a region is its address, bytes, device and name. What fails raises any
    exception, or says "ERR"."""

    def register_memory(self, reg_list: list[tuple[int, int, int, str]], mem_type: str) -> Any:
        """Let others read regions, once they have the metadata."""
        ...

    def deregister_memory(self, dereg_list: Any) -> None:
        """Let nobody read what was registered any more."""
        ...

    def get_partial_agent_metadata(self, descs: Any, inc_conn_info: bool, backends: list[str]) -> bytes:
        """What another agent needs to connect, and to read these regions alone."""
        ...

    def add_remote_agent(self, metadata: bytes) -> bytes:
        """Learn of another agent's regions; its name."""
        ...

    def remove_remote_agent(self, agent: bytes) -> None:
        """Disconnect, and forget what was learned."""
        ...

    def get_xfer_descs(self, descs: list[tuple[int, int, int]], mem_type: str) -> Any:
        """Pieces of memory for a transfer: address, bytes and device each."""
        ...

    def initialize_xfer(self, operation: str, local_descs: Any, remote_descs: Any, remote_agent: bytes) -> Any:
        """A transfer that can be begun."""
        ...

    def transfer(self, handle: Any) -> str:
        """Begin it: "DONE", "PROC" or "ERR"."""
        ...

    def check_xfer_state(self, handle: Any) -> str:
        """As `transfer` says."""
        ...

    def release_xfer_handle(self, handle: Any) -> None:
        """Forget a transfer; one that runs is cancelled."""
        ...


def check_nixl() -> None:
    """MissingExtraError where NIXL is not installed."""
    _package()


def make_agent(name: str) -> Agent:
    """An agent over UCX. Errors: those of `check_nixl`, and whatever NIXL raises."""
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    api = importlib.import_module(f"{_package()}._api")
    return api.nixl_agent(name, api.nixl_agent_config(backends=["UCX"]))


def _package() -> str:
    for package in _PACKAGES:
        if importlib.util.find_spec(package) is not None:
            return package
    raise MissingExtraError("--nixl: NIXL is not installed", f"{install('nixl')}, or pip install --no-deps nixl-cu12")
