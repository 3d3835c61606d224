"""GPU engines without a GPU: every family's launch plan in Triton's interpreter, against the reference interpreter.

    python benchmarks/gpu_equality.py [--out benchmarks/results/gpu_equality.md]

For each tiny checkpoint of the tests and each quantization: the largest relative error of the logits of a chunked
prefill against the reference interpreter, and whether four requests that share steps, prefixes and too few KV blocks
get the reference's greedy tokens. float32 checkpoints compute in float32; bf16 checkpoints compute in bf16 with float32
sums, for which only the error is shown (random weights leave near ties that rounding decides).
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"
TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "triton")]

import numpy as np  # noqa: E402
import tiny_models as tiny  # noqa: E402
from building import GpuEngine, build  # noqa: E402
from icc import SamplingParams  # noqa: E402
from icc.compiler.graph.interpret import interpret  # noqa: E402
from icc.runtime.format.manifest import Limits  # noqa: E402

LIMITS = Limits(max_seq_len=48, max_batch_size=4, max_step_tokens=16)


def error_of(engine: GpuEngine) -> float:
    """The largest difference of a prefill's logits from the reference, relative to the largest logit."""
    ids = np.random.default_rng(0).integers(3, 119, 37).tolist()
    expected = interpret(engine.graph, ids).numpy()
    with engine.llm() as llm:
        return float(np.abs(llm.logits(ids) - expected).max() / np.abs(expected).max())


def tokens_equal(engine: GpuEngine) -> bool:
    """Whether requests that run together get the reference's greedy tokens."""
    ids = np.random.default_rng(1).integers(3, 119, 24).tolist()
    prompts = [ids[:17], ids[:3], ids[:17] + ids[:2], ids[5:20]]
    with engine.llm(num_blocks=7) as llm:
        found = llm.generate(prompts, SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True))
    return all(list(c.token_ids) == greedy(engine, p, 6) for c, p in zip(found, prompts, strict=True))


def greedy(engine: GpuEngine, ids: list[int], count: int) -> list[int]:
    """Greedy tokens of the reference, without a cache."""
    ids, start = list(ids), len(ids)
    for _ in range(count):
        ids.append(int(interpret(engine.graph, ids, [len(ids) - 1])[0].argmax()))
    return ids[start:]


def main() -> None:
    """Walk all configurations and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", help="configurations whose name begins with this")
    a = parser.parse_args()
    lines = [
        "| configuration | none f32: error | tokens | awq4 f32: error | tokens | none bf16: error | kernels |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, config in tiny.tiny_configs().items():
        if a.only and not name.startswith(a.only):
            continue
        cells, kernels = [], 0
        for dtype, quant in (("float32", "none"), ("float32", "awq4"), ("bfloat16", "none")):
            with tempfile.TemporaryDirectory() as folder:  # the graph reads its weights from this folder while it runs
                tiny.save_tiny(config, Path(folder), dtype)
                engine = build(Path(folder), quant, LIMITS)
                cells.append(f"{error_of(engine):.1e}")
                if dtype == "float32":
                    cells.append("equal" if tokens_equal(engine) else "DIFFER")
            kernels = max(kernels, len(engine.specs))
        lines.append(f"| {name} | {' | '.join(cells)} | {kernels} |")
        print(lines[-1], flush=True)
    if a.out:
        a.out.parent.mkdir(parents=True, exist_ok=True)
        a.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
