"""Record tests/adapters/data/loftq.safetensors: a weight, and the base weights that PEFT's LoftQ initialization makes
of it. PEFT asks for a GPU there and is given the CPU; bitsandbytes is not among the packages of the tests:

    pip install --no-deps --target /tmp/bnb bitsandbytes==0.50.2
    PYTHONPATH=/tmp/bnb python benchmarks/record_loftq.py tests/adapters/data/loftq.safetensors
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

RANK = 4
CASES = ((4, 1), (4, 2), (4, 5), (8, 1), (8, 3))  # bits, iterations


def main(path: Path) -> None:
    import bitsandbytes  # type: ignore[reportMissingImports]
    import peft
    from peft.utils import loftq_utils

    names: dict[str, Any] = {**vars(loftq_utils), "clear_device_cache": lambda: None}
    exec(inspect.getsource(loftq_utils.loftq_init).replace('"cuda"', '"cpu"'), names)
    weight = torch.randn((24, 72), generator=torch.Generator().manual_seed(3)) * 0.02
    tensors = {"weight": weight}
    for bits, iterations in CASES:
        base, _, _ = names["loftq_init"](weight, bits, RANK, iterations)
        tensors[f"{bits}.{iterations}"] = base.contiguous()
    save_file(tensors, path, {"bitsandbytes": bitsandbytes.__version__, "peft": peft.__version__})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
