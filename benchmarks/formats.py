"""Every storage format that icc reads or writes: values equal | KL | bits per weight | speed of its product.

    python benchmarks/formats.py [FORMAT ...] [--out benchmarks/results/formats.md]

A small Llama (random weights, rows of 256) is written in each format, by the format's own library where it installs
here (gguf, compressed-tensors, transformers, bitsandbytes and ModelOpt, whose rows are left out where they cannot be
imported; else by the format's formula), and compiled for this machine. The last two are none of the tests' packages:

    pip install --no-deps --target /tmp/writers bitsandbytes==0.50.2 nvidia-modelopt==0.47.0 omegaconf \\
        antlr4-python3-runtime==4.9.3 pulp nvidia-ml-py scipy ninja        # and PYTHONPATH=/tmp/writers

Then:

- values: the rows of the weights in the engine, unpacked by its layout and decoded, against those that the library
  dequantizes, as a set (icc joins matrices and sorts rows of some), bit for bit
- KL: mean divergence of the engine's logits from transformers' with those values, on random tokens; of icc's own
  quantizations from the model before
- tokens: of greedy answers to four prompts, how many are transformers' with those values behind the same tokens; ties:
  how many others are less likely by TIE at most
- bits: per weight of the matrices of the most frequent format, in the engine and in the file
- b1, b8: multiply-adds per nanosecond of the format's micro-kernel with 1 and 8 rows on one core, weights in L1 and
  L2, the least of many runs (so that others on the machine matter little); b1 in gigabytes of weights per second too:
  what is above a core's share of memory bandwidth is not the kernel's limit
"""

from __future__ import annotations

import argparse
import ctypes
import importlib.util
import json
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

HERE = Path(__file__).parent
SHAPE: dict[str, Any] = {
    "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "tie_word_embeddings": False,
}  # fmt: skip
GGUF = (
    "Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_NL IQ4_XS MXFP4 IQ2_XS IQ3_S TQ2_0 F16 BF16".split()
)  # fmt: skip
OWN = ("rtn4", "nf4", "mxfp4", "fp8", "int8")  # --quant, without calibration but for int8
KERNEL_K = 1536
PROMPTS, PROMPT, ANSWER, TIE = 4, 12, 32, 0.1  # how many, tokens, tokens, nats
Written = tuple[Any, dict[str, Tensor]]  # the model that a file stands for, its quantized matrices by name


def tiny_model() -> Any:
    """A Llama whose layers all matter."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE), attn_implementation="eager").eval()
    for name, parameter in model.named_parameters():
        parameter.data = torch.ones_like(parameter) if "norm" in name else 0.06 * torch.randn_like(parameter)
    return model


def matrices(model: Any) -> dict[str, Tensor]:
    return {name: p.data for name, p in model.named_parameters() if "proj" in name}


def write_gguf(kind: str, folder: Path) -> Written:
    """By the gguf package: its quantizers where it has them, else random blocks; its dequantization."""
    sys.path.insert(0, str(HERE.parent / "tests/formats"))
    from gguf_models import write_model

    model = write_model(tiny_model(), "llama", folder / "model.gguf", lambda name: "F16" if "token" in name else kind)
    return model, matrices(model) | {"lm_head.weight": model.lm_head.weight.data}


def write_checkpoint(config: dict[str, Any], pack: Callable[[Tensor], tuple[dict[str, Tensor], Tensor]]) -> Any:
    """A writer of safetensors whose matrices of layers `pack` turns into tensors and the values they stand for."""

    def write(folder: Path) -> Written:
        from safetensors.torch import load_file, save_file

        model = tiny_model()
        model.to(torch.float16).save_pretrained(folder)
        model.to(torch.float32)
        tensors = load_file(folder / "model.safetensors")
        for name, parameter in matrices(model).items():
            stored, values = pack(parameter.data)
            parameter.data.copy_(values)
            del tensors[name]
            tensors |= {f"{name.removesuffix('weight')}{part}": value for part, value in stored.items()}
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        facts = json.loads((folder / "config.json").read_text()) | {"quantization_config": config}
        (folder / "config.json").write_text(json.dumps(facts))
        return model, matrices(model)

    return write


def words(codes: Tensor, bits: int, axis: int, order: tuple[int, ...] = ()) -> Tensor:
    """Codes as int32 words along an axis, from the low bits up."""
    each = 32 // bits
    fields = codes.to(torch.int64).movedim(axis, -1).unflatten(-1, (-1, each))[..., list(order or range(each))]
    packed = (fields << torch.arange(0, 32, bits)).sum(-1)
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32).movedim(-1, axis).contiguous()


def asymmetric(weight: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """codes [N, K], zeros and float16 scales [N, K / group], values."""
    groups = weight.unflatten(-1, (-1, group))
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scales = ((high - low) / (2**bits - 1)).to(torch.float16)
    zeros = (-low / scales.float()).round().clamp(1, 2**bits - 1)
    spread = scales.float().unsqueeze(-1)
    codes = (groups / spread + zeros.unsqueeze(-1)).round().clamp(0, 2**bits - 1)
    return codes.flatten(-2), zeros, scales, ((codes - zeros.unsqueeze(-1)) * spread).flatten(-2)


def gptq(bits: int) -> Callable[[Tensor], tuple[dict[str, Tensor], Tensor]]:
    def pack(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        codes, zeros, scales, values = asymmetric(weight, bits, 128)
        found = {"qweight": words(codes.T, bits, 0), "qzeros": words(zeros.T - 1, bits, 1)}
        index = (torch.arange(weight.shape[1]) // 128).to(torch.int32)
        return found | {"scales": scales.T.contiguous(), "g_idx": index}, values

    return pack


def awq(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    codes, zeros, scales, values = asymmetric(weight, 4, 128)
    found = {"qweight": words(codes.T, 4, 1, order), "qzeros": words(zeros.T, 4, 1, order)}
    return found | {"scales": scales.T.contiguous()}, values


def compressed(form: str, **arguments: Any) -> Callable[[Tensor], tuple[dict[str, Tensor], Tensor]]:
    """compressed-tensors' own compressor of a format, and its decompression."""

    def pack(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        from compressed_tensors.compressors import BaseCompressor
        from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
        from compressed_tensors.quantization.utils import calculate_qparams

        args = QuantizationArgs(symmetric=True, **arguments)
        scheme = QuantizationScheme(targets=["Linear"], weights=args)
        groups = weight.unflatten(-1, (-1, arguments.get("group_size") or weight.shape[-1]))
        low, high = groups.amin(-1), groups.amax(-1)
        if arguments["strategy"] == "tensor":
            low, high = low.min().reshape(1), high.max().reshape(1)
        state: dict[str, Tensor] = {"weight": weight}
        if form == "nvfp4-pack-quantized":
            state["weight_global_scale"] = (448 * 6 / weight.abs().max()).reshape(1)
            peak = groups.abs().amax(-1)
            scale = (state["weight_global_scale"] * peak / 6).to(torch.float8_e4m3fn).to(torch.float32)
        elif form == "mxfp4-pack-quantized":
            scale = torch.exp2(torch.floor(torch.log2(groups.abs().amax(-1))) - 2)
        else:
            scale = calculate_qparams(low, high, args)[0].to(torch.float16).to(torch.float32)
        state["weight_scale"] = scale
        compressor: Any = BaseCompressor.get_value_from_registry(form)
        stored = compressor.compress(state, scheme)
        return stored, compressor.decompress(stored, scheme)["weight"].to(torch.float32)

    return pack


def blockwise(kind: str, nested: bool) -> Callable[[Tensor], tuple[dict[str, Tensor], Tensor]]:
    """bitsandbytes' 4-bit blocks, and its dequantization."""

    def pack(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        from bitsandbytes import functional  # type: ignore[reportMissingImports]

        codes, state = functional.quantize_4bit(weight, blocksize=64, compress_statistics=nested, quant_type=kind)
        stored = {"weight": codes} | {f"weight.{name}": value for name, value in state.as_dict(packed=True).items()}
        return stored, functional.dequantize_4bit(codes, state)

    return pack


def vectorwise(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """LLM.int8's rows."""
    from bitsandbytes import functional  # type: ignore[reportMissingImports]

    codes, scales, _ = functional.int8_vectorwise_quant(weight.to(torch.float16))
    return {"weight": codes, "SCB": scales}, functional.int8_vectorwise_dequant(codes, scales).to(torch.float32)


def modelopt(kind: str) -> Callable[[Tensor], tuple[dict[str, Tensor], Tensor]]:
    """ModelOpt's tensors, stored as its export does, and their dequantization."""

    def pack(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        from modelopt.torch.quantization.qtensor import FP8QTensor, NVFP4QTensor  # type: ignore[reportMissingImports]

        if kind == "FP8":
            whole, scale = FP8QTensor.quantize(weight, scales=(weight.abs().max() / 448).reshape(1))
            stored = {"weight": whole._quantized_data, "weight_scale": scale.reshape(()).to(torch.float32)}
            return stored, whole.dequantize(torch.float32, scale=scale)
        whole, scales, one = NVFP4QTensor.quantize(weight, 16)
        stored = {"weight": whole._quantized_data, "weight_scale": scales, "weight_scale_2": one.to(torch.float32)}
        values = whole.dequantize(torch.float32, scale=scales, double_scale=one, block_sizes={-1: 16})
        return stored, values

    return pack


def fp8(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """transformers' own, in DeepSeek's blocks."""
    from types import SimpleNamespace

    from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

    own: Any = SimpleNamespace(quantization_config=SimpleNamespace(weight_block_size=(128, 128), scale_fmt="float"))
    found = Fp8Quantize(own)._quantize_one("weight", weight)
    values = Fp8Dequantize(own)._dequantize_one(found["weight"], found["weight_scale_inv"], torch.float32)
    return found, values


def scheme(form: str, bits: int, kind: str) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"num_bits": bits, "type": kind}, "format": form}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": {"a": group}, "ignore": ["lm_head"]}


BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True}
CHECKPOINTS: dict[str, tuple[str, Callable[[Path], Written]]] = {
    "GPTQ 4": ("formula", write_checkpoint({"quant_method": "gptq", "bits": 4, "group_size": 128}, gptq(4))),
    "GPTQ 8": ("formula", write_checkpoint({"quant_method": "gptq", "bits": 8, "group_size": 128}, gptq(8))),
    "AWQ": ("formula", write_checkpoint({"quant_method": "awq", "bits": 4, "group_size": 128}, awq)),
    "W4A16": (
        "compressed-tensors",
        write_checkpoint(
            scheme("pack-quantized", 4, "int"),
            compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=128),
        ),
    ),
    "W8A8": (
        "compressed-tensors",
        write_checkpoint(
            scheme("int-quantized", 8, "int"), compressed("int-quantized", num_bits=8, type="int", strategy="channel")
        ),
    ),
    "FP8 channel": (
        "compressed-tensors",
        write_checkpoint(
            scheme("float-quantized", 8, "float"),
            compressed("float-quantized", num_bits=8, type="float", strategy="channel"),
        ),
    ),
    "FP8 128x128": (
        "transformers", write_checkpoint({"quant_method": "fp8", "weight_block_size": [128, 128]}, fp8),
    ),
    "NVFP4": (
        "compressed-tensors",
        write_checkpoint(
            scheme("nvfp4-pack-quantized", 4, "float"),
            compressed("nvfp4-pack-quantized", num_bits=4, type="float", strategy="tensor_group", group_size=16),
        ),
    ),
    "bitsandbytes NF4": ("bitsandbytes", write_checkpoint(BNB, blockwise("nf4", False))),
    "bitsandbytes NF4 nested": ("bitsandbytes", write_checkpoint(BNB, blockwise("nf4", True))),
    "bitsandbytes FP4": ("bitsandbytes", write_checkpoint(BNB, blockwise("fp4", False))),
    "LLM.int8": ("bitsandbytes", write_checkpoint({"quant_method": "bitsandbytes", "load_in_8bit": True}, vectorwise)),
    "ModelOpt FP8": ("modelopt", write_checkpoint({"quant_method": "modelopt", "quant_algo": "FP8"}, modelopt("FP8"))),
    "ModelOpt NVFP4": (
        "modelopt", write_checkpoint({"quant_method": "modelopt", "quant_algo": "NVFP4"}, modelopt("NVFP4")),
    ),
    "MXFP4": (
        "compressed-tensors",
        write_checkpoint(
            scheme("mxfp4-pack-quantized", 4, "float"),
            compressed("mxfp4-pack-quantized", num_bits=4, type="float", strategy="group", group_size=32),
        ),
    ),
}  # fmt: skip


@dataclass
class Row:
    """One line of the table. values: (rows found, rows expected). bf16: rows found when rounded to it. tokens: equal,
    near ties, others."""

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
    """Write, compile, compare."""
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
            row.bf16 = sum((rounded & needed).values())  # of a library that gives bf16
            row.file_bits = stored_bits(source, expected)
    row.speed = kernel_speed(row.stored)
    return row


def greedy_tokens(model: Any, llm: Any) -> tuple[int, int, int]:
    """Tokens of the engine's greedy answers: as the model's, near ties, others; each behind the engine's own tokens."""
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
    """Format, values and bytes of each matrix that products read."""
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
    """Of the file, per weight of the quantized matrices: what else is in it is a float16 table and norms."""
    file = source if source.is_file() else source / "model.safetensors"
    dense = SHAPE["vocab_size"] * SHAPE["hidden_size"] * 2 * (1 if "lm_head.weight" in expected else 2)
    return 8 * (file.stat().st_size - dense) / sum(values.numel() for values in expected.values())


DRIVER = """
extern "C" void rates(double* best, int repeats) {
    char* w = (char*)aligned_alloc(64, 1 << 22);
    memset(w, 0x11, 1 << 22);
    int8_t* x = (int8_t*)aligned_alloc(64, 1 << 16);
    memset(x, 5, 1 << 16);
    float *s = (float*)aligned_alloc(64, 1 << 16), *out = (float*)aligned_alloc(64, 1 << 14);
    for (int i = 0; i < (1 << 14); ++i) s[i] = 0.5f;
    const char* at[4] = {w, w + TILE, w + 2 * TILE, w + 3 * TILE};
    best[0] = best[1] = 1e18;
    for (int r = 0; r < repeats; ++r)
        for (int i = 0; i < 2; ++i) {
            const auto begin = std::chrono::steady_clock::now();
            for (int n = 0; n < 4; ++n) MICROS[i].run(at, x, s, s, GROUPS, GROUP, out);
            const std::chrono::duration<double, std::nano> spent = std::chrono::steady_clock::now() - begin;
            if (spent.count() / 4 < best[i]) best[i] = spent.count() / 4;
        }
    free(w), free(x), free(s), free(out);
}
"""


def kernel_speed(kind: str) -> tuple[float, float, float] | None:
    """Multiply-adds per ns with one row and with eight, and GB/s with one; None for formats of float products."""
    from icc.compiler.backends.cpu.isa import host_isas
    from icc.compiler.backends.cpu.kernels.micro import quant_micro
    from icc.compiler.backends.cpu.layouts.codes import CodeTiles
    from icc.compiler.backends.cpu.layouts.registry import LAYOUTS
    from icc.compiler.backends.render import TEMPLATES, render
    from icc.compiler.weights.formats.registry import find_format

    layout = LAYOUTS.find(find_format(kind), "product")
    if not isinstance(layout, CodeTiles) or layout.misfit(64, KERNEL_K):
        return None
    isa = host_isas()[0]
    blocks = [next(b for b in isa.quant_blocks if b.rows == rows) for rows in (1, 8)]
    micros = [quant_micro(f"m{b.rows}", layout.reader, b, isa) for b in blocks]
    head = '#include "gemm.h"\n#include <chrono>\n#include <stdlib.h>\n'
    table = ", ".join(f"{{{b.rows}, {b.tiles}, m{b.rows}}}" for b in blocks)
    sizes = {"TILE": layout.tile_bytes(KERNEL_K), "GROUP": layout.group, "GROUPS": KERNEL_K // layout.group}
    constants = "".join(f"constexpr long {name} = {value};\n" for name, value in sizes.items())
    text = [head, *(render(m.template, m) for m in micros), f"static const QuantMicro MICROS[] = {{{table}}};\n"]
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "a.cpp", Path(folder) / "a.so"
        source.write_text("\n".join([*text, constants, DRIVER]))
        flags = ["-std=c++17", "-O3", "-fPIC", "-shared", "-pthread", "-ffp-contract=off", "-fno-math-errno"]
        subprocess.run(
            ["g++", *flags, *isa.flags, f"-I{TEMPLATES / 'cpp'}", str(source), "-o", str(library)], check=True
        )
        best = (ctypes.c_double * 2)()
        ctypes.CDLL(str(library)).rates(best, 300)
    done = [16 * KERNEL_K * b.rows * b.tiles / ns for b, ns in zip(blocks, best, strict=True)]
    return done[0], done[1], layout.tile_bytes(KERNEL_K) * blocks[0].tiles / best[0]


def own(quant: str) -> Callable[[Path], Written]:
    def write(folder: Path) -> Written:
        model = tiny_model()
        model.save_pretrained(folder)
        return model, {}

    return write


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
