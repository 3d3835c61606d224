"""arm64_step.py FOLDER: runs the steps of a library that cpu_arm64.py wrote, in this process, which may be emulated.

Standard library only: an emulated Python takes seconds to import more.
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path


def main(folder: Path) -> None:
    plan = json.loads((folder / "plan.json").read_text())
    held: dict[str, ctypes.Array[ctypes.c_char]] = {}

    def address(name: str) -> int:
        """The address of a file's content in memory, a multiple of 64."""
        if name not in held:
            held[name] = ctypes.create_string_buffer((folder / name).stat().st_size + 64)
        at = (ctypes.addressof(held[name]) + 63) // 64 * 64
        content = (folder / name).read_bytes()
        ctypes.memmove(at, content, len(content))
        return at

    library = ctypes.CDLL(plan["library"])
    library.icc_create.restype = ctypes.c_void_p
    library.icc_create.argtypes = [ctypes.c_int32, *[ctypes.c_void_p] * 4]
    library.icc_step.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    weights = [address(name) for name in plan["weights"]]
    pointers = (ctypes.c_void_p * max(1, len(weights)))(*weights)
    arena, kv = ctypes.create_string_buffer(plan["arena"] + 64), address("kv")
    base = (ctypes.addressof(arena) + 63) // 64 * 64
    blocks = ctypes.byref(ctypes.c_int64(plan["blocks"]))
    handle = library.icc_create(plan["threads"], pointers, base, kv, blocks)
    for step in plan["steps"]:
        fed = (folder / step["arena"]).read_bytes()
        ctypes.memmove(base, fed, len(fed))
        batch = ctypes.create_string_buffer(bytes.fromhex(step["batch"]))
        places = {int(offset): address(name) for offset, name in step["arrays"].items()}
        for offset, at in places.items():
            ctypes.c_void_p.from_buffer(batch, offset).value = at
        if code := library.icc_step(handle, batch):
            raise SystemExit(f"icc_step: {code}")
        (folder / step["arena"]).write_bytes(ctypes.string_at(base, len(fed)))
        for offset, name in step["arrays"].items():
            if name.endswith("logits"):
                size = (folder / name).stat().st_size
                (folder / name).write_bytes(ctypes.string_at(places[int(offset)], size))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
