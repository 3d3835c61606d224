"""Peak memory of tracing a 1B and a 70B Llama shape: weights are handles, and one layer of each kind is traced.

    python benchmarks/trace_memory.py [--out benchmarks/results/trace_memory.json]

Each shape is traced in its own process from its configuration alone: the handles have the shapes of a bf16 checkpoint
and refuse to be read. "base" is the same process before that, with torch and transformers imported.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SHAPES: dict[str, dict[str, int]] = {
    "1B": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32},
    "70B": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64},
}


def trace(shape: str) -> dict[str, Any]:
    """Trace one shape in this process; sizes in MB."""
    import torch
    from icc.compiler.frontend.load import trace_model
    from icc.compiler.frontend.source.conversion import model_weights
    from icc.compiler.frontend.source.model import build_meta_model, computed_buffers
    from icc.compiler.weights.handles import Weight
    from transformers import LlamaConfig

    @dataclass
    class Unread(Weight):
        """A handle to a tensor that no file holds."""

        shape: tuple[int, ...]
        dtype: torch.dtype

        def load(self) -> torch.Tensor:
            raise AssertionError("tracing must not read a weight")

    torch.set_num_threads(1)
    config = LlamaConfig(**SHAPES[shape], num_key_value_heads=8, vocab_size=128256, max_position_embeddings=8192)
    build_meta_model(LlamaConfig(hidden_size=64, num_hidden_layers=1, num_attention_heads=4))  # for its imports
    base = _peak_mb()
    start = time.monotonic()
    model = build_meta_model(config)
    tensors = {n: Unread(tuple(p.shape), torch.bfloat16) for n, p in model.named_parameters()}
    weights = model_weights(model, tensors, computed_buffers(model))
    graph = trace_model(model, config, weights)
    return {
        "shape": shape,
        "parameters": graph.info.num_parameters,
        "nodes": sum(1 for _ in graph.nodes),
        "base_mb": base,
        "peak_mb": _peak_mb(),
        "seconds": round(time.monotonic() - start, 1),
    }


def _peak_mb() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def main() -> None:
    """Measure every shape in a fresh process and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, help="trace only this shape, in this process, and print JSON")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.shape:
        print(json.dumps(trace(options.shape)))
        return
    rows = []
    for shape in SHAPES:
        done = subprocess.run([sys.executable, __file__, "--shape", shape], capture_output=True, text=True, check=True)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        row = rows[-1]
        print(
            f"{row['shape']:>4}: {row['parameters'] / 1e9:6.2f} B parameters, {row['nodes']} nodes, "
            f"peak {row['peak_mb']} MB ({row['peak_mb'] - row['base_mb']} MB above the imports), {row['seconds']} s",
            flush=True,
        )
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
