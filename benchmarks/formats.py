"""Every storage format that icc reads or writes: values equal | KL | bits per weight | speed of its product.

    python benchmarks/formats.py [FORMAT ...] [--out benchmarks/results/formats.md]

A small Llama (random weights, rows of 256) is written in each format and compiled for this machine. The writers are the
formats' own libraries (gguf, compressed-tensors, transformers, bitsandbytes and ModelOpt; a row whose library cannot
be imported is left out) or else the formats' formulas. The tests do not install the last two libraries:

    pip install --no-deps --target /tmp/writers bitsandbytes==0.50.2 nvidia-modelopt==0.47.0 omegaconf \\
        antlr4-python3-runtime==4.9.3 pulp nvidia-ml-py scipy ninja        # and PYTHONPATH=/tmp/writers

Then:

- values: the weight rows of the engine, unpacked by its layout and decoded, against the rows that the library
  dequantizes, compared as a set (icc joins matrices and sorts rows of some), bit for bit
- KL: mean divergence of the engine's logits from transformers' with the dequantized values, on random tokens; for
  icc's own quantizations, from the unquantized model
- tokens: how many tokens of greedy answers to four prompts transformers also chooses after the same tokens, with the
  dequantized values; ties: how many of the rest are less likely by less than TIE nats
- bits: per weight of the matrices of the most frequent format, in the engine and in the file
- b1, b8: multiply-adds per nanosecond of the format's micro-kernel with 1 and 8 rows on one core, weights in L1 and
  L2, by the fastest of many runs (so that other load matters little); b1 also in gigabytes of weights per second: if
  that exceeds a core's share of memory bandwidth, the kernel is not the bottleneck
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from format_kernels import kernel_speed
from format_writers import CHECKPOINTS, GGUF, SHAPE, Written, own, write_gguf
from torch import Tensor

OWN = ("rtn4", "nf4", "mxfp4", "fp8", "int8")  # values of --quant; only int8 calibrates
PROMPTS, PROMPT, ANSWER, TIE = 4, 12, 32, 0.1  # prompts, tokens of each, tokens of an answer, nats


@dataclass
class Row:
    """One line of the table. values: (rows found, rows expected). bf16: rows found after rounding to bf16. tokens:
    (equal, near ties, others)."""

    title: str
    oracle: str
    stored: str = ""
    values: tuple[int, int] | None = None
    bf16: int = 0
    kl: float | None = None
    tokens: tuple[int, int, int] | None = None
    bits: float | None = None
    file_bits: float | None = None
    speed: tuple[float, float, float] | None = None
    refused: str = ""

    def cells(self) -> list[str]:
        values = (
            ""
            if self.values is None
            else "equal"
            if self.values[0] == self.values[1]
            else "equal in bf16"
            if self.bf16 == self.values[1]
            else f"{self.values[0]} of {self.values[1]}, in bf16 {self.bf16}"
        )
        numbers = [
            f"{x:.{d}f}" if x is not None else "" for x, d in ((self.kl, 6), (self.bits, 2), (self.file_bits, 2))
        ]
        speed = [f"{x:.0f}" for x in self.speed] if self.speed else [""] * 3
        tokens = ""
        if self.tokens is not None:
            equal, ties, others = self.tokens
            tokens = (
                f"{equal} of {equal + ties + others}"
                + f", {ties} ties" * bool(ties)
                + f", {others} DIFFER" * bool(others)
            )
        return [self.title, self.oracle, self.refused or self.stored, values, numbers[0], tokens, *numbers[1:], *speed]


def measure(title: str, oracle: str, write: Callable[[Path], Written], quant: str = "none") -> Row:
    """Write the model in a format, compile it and compare."""
    import icc
    from icc.runtime.errors import IccError

    row = Row(title, oracle)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model, expected = write(folder)
        source = next(folder.glob("*.gguf"), folder)
        options = {"target": "native", "quant": quant, "max_seq_len": 128}
        try:
            engine = icc.compile(source, folder / "e.engine", **options)  # type: ignore[reportArgumentType]
        except IccError as error:
            row.refused = f"refused: {error.message}"
            return row
        ids = np.random.default_rng(0).integers(3, SHAPE["vocab_size"], 100).tolist()
        with torch.no_grad():
            wanted = model.float()(input_ids=torch.tensor([ids])).logits[0].double().log_softmax(-1)
        with icc.load(engine, threads=1) as llm:
            found = torch.tensor(llm.logits(ids)).double().log_softmax(-1)
            row.tokens = greedy_tokens(model, llm) if quant == "none" else None
        row.kl = float((wanted.exp() * (wanted - found)).sum(-1).mean())
        weights = engine_weights(engine)
        if not weights:
            row.stored = "dense"
            return row
        row.stored = Counter(kind for kind, _, _ in weights).most_common(1)[0][0]
        own = [(values, size) for kind, values, size in weights if kind == row.stored]
        row.bits = 8 * sum(size for _, size in own) / sum(values.numel() for values, _ in own)
        if quant == "none":
            there = Counter(line.numpy().tobytes() for _, values, _ in weights for line in values + 0.0)
            needed = Counter(line.numpy().tobytes() for values in expected.values() for line in values.float() + 0.0)
            row.values = (sum((there & needed).values()), sum(needed.values()))
            rounded = Counter(
                line.bfloat16().float().numpy().tobytes() for _, values, _ in weights for line in values + 0.0
            )
            row.bf16 = sum((rounded & needed).values())  # for libraries that dequantize to bf16
            row.file_bits = stored_bits(source, expected)
    row.speed = kernel_speed(row.stored)
    return row


def greedy_tokens(model: Any, llm: Any) -> tuple[int, int, int]:
    """Compare the engine's greedy tokens with the model's after the same tokens: (equal, near ties, others)."""
    from icc import SamplingParams

    prompts = np.random.default_rng(1).integers(3, SHAPE["vocab_size"], (PROMPTS, PROMPT)).tolist()
    greedy = SamplingParams(max_tokens=ANSWER, temperature=0, ignore_eos=True)
    answers = [list(done.token_ids) for done in llm.generate(prompts, greedy)]
    whole = torch.tensor([[*prompt, *answer[:-1]] for prompt, answer in zip(prompts, answers, strict=True)])
    with torch.no_grad():
        known = model(input_ids=whole).logits[:, PROMPT - 1 :].double().log_softmax(-1)
    behind = known.amax(-1) - known.gather(-1, torch.tensor(answers).unsqueeze(-1)).squeeze(-1)
    equal, near = int((behind == 0).sum()), int(((behind > 0) & (behind < TIE)).sum())
    return equal, near, behind.numel() - equal - near


def engine_weights(engine: Path) -> list[tuple[str, Tensor, int]]:
    """(format, values in float32, bytes) of each quantized matrix that products read."""
    from icc.compiler.backends.cpu.layouts.registry import LAYOUTS
    from icc.compiler.weights.formats.registry import find_format

    program = json.loads((engine / "program.json").read_text())
    raw = (engine / "weights.safetensors").read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header, found = json.loads(raw[8:start]), []
    for step in program["steps"]:
        operand = step.get("w")
        if not isinstance(operand, dict) or not step["op"].startswith("linear"):
            continue
        name = operand["name"]
        if (kind := program["weights"][name]["format"]).startswith("tile_"):
            continue  # dense
        form = find_format(step.get("stored", {}).get("format", kind))
        begin, end = (start + at for at in header[name]["data_offsets"])
        shape = tuple(program["weights"][name]["shape"])
        parts = LAYOUTS.find(form, "product").unpack(np.frombuffer(raw[begin:end], np.uint8), shape)
        values = form.decode({part: torch.from_numpy(np.ascontiguousarray(v)) for part, v in parts.items()})
        found.append((form.name, values.to(torch.float32), end - begin))
    return found


def stored_bits(source: Path, expected: dict[str, Tensor]) -> float:
    """Bits of the file per weight of the quantized matrices, without its float16 embedding and head."""
    file = source if source.is_file() else source / "model.safetensors"
    dense = SHAPE["vocab_size"] * SHAPE["hidden_size"] * 2 * (1 if "lm_head.weight" in expected else 2)
    return 8 * (file.stat().st_size - dense) / sum(values.numel() for values in expected.values())


def main() -> None:
    """Print and write the table."""
    warnings.simplefilter("ignore")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("formats", nargs="*", help="titles of rows, in any order; all if none is given")
    parser.add_argument("--out", type=Path)
    a = parser.parse_args()
    jobs: list[tuple[str, str, Callable[[Path], Written], str]] = []
    jobs += [(f"GGUF {kind}", "gguf", lambda folder, kind=kind: write_gguf(kind, folder), "none") for kind in GGUF]
    jobs += [(title, oracle, write, "none") for title, (oracle, write) in CHECKPOINTS.items()]
    jobs += [(f"--quant {quant}", "", own(quant), quant) for quant in OWN]
    head = (
        "format, values by, stored as, values, KL, tokens, bits per weight, in the file, b1 MAC/ns, b8 MAC/ns, b1 GB/s"
    )
    lines = [f"| {head.replace(', ', ' | ')} |", "|---" * (head.count(",") + 1) + "|"]
    print("\n".join(lines), flush=True)
    for title, oracle, write, quant in jobs:
        installed = oracle not in ("bitsandbytes", "modelopt") or importlib.util.find_spec(oracle) is not None
        if (a.formats and title not in a.formats) or not installed:
            continue
        lines.append(f"| {' | '.join(measure(title, oracle, write, quant).cells())} |")
        print(lines[-1], flush=True)
        if a.out:
            a.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
