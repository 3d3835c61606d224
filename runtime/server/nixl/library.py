"""How NIXL is imported (https://github.com/ai-dynamo/nixl), and the part of its agent that icc uses."""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import Any, Protocol

from ...errors import MissingExtraError, install

# the package `nixl` installs one of the others, which also work without their dependencies
_PACKAGES = ("nixl_cu12", "nixl_cu13", "nixl")


class Agent(Protocol):
    """The interface of nixl_agent. Descriptors are opaque; a region is (address, bytes, device, name). Failures raise
    any exception, or return "ERR"."""

    def register_memory(self, reg_list: list[tuple[int, int, int, str]], mem_type: str) -> Any:
        """Allow other agents with the metadata to read regions."""
        ...

    def deregister_memory(self, dereg_list: Any) -> None:
        """Revoke that."""
        ...

    def get_partial_agent_metadata(self, descs: Any, inc_conn_info: bool, backends: list[str]) -> bytes:
        """The metadata with which another agent can connect and read only these regions."""
        ...

    def add_remote_agent(self, metadata: bytes) -> bytes:
        """Load another agent's metadata; returns its name."""
        ...

    def remove_remote_agent(self, agent: bytes) -> None:
        """Disconnect from an agent, and drop its metadata."""
        ...

    def get_xfer_descs(self, descs: list[tuple[int, int, int]], mem_type: str) -> Any:
        """Descriptors of memory for a transfer: (address, bytes, device) each."""
        ...

    def initialize_xfer(self, operation: str, local_descs: Any, remote_descs: Any, remote_agent: bytes) -> Any:
        """The handle of a new transfer, not started yet."""
        ...

    def transfer(self, handle: Any) -> str:
        """Start a transfer; returns its state: "DONE", "PROC" or "ERR"."""
        ...

    def check_xfer_state(self, handle: Any) -> str:
        """The state, as `transfer`."""
        ...

    def release_xfer_handle(self, handle: Any) -> None:
        """Release a transfer; a running one is cancelled."""
        ...


def check_nixl() -> None:
    """MissingExtraError if NIXL is not installed."""
    _package()


def make_agent(name: str) -> Agent:
    """An agent over UCX. Raises as `check_nixl`, and any exception of NIXL."""
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    api = importlib.import_module(f"{_package()}._api")
    return api.nixl_agent(name, api.nixl_agent_config(backends=["UCX"]))


def _package() -> str:
    for package in _PACKAGES:
        if importlib.util.find_spec(package) is not None:
            return package
    raise MissingExtraError("--nixl: NIXL is not installed", f"{install('nixl')}, or pip install --no-deps nixl-cu12")
