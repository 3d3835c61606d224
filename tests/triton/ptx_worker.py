"""A process that compiles as objects/worker.py does, but answers with PTX in place of Triton's IR without layouts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "compiler" / "backends" / "triton" / "objects"))
import worker  # type: ignore[import-not-found]

_finish = worker._finish


def _with_ptx(kernel: Any, job: dict[str, Any]) -> dict[str, Any]:
    answer = _finish(kernel, job)
    Path(job["plain"]).write_text(kernel.asm["ptx"])
    return answer


worker._finish = _with_ptx
worker.main()
