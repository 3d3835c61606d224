"""Record tests/formats/data/mlx.safetensors: matrices that MLX quantized, and hashes of their values.

python3 -m venv /tmp/mlx && /tmp/mlx/bin/pip install 'mlx[cpu]==0.32.4'
/tmp/mlx/bin/python benchmarks/record_mlx.py tests/formats/data/mlx.safetensors
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path


def main(path: Path) -> None:
    import mlx.core as mx  # type: ignore[reportMissingImports]
    import numpy as np

    tensors, expected, layers = {}, {}, {}
    mx.random.seed(0)
    cases = [(bits, (32, 64, 128)[i % 3], (mx.float16, mx.bfloat16)[i % 2], (8, 128), "affine")
             for i, bits in enumerate((2, 3, 4, 5, 6, 8))]  # fmt: skip
    cases += [(4, 64, mx.bfloat16, (3, 8, 64), "affine"), (4, 32, mx.bfloat16, (8, 128), "mxfp4")]
    cases += [(8, 32, mx.bfloat16, (2, 8, 64), "mxfp8"), (4, 16, mx.bfloat16, (8, 96), "nvfp4")]
    for number, (bits, group, kind, shape, mode) in enumerate(cases):
        name = f"layer{number}" if len(shape) == 2 else f"layer{number}.switch_mlp.up_proj"
        values = (mx.random.normal(shape) * 0.02).astype(kind)
        values[..., :group] = mx.abs(values[..., :group])  # a group whose smallest value is at least 0
        parts = dict(zip(("weight", "scales", "biases"), mx.quantize(values, group, bits, mode), strict=False))
        tensors |= {f"{name}.{part}": value for part, value in parts.items()}
        layers[name] = {"bits": bits, "group_size": group, "mode": mode}
        floats = {part: v.astype(mx.float32) for part, v in parts.items() if part != "weight" and mode == "affine"}
        scales, biases = (floats.get(part, parts.get(part)) for part in ("scales", "biases"))
        found = mx.dequantize(parts["weight"], scales, biases, group, bits, mode)
        expected[name] = hashlib.sha256(np.array(found.astype(mx.float32)).tobytes()).hexdigest()
    about = {"mlx": mx.__version__, "sha256": json.dumps(expected), "quantization": json.dumps(layers)}
    mx.save_safetensors(str(path), tensors, about)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
