"""A NIXL agent without NIXL: its metadata contain the bytes themselves. `Nixl` starts it as the process `python
fake_nixl.py FD`."""

from __future__ import annotations

import ctypes
import socket
import sys
from typing import Any

import msgspec
from icc.runtime.server.nixl.messages import MoverReady, frame
from icc.runtime.server.nixl.mover_main import serve


class FakeAgent:
    """The protocol `Agent`, within one process or between two. Only registered bytes can be read."""

    def __init__(self, name: str = "fake") -> None:
        self.name = name
        self.registered: list[tuple[int, int]] = []
        self.known: dict[bytes, dict[int, bytes]] = {}
        self.state = "DONE"  # the state that each transfer reports
        self.released = 0

    def register_memory(self, reg_list: Any, mem_type: str) -> Any:
        assert mem_type == "DRAM"
        [(address, size, device, _)] = reg_list
        assert device == 0
        self.registered.append((address, size))
        return (address, size)

    def deregister_memory(self, dereg_list: Any) -> None:
        self.registered.remove(dereg_list)

    def get_partial_agent_metadata(self, descs: Any, inc_conn_info: bool, backends: list[str]) -> bytes:
        assert inc_conn_info and descs in self.registered
        return msgspec.json.encode((self.name, descs[0], ctypes.string_at(*descs)))

    def add_remote_agent(self, metadata: bytes) -> bytes:
        name, address, content = msgspec.json.decode(metadata, type=tuple[str, int, bytes])
        self.known.setdefault(name.encode(), {})[address] = content
        return name.encode()

    def remove_remote_agent(self, agent: bytes) -> None:
        del self.known[agent]

    def get_xfer_descs(self, descs: Any, mem_type: str) -> Any:
        return descs

    def initialize_xfer(self, operation: str, local_descs: Any, remote_descs: Any, remote_agent: bytes) -> Any:
        assert operation == "READ"
        return list(zip(local_descs, remote_descs, strict=True)), remote_agent

    def transfer(self, handle: Any) -> str:
        return "PROC"

    def check_xfer_state(self, handle: Any) -> str:
        if self.state != "DONE":
            return self.state
        pairs, agent = handle
        for (here, size, _), (there, size_there, _) in pairs:
            assert size == size_there
            assert any(first <= here and here + size <= first + length for first, length in self.registered)
            [content] = [
                content[there - first : there - first + size]
                for first, content in self.known[agent].items()
                if first <= there and there + size <= first + len(content)
            ]
            ctypes.memmove(here, content, size)
        return "DONE"

    def release_xfer_handle(self, handle: Any) -> None:
        self.released += 1


if __name__ == "__main__":
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.sendall(frame(MoverReady()))
    serve(connection, FakeAgent(f"fake-{id(connection)}"))
