"""llm-compressor and gptqmodel beside icc at equal bits and group: 4 bits with a zero point, groups of 64.

    python benchmarks/frontier_quantizers.py calibration MODEL ids.json --sequences 16
    $LLMCOMPRESSOR benchmarks/frontier_quantizers.py llmcompressor gptq|awq MODEL ids.json FOLDER
    $GPTQMODEL benchmarks/frontier_quantizers.py gptqmodel gptq|awq MODEL ids.json FOLDER
    python benchmarks/frontier_quantizers.py measure MODEL windows.json WORK --sequences 16 --out quantizers.md \
        --quant gptq4,awq4 --checkpoints "llm-compressor GPTQ=FOLDER,gptqmodel GPTQ=FOLDER"

All read the same calibration tokens; linear layers are quantized, embedding and head stay as they are. With `measure`,
icc compiles the peers' checkpoints bit for bit and runs every engine beside MODEL in float32, on the windows that
`frontier.py --write-windows` wrote. Each peer has its own environment; NOTES says how they were made. Groups have 64
elements because SmolLM2's width of 576 is no multiple of 128.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

GROUP = 64


def calibration(model: Path, out: Path, sequences: int) -> None:
    """Write the token ids that icc calibrates on, as JSON."""
    from icc.compiler.calibration import load_calibration

    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    found = load_calibration(None, model / "tokenizer.json", vocabulary, num_sequences=sequences)
    out.write_text(json.dumps(found.sequences))


def llmcompressor(method: str, model: Path, ids: Path, out: Path) -> None:
    """Quantize by llm-compressor and write a compressed-tensors checkpoint."""
    import torch
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier
    from llmcompressor.modifiers.transform.awq import AWQModifier
    from transformers import AutoModelForCausalLM

    sequences = json.loads(ids.read_text())
    weights = QuantizationArgs(num_bits=4, symmetric=False, strategy="group", group_size=GROUP)
    groups = {"all": QuantizationScheme(targets=["Linear"], weights=weights)}
    rounds = (GPTQModifier if method == "gptq" else QuantizationModifier)(config_groups=groups, ignore=["lm_head"])
    recipe = [rounds] if method == "gptq" else [AWQModifier(), rounds]
    if not torch.cuda.is_available():  # AWQ pins memory even without a GPU
        torch.Tensor.pin_memory = lambda self, *_: self  # type: ignore[method-assign]
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    data = Dataset.from_dict({"input_ids": sequences, "attention_mask": [[1] * len(row) for row in sequences]})
    oneshot(
        model=loaded, dataset=data, recipe=recipe, max_seq_length=len(sequences[0]),
        num_calibration_samples=len(sequences),
    )  # fmt: skip
    loaded.save_pretrained(out, save_compressed=True)


def gptqmodel(method: str, model: Path, ids: Path, out: Path) -> None:
    """Quantize by gptqmodel and write a checkpoint in GPTQ's or AWQ's format."""
    os.cpu_count = lambda: 4  # it does not start with two: one of its pools asks for more threads than another has
    from gptqmodel import GPTQModel, QuantizeConfig

    kind = {"method": method, "format": "gptq" if method == "gptq" else "gemm"}
    config = QuantizeConfig(bits=4, group_size=GROUP, sym=False, offload_to_disk=False, **kind)
    loaded = GPTQModel.load(str(model), config, device="cpu", dtype="float32")
    rows = [{"input_ids": row, "attention_mask": [1] * len(row)} for row in json.loads(ids.read_text())]
    loaded.quantize(rows, batch_size=1)
    loaded.save(str(out))


def measure(args: argparse.Namespace) -> None:
    """Compile and measure all engines on the same windows, and write the table."""
    from frontier import as_table
    from frontier import measure as run

    engines: dict[str, Path] = {}
    common = {"target": "native", "max_seq_len": 1024}
    for quant in filter(None, args.quant.split(",")):
        options = {"quant": quant, "quant_head": "none", "group_size": GROUP, "calib_sequences": args.sequences}
        engines[f"icc {quant}"] = _built(args.model, args.work / f"{quant}.engine", {**common, **options})
    for given in filter(None, args.checkpoints.split(",")):
        name, folder = given.split("=")
        engines[name] = _built(Path(folder), args.work / f"{Path(folder).name}.engine", common)
    windows = json.loads(args.windows.read_text())[:: args.every]
    rows = run(args.model, windows, engines)
    args.out.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n")
    args.out.write_text(as_table(rows))
    print(as_table(rows))


def _built(model: Path, engine: Path, options: dict[str, Any]) -> Path:
    import icc

    if not engine.exists():
        icc.compile(model, engine, **options)
    return engine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tasks = parser.add_subparsers(dest="task", required=True)
    one = tasks.add_parser("calibration")
    one.add_argument("model", type=Path)
    one.add_argument("out", type=Path)
    one.add_argument("--sequences", type=int, default=32)
    for peer in ("llmcompressor", "gptqmodel"):
        one = tasks.add_parser(peer)
        one.add_argument("method", choices=["gptq", "awq"])
        for name in ("model", "ids", "out"):
            one.add_argument(name, type=Path)
    one = tasks.add_parser("measure")
    for name in ("model", "windows", "work"):
        one.add_argument(name, type=Path)
    one.add_argument("--quant", default="gptq4,awq4")
    one.add_argument("--checkpoints", default="", help="NAME=FOLDER of the peers' checkpoints, comma-separated")
    one.add_argument("--sequences", type=int, default=32, help="calibration sequences of icc's own methods")
    one.add_argument("--every", type=int, default=1, help="take every N-th window")
    one.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    begin = time.process_time()
    if args.task == "calibration":
        calibration(args.model, args.out, args.sequences)
    elif args.task == "measure":
        measure(args)
    else:
        (llmcompressor if args.task == "llmcompressor" else gptqmodel)(args.method, args.model, args.ids, args.out)
        print(f"{args.task} {args.method}: {time.process_time() - begin:.0f} s of CPU")


if __name__ == "__main__":
    main()
