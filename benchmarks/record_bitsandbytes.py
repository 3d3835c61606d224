"""Record tests/formats/data/bitsandbytes.safetensors: matrices that bitsandbytes quantized, and a hash of the float32
values that it makes of them.

bitsandbytes brings 130 MB of libraries for GPUs, so it is not among the packages of the tests:

    pip install --no-deps --target /tmp/bnb bitsandbytes==0.50.2
    PYTHONPATH=/tmp/bnb python benchmarks/record_bitsandbytes.py tests/formats/data/bitsandbytes.safetensors
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor


def digest(values: Tensor) -> str:
    return hashlib.sha256(values.to(torch.float32).contiguous().numpy().tobytes()).hexdigest()


def main(path: Path) -> None:
    import bitsandbytes  # type: ignore[reportMissingImports]
    from bitsandbytes import functional  # type: ignore[reportMissingImports]

    tensors: dict[str, Tensor] = {}
    expected: dict[str, str] = {}
    cases = [("nf4", True, (128, 192), 64), ("fp4", True, (24, 96), 64)]
    cases += [("nf4", False, (24, 256), 128), ("fp4", False, (16, 64), 64)]
    for seed, (kind, nested, shape, size) in enumerate(cases):
        name = f"{kind}-{'nested' if nested else 'plain'}.weight"
        values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.02
        codes, state = functional.quantize_4bit(
            values.to(torch.bfloat16), blocksize=size, compress_statistics=nested, quant_type=kind
        )
        tensors[name] = codes
        tensors |= {f"{name}.{part}": value.clone() for part, value in state.as_dict(packed=True).items()}
        state.dtype = torch.float32
        expected[name] = digest(functional.dequantize_4bit(codes, state))
    values = torch.randn((24, 96), generator=torch.Generator().manual_seed(9)) * 0.02
    codes, scales, _ = functional.int8_vectorwise_quant(values.half())
    tensors |= {"int8.weight": codes, "int8.SCB": scales, "int8.weight_format": torch.zeros((), dtype=torch.uint8)}
    save_file(tensors, path, {"bitsandbytes": bitsandbytes.__version__, "sha256": json.dumps(expected)})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
