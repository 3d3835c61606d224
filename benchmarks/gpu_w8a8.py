"""Products of 8-bit floats (W8A8) on this machine's GPU: against float64, then beside 16 bits and torch's.

    python benchmarks/gpu_w8a8.py [--target h100] [--out build/gpu-w8a8.json]

First answers: products of several shapes and numbers of rows, also odd ones, weights with a scale per channel and per
block of 128, results in float32; quantized rows must follow the rule (x 448 / max, to the nearest), and the product
must be that of the decoded rows and weights in float64. Then times of Llama 8B's products, whole (quantizing the rows,
the product, and adding the parts of a split) and the product alone, in CUDA graphs over more copies of the weight than
caches hold; beside them icc's bf16 products, torch's bf16 and `torch._scaled_mm` (row and column scales, of quantized
rows; with float32 sums and with its faster sums), and icc's with sums that stay in the matrix units. The status is 0
if all answers are right.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from icc.compiler.backends.triton.kernels.linear import LinearKernel
from icc.compiler.backends.triton.objects.compile import Compiled, compile_specs, spec_key
from icc.compiler.backends.triton.plan import kernel_of
from icc.compiler.backends.triton.spec import LaunchSpec, Shape
from icc.compiler.backends.triton.tiling.choice import Tuner
from icc.compiler.backends.triton.tiling.machine import LinearTiling
from icc.compiler.ops.body import Body
from icc.compiler.program.layout import Stored
from icc.compiler.program.steps import linear as steps
from icc.compiler.targets import TARGETS
from icc.compiler.weights.formats.float8 import Float8
from icc.runtime.executor.cuda.driver import Cuda
from icc.runtime.format.manifest import Limits
from icc.runtime.format.operands import BufferOperand, WeightOperand
from icc.runtime.format.plan import HIDDEN_POINTERS, CountersArg, KVArg, SizeArg

LIMITS = Limits(max_seq_len=8192, max_batch_size=256, max_step_tokens=8192)
GATE = steps.Epilogue(Body.parse("t0 = silu a0; t1 = mul t0 a1"), (steps.Columns(0, 1), steps.Columns(14336, 1)), 14336)
LLAMA = {
    "qkv": (6144, 4096, None),
    "o": (4096, 4096, None),
    "gate_up": (28672, 4096, GATE),
    "down": (4096, 14336, None),
}
CHECKED = {**LLAMA, "odd": (33, 131, None), "narrow": (520, 1000, None)}
ROWS = (1, 16, 64, 128, 512, 2048, 8192)
CHECKED_ROWS = (1, 7, 16, 33, 64, 129, 300, 1000)
COLD = 160 << 20  # bytes of copies of a weight, more than caches hold
PLACE = "cuda"
IMPRECISE = 1e-3  # error of sums relative to the largest result: Hopper keeps 13 bits of the sums within a step


def main() -> int:
    """Compile everything, check, measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="h100")
    parser.add_argument("--out", type=Path, default=Path("build/gpu-w8a8.json"))
    parser.add_argument("--compile-only", action="store_true", help="needs no GPU")
    a = parser.parse_args()
    checks = [
        (name, stored, rows, Product.of(*CHECKED[name], stored, rows, "f32", a.target))
        for name in CHECKED for stored in ("e4m3", "e4m3_kg128") for rows in CHECKED_ROWS
    ]  # fmt: skip
    timed = [
        (name, stored, rows, Product.of(*LLAMA[name], stored, rows, "bf16", a.target))
        for name in LLAMA for stored in ("bf16", "e4m3", "e4m3_kg128", "e4m3 fast") for rows in ROWS
    ]  # fmt: skip
    fast = {name: Product.of(*LLAMA[name], "e4m3 fast", 300, "f32", a.target) for name in ("o", "down")}
    specs = [spec for *_, product in (*checks, *timed) for spec in product.specs]
    specs += [spec for product in fast.values() for spec in product.specs]
    objects = compile_specs(specs, TARGETS[a.target])
    spilled = {key: o.spill_bytes for key, o in objects.items() if o.spill_bytes}
    print(f"{len(objects)} kernels; spilled: {spilled or 'none'}", flush=True)
    if a.compile_only:
        return 0
    device = Device(Cuda(), objects)
    wrong = [line for check in checks if (line := compare(device, *check))]
    print(f"{len(checks)} products against float64: {len(wrong)} wrong")
    print("with sums that the matrix units keep:")
    for name in ("o", "down"):
        print(f"  {compare(device, name, 'e4m3', 300, fast[name]) or 'as precise'}")
    found = measure(device, timed)
    a.out.parent.mkdir(parents=True, exist_ok=True)
    a.out.write_text(json.dumps(found, indent=1) + "\n")
    print("\n".join(wrong))
    print("WRONG" if wrong else "ALL RIGHT")
    return 1 if wrong else 0


@dataclass(frozen=True)
class Product:
    """A product and its launches for a number of rows."""

    kernel: LinearKernel
    rows: int
    specs: tuple[LaunchSpec, ...]
    scratch: dict[str, int]
    tiling: LinearTiling

    @staticmethod
    def of(n: int, k: int, epilogue: Any, stored: str, rows: int, result: str, target: str) -> Product:
        """A product as the target's cost model tiles it. stored: a format; with " fast" after it, sums stay in the
        matrix units."""
        stored, _, fast = stored.partition(" ")
        dense = stored == "bf16"
        w = WeightOperand("w", "bf16" if dense else "u8")
        width = n if epilogue is None else epilogue.width
        cls = steps.Linear if dense else steps.LinearQ
        step = cls(
            kernel="product", x=BufferOperand("x", "bf16", k), w=w, k=k, n=n,
            y=BufferOperand("y", result, width), stored=Stored(stored, "product"), epilogue=epilogue,
        )  # fmt: skip
        kernel, tuner, shape = kernel_of(step), Tuner(TARGETS[target]), Shape(rows, rows <= 256)
        assert isinstance(kernel, LinearKernel)
        specs = kernel.launches(shape, LIMITS, tuner)
        if fast:
            old, new = "tl.zeros([BN, BM], tl.float32), max_num_imprecise_acc=BK)", "{sum})"
            specs = tuple(
                replace(s, source=_replaced(s.source, old, new)) if s.entry == "linear_w8a8" else s for s in specs
            )
        return Product(kernel, rows, specs, kernel.scratch(shape, LIMITS, tuner), kernel._tile(shape, tuner))


def _replaced(source: str, old: str, new: str) -> str:
    """Replace `sum += dot(w, x, zeros)` by `sum = dot(w, x, sum)` in a kernel's source."""
    lines = []
    for line in source.splitlines():
        if old in line:
            name = line.split()[0]
            line = line.replace("+=", "=").replace(old, new.format(sum=name))
        lines.append(line)
    return "\n".join(lines) + "\n"


@dataclass
class Device:
    """Launches specs on tensors."""

    cuda: Cuda
    objects: dict[str, Compiled]

    def __post_init__(self) -> None:
        self.functions = {key: self.cuda.function(o.binary, o.entry, o.shared_bytes) for key, o in self.objects.items()}

    def put(self, spec: LaunchSpec, tensors: dict[str, torch.Tensor], sizes: dict[str, int]) -> None:
        """Put one launch on the stream. tensors: by the names of operands, scratch areas and arrays; "kv" is the
        cache, "counters" must be zeros. sizes: by the names of sizes."""
        key, keep = spec_key(spec), []
        for arg in spec.args:
            value = arg.value
            if isinstance(value, SizeArg):
                keep.append(sizes[value.name])
            elif isinstance(value, KVArg):
                keep.append(tensors["kv"].data_ptr())
            elif isinstance(value, CountersArg):
                keep.append(tensors["counters"].data_ptr())
            else:
                keep.append(tensors[value.name].data_ptr())
        count = len(keep) + HIDDEN_POINTERS
        values = (ctypes.c_uint64 * count)(*keep)
        first = ctypes.addressof(values)
        pointers = (ctypes.c_uint64 * count)(*(first + 8 * i for i in range(count)))
        grid = tuple(dim.value(sizes) for dim in spec.grid)
        shared = self.objects[key].shared_bytes
        self.cuda.launch(self.functions[key], grid, 32 * spec.num_warps, shared, ctypes.addressof(pointers))

    def run(self, product: Product, tensors: dict[str, torch.Tensor]) -> None:
        """Launch all kernels of a product and wait for them."""
        torch.cuda.synchronize()
        for spec in product.specs:
            self.put(spec, tensors, {"num_tokens": product.rows})
        self.cuda.wait()

    def seconds(self, work: Callable[[], None]) -> float:
        """Median seconds of `work`, captured in a CUDA graph."""
        torch.cuda.synchronize()
        graph = self.cuda.capture(work)
        self.cuda.launch_graph(graph)
        found = statistics.median(self.cuda.seconds(lambda: self.cuda.launch_graph(graph)) for _ in range(5))
        self.cuda.forget_graph(graph)
        return found


def tensors_of(product: Product) -> dict[str, torch.Tensor]:
    """Random operands and scratch memory by name; a quantized weight is packed by its layout."""
    step, rows = product.kernel.step, product.rows
    x = torch.randn(rows, step.k, device=PLACE) * torch.rand(rows, 1, device=PLACE)
    found = {"x": x.to(torch.bfloat16), "w": matrix_of(product)}
    kinds = {"f32": torch.float32, "bf16": torch.bfloat16}
    found["y"] = torch.full((rows, step.columns), torch.nan, device=PLACE, dtype=kinds[step.y.dtype])
    return found | {
        name: torch.full((size,), 255, dtype=torch.uint8, device=PLACE) for name, size in product.scratch.items()
    }


def matrix_of(product: Product) -> torch.Tensor:
    """W as it lies in memory."""
    step, layout = product.kernel.step, product.kernel.codes
    if layout is None:
        return (torch.randn(step.n, step.k, device=PLACE) / step.k**0.5).to(torch.bfloat16)
    form = layout.format
    assert isinstance(form, Float8)
    at = layout.codes_nbytes(step.n, step.k)  # type: ignore[attr-defined]
    packed = torch.zeros(layout.matrix_nbytes(step.n, step.k), dtype=torch.uint8, device=PLACE)
    codes = (torch.randn(step.n * step.k, device=PLACE) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
    scales = (torch.rand(step.n * form.blocks(step.k), device=PLACE) + 0.5) / 100 / step.k**0.5
    packed[: codes.numel()] = codes.view(torch.uint8)
    packed[at : at + 4 * scales.numel()] = scales.view(torch.uint8)
    return packed


def decoded(product: Product, packed: torch.Tensor) -> torch.Tensor:
    """The values of W, float64 [N, K]."""
    step, layout = product.kernel.step, product.kernel.codes
    assert layout is not None and isinstance(layout.format, Float8)
    form, n, k = layout.format, step.n, step.k
    at = layout.codes_nbytes(n, k)  # type: ignore[attr-defined]
    scales = packed[at : at + 4 * n * form.blocks(k)].view(torch.float32).reshape(-1, n).T.contiguous()
    return form.decode({"codes": packed[: n * k].reshape(n, k), "scales": scales}).double()


def row_parts(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Rows [rows, k] quantized to 8-bit floats: "codes" [rows, k] and "scales" [rows, 1]."""
    peaks = x.float().abs().amax(-1, keepdim=True)
    codes = (x.float() * (torch.full_like(peaks, 448) / peaks)).to(torch.float8_e4m3fn)
    return {"codes": codes.view(torch.uint8), "scales": peaks / 448}


def compare(device: Device, name: str, stored: str, rows: int, product: Product) -> str:
    """Compare one product with float64; a description of the error, or "" if it is right."""
    torch.manual_seed(0)
    tensors, step = tensors_of(product), product.kernel.step
    device.run(product, tensors)
    codes = tensors["codes"][: rows * step.k].reshape(rows, step.k)
    scales = tensors["scales"].view(torch.float32)[:rows].reshape(rows, 1)
    wanted = row_parts(tensors["x"])
    differ = float((codes != wanted["codes"]).float().mean())
    step_of_codes = int((codes.int() - wanted["codes"].int()).abs().max())  # 1 for neighbouring values of one sign
    far = float((scales / wanted["scales"] - 1).abs().max())
    rounded = Float8().decode({"codes": codes.clone(), "scales": scales}).double()
    y = rounded @ decoded(product, tensors["w"]).T
    if step.epilogue is not None:
        y = torch.nn.functional.silu(y[:, : step.columns]) * y[:, step.columns :]
    error = float((tensors["y"].double() - y).abs().max() / y.abs().max())
    tiling = product.tiling
    text = f"{name} {stored} {rows} rows, error {error:.1e}, codes that differ {differ:.1e}, scales {far:.1e}"
    if rows in (1, 33, 1000):
        print(f"  {text}  (m{tiling.m} n{tiling.n} k{tiling.k} splits {tiling.splits})", flush=True)
    right = error < IMPRECISE and step_of_codes <= 1 and differ < 2e-2 and far < 1e-6
    return "" if right else text


def measure(device: Device, timed: Sequence[tuple[str, str, int, Product]]) -> list[dict[str, Any]]:
    """Microseconds of all products and of torch's, one line per product and number of rows."""
    columns = ("bf16", "e4m3", "product", "fast", "blocks", "torch bf16", "scaled_mm", "fast mm")
    print("microseconds; product: without the rows; fast: the same, sums kept by the matrix units")
    print(f"{'product':8} {'rows':>5} " + " ".join(f"{c:>10}" for c in columns) + "   TFLOP/s of e4m3")
    by_rows = {(name, rows): {} for name, _, rows, _ in timed}
    for name, stored, rows, product in timed:
        by_rows[name, rows][stored] = product
    found = []
    for (name, rows), products in by_rows.items():
        row: dict[str, Any] = {"product": name, "rows": rows}
        row["bf16"] = microseconds(device, products["bf16"])
        row["e4m3"] = microseconds(device, products["e4m3"])
        row["product"] = microseconds(device, products["e4m3"], alone=True)
        row["fast"] = microseconds(device, products["e4m3 fast"], alone=True)
        row["blocks"] = microseconds(device, products["e4m3_kg128"])
        n, k, _ = LLAMA[name]
        row |= peers(n, k, rows)
        found.append(row)
        rate = 2.0 * n * k * rows / row["e4m3"] / 1e6
        print(f"{name:8} {rows:5} " + " ".join(f"{row[c]:10.1f}" for c in columns) + f"   {rate:.0f}", flush=True)
    for rows in ROWS:
        totals = {c: sum(row[c] for row in found if row["rows"] == rows) for c in columns}
        print(f"{'all':8} {rows:5} " + " ".join(f"{totals[c]:10.1f}" for c in columns))
    return found


def microseconds(device: Device, product: Product, alone: bool = False) -> float:
    """Microseconds of one product. alone: without the kernel that quantizes its rows."""
    tensors = tensors_of(product)
    copies = max(1, min(COLD // tensors["w"].nbytes, 8))
    weights = [tensors["w"], *(tensors["w"].clone() for _ in range(copies - 1))]
    specs = [spec for spec in product.specs if not alone or spec.entry != "linear_rows"]

    def work() -> None:
        for w in weights:
            for spec in specs:
                device.put(spec, tensors | {"w": w}, {"num_tokens": product.rows})

    device.run(product, tensors)
    return 1e6 * device.seconds(work) / copies


def peers(n: int, k: int, rows: int) -> dict[str, float]:
    """Microseconds of torch's products in bf16 and 8-bit floats, by name, in graphs over copies of the weight."""
    x = torch.randn(rows, k, device=PLACE, dtype=torch.bfloat16)
    copies = max(1, min(COLD // (2 * n * k), 8))
    dense = [torch.randn(n, k, device=PLACE, dtype=torch.bfloat16) for _ in range(copies)]
    codes, scale = x.to(torch.float8_e4m3fn), torch.ones(rows, 1, device=PLACE)
    eight = [w.to(torch.float8_e4m3fn) for w in dense] + [w.to(torch.float8_e4m3fn) for w in dense]
    columns = torch.ones(1, n, device=PLACE)

    def scaled(fast: bool) -> Callable[[], None]:
        def work() -> None:
            for w in eight:
                torch._scaled_mm(codes, w.t(), scale, columns, out_dtype=torch.bfloat16, use_fast_accum=fast)

        return work

    def plain() -> None:
        for w in dense:
            torch.mm(x, w.t())

    return {
        "torch bf16": torch_seconds(plain, len(dense)),
        "scaled_mm": torch_seconds(scaled(False), len(eight)),
        "fast mm": torch_seconds(scaled(True), len(eight)),
    }


def torch_seconds(work: Callable[[], None], count: int) -> float:
    """Median microseconds (not seconds) of one of `count` products in a graph; NaN if torch refuses."""
    try:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            work()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        times = []
        for _ in range(6):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end) * 1e3)
        return statistics.median(times[1:]) / count
    except RuntimeError as error:
        print(f"torch: {str(error).splitlines()[0][:150]}")
        return float("nan")


if __name__ == "__main__":
    sys.exit(main())
