"""Record tests/formats/data/hqq.safetensors: matrices that HQQ quantized, and hashes of the values they stand for.

pip install --no-deps --target /tmp/hqq hqq==0.2.8.post1 termcolor tqdm accelerate
PYTHONPATH=/tmp/hqq python benchmarks/record_hqq.py tests/formats/data/hqq.safetensors
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor


def main(path: Path) -> None:
    from hqq.core.bitpack import BitPack  # type: ignore[reportMissingImports]
    from hqq.core.quantize import BaseQuantizeConfig, HQQLinear  # type: ignore[reportMissingImports]

    tensors: dict[str, Tensor] = {}
    expected: dict[str, str] = {}
    torch.manual_seed(0)
    cases = [(8, 64, torch.float16), (4, 64, torch.bfloat16), (3, 32, torch.bfloat16), (2, 16, torch.float16)]
    for bits, group, kind in [*cases, (1, 32, torch.bfloat16)]:
        linear = torch.nn.Linear(64, 16, bias=False)
        linear.weight.data *= 0.1
        layer = HQQLinear(
            linear, BaseQuantizeConfig(bits, group, axis=1), compute_dtype=kind, device="cpu", del_orig=False
        )
        state = {name: value.contiguous() for name, value in layer.state_dict().items()}
        codes = getattr(BitPack, "unpack_" + layer.meta["packing"])(state["W_q"])[: 16 * 64 // group].float()
        scale, zero = state["scale"].float(), state["zero"].float()
        values = scale * codes - (scale * zero).half().float()  # zero points are stored as half floats
        assert (values - scale * (codes - zero)).abs().max() < 0.04 * scale.max(), "of a step"
        expected[f"bits{bits}"] = hashlib.sha256(values.reshape(16, 64).numpy().tobytes()).hexdigest()
        tensors |= {f"bits{bits}.{name}": value.clone() for name, value in state.items()}
    save_file(tensors, path, {"sha256": json.dumps(expected)})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
