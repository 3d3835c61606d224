"""`python -m rank_double FD`: the process of a rank whose GPU is a fake driver, with kernels that do nothing.

ICC_RANK_FAULT: "start" fails while it loads, "hang" takes no message after the first ones.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

for _folder in (Path(__file__).parents[1], Path(__file__).parent):
    sys.path.insert(0, str(_folder))

from fake_cuda import FakeDriver  # noqa: E402
from icc.runtime.errors import CapacityError  # noqa: E402
from icc.runtime.executor.cuda import rank_main  # noqa: E402
from icc.runtime.executor.cuda.driver import Cuda  # noqa: E402
from icc.runtime.executor.cuda.ranked import FollowingCudaDevice, GpuRankHello  # noqa: E402
from icc.runtime.executor.rank_processes import run_rank  # noqa: E402


class DryDriver(FakeDriver):
    """A driver that loads any kernel and runs none."""

    def __init__(self) -> None:
        super().__init__({}, count=8, dry=True)

    def cuModuleLoadData(self, binary: bytes) -> tuple[int, Any]:  # noqa: N802
        self.live["module"] += 1
        return 0, SimpleNamespace()

    def cuModuleGetFunction(self, module: Any, name: bytes) -> tuple[int, Any]:  # noqa: N802
        return 0, module

    def cuLaunchKernel(self, *args: Any) -> tuple[int]:  # noqa: N802
        return self._put(lambda: None)

    cuLaunchKernelEx = cuLaunchKernel  # noqa: N815


def main(descriptor: int) -> int:
    fault = os.environ.get("ICC_RANK_FAULT")
    take = FollowingCudaDevice.obey

    def obey(device: FollowingCudaDevice, message: bytes) -> None:
        if fault == "hang" and b"send" in message:
            time.sleep(600)
        take(device, message)

    def open_gpu(backend: str, ordinal: int) -> Cuda:
        if fault == "start":
            raise CapacityError(f"GPU {ordinal} is full", "free some")
        return Cuda(ordinal, DryDriver())

    FollowingCudaDevice.obey = obey  # type: ignore[method-assign]
    rank_main.open_gpu = open_gpu  # type: ignore[assignment]
    return run_rank(descriptor, GpuRankHello, rank_main.start)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
