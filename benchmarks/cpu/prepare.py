"""Make everything that bench.py measures: checkpoints, engines, the peers' files, and the list of rows.

    python benchmarks/cpu/prepare.py build/cpu --peers build/peers --avx2 build/peers-avx2    (as `make bench-cpu`)

`--peers` is a virtual environment with the packages of peers.txt, `--avx2` one with a llama.cpp built for AVX2, which
is compared with icc's AVX2 library. Existing files are kept. The peers quantize as their own tools do: llama.cpp Q4_0
in every matrix, OpenVINO int4 symmetric in groups of 64 with an 8-bit head, ONNX Runtime int4. icc uses 4 bits in
groups of 128 with an 8-bit head: rtn4, which has the storage and kernels of awq4, because calibration on random weights
would only take time.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SHAPES = {"1b": "llama-1b", "135m": "smollm-135m"}


def run(*command: object) -> None:
    """Print a command and run it; CalledProcessError if it fails."""
    words = [str(word) for word in command]
    print("$", *words, flush=True)
    subprocess.run(words, check=True)


def compile_engine(model: Path, out: Path, *options: str, target: str = "native") -> Path:
    """Compile an engine unless it exists, for this machine only unless `target` says otherwise."""
    if not out.exists():
        run(
            Path(sys.executable).with_name("icc"),
            "compile",
            model,
            "-o",
            out,
            "--target",
            target,
            "--max-seq-len",
            "4352",
            *options,
        )
    return out


def peers(name: str, model: Path, out: Path, python: Path) -> dict[str, dict[str, Any]]:
    """Make the peers' files for one checkpoint; how bench.py starts each peer, by name."""
    gguf, openvino, onnx = out / f"{name}.gguf", out / f"{name}-openvino", out / f"{name}-onnx"
    if not gguf.exists():
        run(python, HERE.parent / "make_gguf.py", model, gguf)
    if not openvino.exists():
        run(python.with_name("optimum-cli"), "export", "openvino", "-m", model, "--task", "text-generation-with-past",
            "--weight-format", "int4", "--group-size", "64", "--sym", "--disable-convert-tokenizer",
            openvino)  # fmt: skip
    if not onnx.exists():
        run(python, "-m", "onnxruntime_genai.models.builder", "-i", model, "-o", onnx, "-p", "int4", "-e", "cpu")
    made = {
        "llama.cpp": ("llama", gguf), "llama.cpp 8-bit KV": ("llama", f"{gguf}:q8"), "openvino": ("openvino", openvino),
        "openvino-sdpa": ("openvino-sdpa", openvino), "onnxruntime": ("onnxruntime", onnx),
    }  # fmt: skip
    found = {
        f"{peer} {name}": {"kind": kind, "python": str(python), "model": str(path)}
        for peer, (kind, path) in made.items()
    }
    found[f"llama.cpp 8-bit KV {name}"] |= {"batch": 1, "length": 4400}  # measured with one long sequence only
    return found


def rows() -> list[dict[str, Any]]:
    """The rows to measure; the first engine of a row is icc's. `goal` is the goal of the project's issue 4."""

    def row(
        name: str, what: str, batch: int, context: int, steps: int, goal: str, engines: str, peak: str = "int8"
    ) -> dict[str, Any]:
        return {"name": name, "what": what, "batch": batch, "context": context, "steps": steps, "goal": goal,
                "engines": engines.split(", "), "peak": peak}  # fmt: skip

    batched = "icc 1b, llama.cpp 1b, openvino 1b, onnxruntime 1b"
    single = f"{batched}, openvino-sdpa 1b"
    small = "icc 135m, llama.cpp 135m, openvino 135m, onnxruntime 135m"
    long = "icc 1b int8 KV, llama.cpp 8-bit KV 1b, openvino 1b"
    return [
        row("1B decode, batch 1", "decode", 1, 128, 32, ">= 1.5", single),
        row("1B decode, batch 1, all logits", "decode", 1, 128, 32, ">= 1.5",
            "icc 1b all logits, llama.cpp 1b, openvino 1b"),
        row("1B decode, batch 1, 4-bit head", "decode", 1, 128, 32, ">= 1.5", "icc 1b 4-bit head, llama.cpp 1b"),
        row("1B decode, batch 4", "decode", 4, 128, 16, ">= 1.7", batched),
        row("1B decode, batch 8", "decode", 8, 128, 16, ">= 2", batched),
        row("1B decode, batch 16", "decode", 16, 128, 16, ">= 2", batched),
        row("1B prefill 512", "prefill", 1, 512, 1, ">= 1.8", single),
        row("1B prefill 2048", "prefill", 1, 2048, 1, ">= 1.8", single),
        row("1B decode at 4096", "decode", 1, 4096, 16, ">= 1.5", long),
        row("135M decode, batch 1", "decode", 1, 128, 64, ">= 1.5", small),
        row("135M prefill 512", "prefill", 1, 512, 1, ">= 1.5", small),
        row("1B AVX2 decode, batch 1", "decode", 1, 128, 16, ">= 1.2", "icc 1b avx2, llama.cpp avx2 1b"),
        row("1B AVX2 decode, batch 1, 4-bit head", "decode", 1, 128, 16, ">= 1.2",
            "icc 1b 4-bit head avx2, llama.cpp avx2 1b"),
        row("1B AVX2 decode, batch 8", "decode", 8, 128, 8, ">= 1.2", "icc 1b avx2, llama.cpp avx2 1b"),
        row("1B AVX2 prefill 512", "prefill", 1, 512, 1, ">= 1.2", "icc 1b avx2, llama.cpp avx2 1b"),
        row("1B bf16 decode", "decode", 1, 128, 16, "88 % of bandwidth", "icc 1b bf16"),
        row("1B bf16 prefill 512", "prefill", 1, 512, 1, "60 % of peak", "icc 1b bf16", "fp32"),
    ]  # fmt: skip


def main() -> None:
    """Make missing files and write the configuration."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--peers", type=Path, required=True)
    parser.add_argument("--avx2", type=Path, required=True)
    a = parser.parse_args()
    a.folder.mkdir(parents=True, exist_ok=True)
    python, engines = a.peers.absolute() / "bin/python", {}
    for name, shape in SHAPES.items():
        model = a.folder / shape
        if not model.exists():
            run(sys.executable, HERE.parent / "make_model.py", shape, model)
        engines |= peers(name, model, a.folder, python)
        engine = compile_engine(model, a.folder / f"{shape}.engine", "--quant", "rtn4", target="cpu")
        ours = {f"icc {name}": engine}
        if name == "1b":
            head, kv, bf16 = (a.folder / f"{shape}-{kind}.engine" for kind in ("head4", "kv8", "bf16"))
            ours["icc 1b 4-bit head"] = compile_engine(
                model, head, "--quant", "rtn4", "--quant-head", "4bit", target="cpu"
            )
            ours["icc 1b int8 KV"] = compile_engine(model, kv, "--quant", "rtn4", "--kv-cache", "int8")
            ours["icc 1b bf16"] = compile_engine(model, bf16)
        for title, engine in ours.items():
            engines[title] = {"kind": "icc", "python": sys.executable, "model": str(engine)}
    engines["icc 1b all logits"] = engines["icc 1b"] | {"kind": "icc-whole"}
    for title in ("icc 1b", "icc 1b 4-bit head"):
        engines[f"{title} avx2"] = engines[title] | {"env": {"ICC_ISA": "avx2"}}
    engines["llama.cpp avx2 1b"] = engines["llama.cpp 1b"] | {"python": str(a.avx2.absolute() / "bin/python")}
    (a.folder / "bench.json").write_text(json.dumps({"engines": engines, "rows": rows()}, indent=1) + "\n")
    print(a.folder / "bench.json")


if __name__ == "__main__":
    main()
