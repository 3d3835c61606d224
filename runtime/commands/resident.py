"""`python -m icc.runtime.commands.resident ENGINE`: loads an engine and prints the bytes of memory that the process
then takes."""

from __future__ import annotations

import sys
from pathlib import Path

from ..errors import IccError
from ..loading import open_llm
from ..options import LoadOptions


def resident_bytes(process: int | str = "self") -> int:
    """Bytes of RAM that a process takes now: its own memory, and pages of mapped files that it has touched."""
    rollup = Path(f"/proc/{process}/smaps_rollup").read_text()  # statm's counters lag behind
    return 1024 * int(next(line for line in rollup.splitlines() if line.startswith("Rss:")).split()[1])


def main(path: str) -> int:
    """Load the engine at `path`, print how many bytes of memory the process and its ranks then take, and return the
    exit code. An error is printed in one line."""
    try:
        with open_llm(LoadOptions(path, verify=False)) as llm:
            if llm.manifest.embedding is not None:  # every answer is an array
                import numpy  # noqa: F401
            group = getattr(getattr(llm.executor, "device", None), "group", None)
            print(sum(map(resident_bytes, ["self", *(group.pids if group is not None else ())])))
    except IccError as error:
        print(error.message, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
