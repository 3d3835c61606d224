"""`python rank_double.py FD`: the process of a rank whose GPU is a fake driver, with kernels that do nothing."""

from __future__ import annotations

import sys
from pathlib import Path

for folder in (Path(__file__).parents[1], Path(__file__).parent):
    sys.path.insert(0, str(folder))

from icc.runtime.executor.cuda import rank_main
from icc.runtime.executor.cuda.driver import Cuda
from icc.runtime.executor.cuda.ranked import GpuRankHello
from icc.runtime.executor.rank_processes import run_rank
from plain_driver import PlainDriver

if __name__ == "__main__":
    rank_main.open_gpu = lambda backend, ordinal: Cuda(ordinal, PlainDriver())  # type: ignore[assignment]
    sys.exit(run_rank(int(sys.argv[1]), GpuRankHello, rank_main.start))
