"""Products of 4-bit weights and rows of 8-bit floats (W4A8) on this machine's GPU: against float64, then timed.

    python benchmarks/gpu_w4a8.py [--target h100] [--out build/gpu-w4a8.json]

First answers: products of several shapes, groups and numbers of rows, also odd ones, with float32 results, against the
products of the decoded rows and weights in float64. Then microseconds of Llama 8B's products, including the kernel that
rounds rows to 8 bits, in each tiling that does not spill, beside the tiling that the cost model picks, icc's products
in bf16, with 4-bit codes and 16-bit rows, and in 8-bit floats, and torch's bf16 and `torch._scaled_mm`. The status is 0
if all answers are right.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gpu_w8a8 as base
import torch
from gpu_w8a8 import Device, Product, microseconds, peers, row_parts
from icc.compiler.backends.triton.kernels.linear import LinearKernel
from icc.compiler.backends.triton.objects.compile import compile_specs, spec_key
from icc.compiler.backends.triton.plan import kernel_of
from icc.compiler.backends.triton.spec import Shape
from icc.compiler.backends.triton.tiling.choice import Config, Tuner
from icc.compiler.backends.triton.tiling.linear import LinearTilings, pick
from icc.compiler.backends.triton.tiling.machine import LinearTiling
from icc.compiler.program.layout import Stored
from icc.compiler.program.steps import linear as steps
from icc.compiler.targets import TARGETS
from icc.compiler.weights.formats.float8 import Float8
from icc.runtime.format.operands import BufferOperand, WeightOperand
from icc.runtime.format.plan import COUNTERS

FORM = "q4a8g128"
ODD = (("q4a8g128", 33, 384), ("q4a8g64", 520, 1024), ("q4a8g32", 130, 992))
CHECKED_ROWS = (17, 129, 300)
ROWS = (256, 512, 2048, 8192)
IMPRECISE = 1e-3  # error of sums relative to the largest result: Hopper keeps 13 bits of the sums within a step


@dataclass(frozen=True)
class Only(Tuner):
    """A tuner that picks one given tiling, whatever its cost."""

    config: Config | None = None

    def pick(self, key: str, candidates: Sequence[Config], cost: Any) -> Config:
        assert self.config is not None
        return self.config


def kernel(n: int, k: int, epilogue: Any, stored: str, result: str) -> LinearKernel:
    """The kernel of a product [rows, k] x [n, k] whose weight is in the format `stored`."""
    step = steps.LinearQ(
        kernel="product", x=BufferOperand("x", "bf16", k), w=WeightOperand("w", "u8"), k=k, n=n,
        y=BufferOperand("y", result, n if epilogue is None else epilogue.width), stored=Stored(stored, "product"),
        epilogue=epilogue,
    )  # fmt: skip
    found = kernel_of(step)
    assert isinstance(found, LinearKernel)
    return found


def tiled(made: LinearKernel, rows: int, config: Config, target: str) -> Product:
    """A product with its launches in one tiling."""
    tuner, shape = Only(TARGETS[target], config=config), Shape(rows, False)
    specs, scratch = made.launches(shape, base.LIMITS, tuner), made.scratch(shape, base.LIMITS, tuner)
    return Product(made, rows, specs, scratch, LinearTiling.of(config))


def tilings(made: LinearKernel, rows: int, target: str) -> list[Config]:
    """Tilings for rows of 8 bits: the one that the cost model picks, and others of one depth."""
    facts = made.product(rows, TARGETS[target].level)
    found = [c for c in LinearTilings(TARGETS[target]).candidates(facts) if c.get("eight")]
    chosen, split = pick(facts, Tuner(TARGETS[target])), 2 if rows <= 512 else 1
    unpacked = [c for c in found if c.get("unpacked") and c["m"] >= 128 and c["splits"] == 1 and c["stages"] == 3]
    found = [c for c in found if not c.get("unpacked")]
    return [*(c for c in found if c == chosen or (c["stages"] == 3 and c["splits"] <= split)), *unpacked]


def matrix(made: LinearKernel) -> torch.Tensor:
    """A random weight as it lies in memory: codes and scales."""
    step, layout = made.step, made.codes
    assert layout is not None
    at = layout.codes_nbytes(step.n, step.k)  # type: ignore[attr-defined]
    packed = torch.randint(0, 256, (layout.matrix_nbytes(step.n, step.k),), dtype=torch.uint8, device=base.PLACE)
    words = step.n * (step.k // layout.group)
    scales = ((torch.rand(words, device=base.PLACE) + 0.5) / 8 / step.k**0.5).view(torch.int32) & -256
    scales |= torch.randint(0, 16, (words,), dtype=torch.int32, device=base.PLACE)
    packed[at : at + 4 * words] = scales.view(torch.uint8)
    return packed


def decoded(made: LinearKernel, packed: torch.Tensor) -> torch.Tensor:
    """The values of W, float64 [N, K]."""
    step, layout = made.step, made.codes
    assert layout is not None
    parts = layout.unpack_matrix(packed.cpu().numpy(), step.n, step.k)
    return (
        layout.format.decode({name: torch.from_numpy(value) for name, value in parts.items()}).to(base.PLACE).double()
    )


def tensors_of(product: Product) -> dict[str, torch.Tensor]:
    """Random operands and scratch memory."""
    step, rows = product.kernel.step, product.rows
    x = torch.randn(rows, step.k, device=base.PLACE) * torch.rand(rows, 1, device=base.PLACE)
    kind = {"f32": torch.float32, "bf16": torch.bfloat16}[step.y.dtype]
    found = {"x": x.to(torch.bfloat16), "w": matrix(product.kernel)}
    found["y"] = torch.full((rows, step.columns), torch.nan, device=base.PLACE, dtype=kind)
    found["counters"] = torch.zeros(COUNTERS, dtype=torch.int32, device=base.PLACE)
    return found | {
        name: torch.full((size,), 255, dtype=torch.uint8, device=base.PLACE) for name, size in product.scratch.items()
    }


def compare(device: Device, name: str, product: Product) -> str:
    """Compare one product with float64; a description of the error, or "" if it is right."""
    torch.manual_seed(0)
    tensors, step = tensors_of(product), product.kernel.step
    device.run(product, tensors)
    parts = row_parts(tensors["x"])
    codes = tensors["codes"][: product.rows * step.k].reshape(product.rows, step.k)
    differ = int((codes.int() - parts["codes"].int()).abs().max())  # neighbouring values of one sign: codes differ by 1
    y = Float8().decode({**parts, "codes": codes.clone()}).double() @ decoded(product.kernel, tensors["w"]).T
    if step.epilogue is not None:
        y = torch.nn.functional.silu(y[:, : step.columns]) * y[:, step.columns :]
    error = float((tensors["y"].double() - y).abs().max() / y.abs().max())
    t = product.tiling
    text = f"{name} {product.rows} rows, m{t.m} n{t.n} warps {t.warps} stages {t.stages} splits {t.splits}: {error:.1e}"
    return "" if error < IMPRECISE and differ <= 1 else f"{text}, codes {differ} apart"


def main() -> int:
    """Compile everything, check, measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="h100")
    parser.add_argument("--out", type=Path, default=Path("build/gpu-w4a8.json"))
    parser.add_argument("--compile-only", action="store_true", help="needs no GPU")
    a = parser.parse_args()
    checks: list[tuple[str, Product]] = []
    for stored, n, k in ODD:
        made = kernel(n, k, None, stored, "f32")
        for rows in CHECKED_ROWS:
            checks += [
                (f"{stored} {n} x {k}", tiled(made, rows, c, a.target)) for c in tilings(made, 512, a.target)[::4]
            ]
    for name in ("o", "gate_up"):
        made = kernel(*base.LLAMA[name], FORM, "f32")
        checks += [(name, tiled(made, 300, c, a.target)) for c in tilings(made, 512, a.target)]
    timed: dict[tuple[str, int], list[Product]] = {}
    for name, facts in base.LLAMA.items():
        made = kernel(*facts, FORM, "bf16")
        for rows in ROWS:
            timed[name, rows] = [tiled(made, rows, c, a.target) for c in tilings(made, rows, a.target)]
    others = {
        (name, rows, stored): Product.of(*base.LLAMA[name], stored, rows, "bf16", a.target)
        for name in base.LLAMA for rows in ROWS for stored in ("bf16", "q4g128", "e4m3")
    }  # fmt: skip
    every = [*(p for _, p in checks), *(p for products in timed.values() for p in products), *others.values()]
    refused: dict[str, str] = {}
    objects = compile_specs([spec for p in every for spec in p.specs], TARGETS[a.target], refused=refused)
    spilled = {key: found.spill_bytes for key, found in objects.items() if found.spill_bytes}
    print(f"{len(objects)} kernels, {len(refused)} refused; spilled: {spilled or 'none'}", flush=True)
    if a.compile_only:
        return 0

    def usable(product: Product) -> bool:
        return all(spec_key(spec) in objects for spec in product.specs)

    device = Device(base.Cuda(), objects)
    checked = [(name, p) for name, p in checks if usable(p)]
    wrong = [line for name, p in checked if (line := compare(device, name, p))]
    print(f"{len(checked)} products against float64: {len(wrong)} wrong", flush=True)
    print("\n".join(wrong[:40]), flush=True)
    a.out.parent.mkdir(parents=True, exist_ok=True)
    found = measure(
        device, {at: [p for p in products if usable(p)] for at, products in timed.items()}, others, a.target
    )
    a.out.write_text(json.dumps({"wrong": wrong, "times": found}, indent=1) + "\n")
    print("WRONG" if wrong else "ALL RIGHT")
    return 1 if wrong else 0


def measure(
    device: Device,
    timed: dict[tuple[str, int], list[Product]],
    others: dict[tuple[str, int, str], Product],
    target: str,
) -> list[dict[str, Any]]:
    """Microseconds of all products, and of each tiling beside the model's prediction."""
    base.tensors_of = _tensors  # type: ignore[assignment]
    names = ("picked", "best", "coding", "bf16", "q4g128", "e4m3", "torch bf16", "scaled_mm", "fast mm")
    print(f"{'product':8} {'rows':>5} " + " ".join(f"{c:>10}" for c in names) + "   the best tiling")
    found = []
    for (name, rows), products in timed.items():
        row: dict[str, Any] = {"product": name, "rows": rows, "tilings": []}
        facts = products[0].kernel.product(rows, TARGETS[target].level)
        model = LinearTilings(TARGETS[target])
        chosen = pick(facts, Tuner(TARGETS[target]))
        times, alone = {}, {}
        for product in products:
            config = {key: value for key, value in vars(product.tiling).items() if key != "unpacked" or value}
            text = "m{m} n{n} warps {warps} stages {stages} splits {splits}".format(**config)
            text += " unpacked" * product.tiling.unpacked
            times[text], alone[text] = microseconds(device, product), microseconds(device, product, alone=True)
            row["tilings"].append({"tiling": text, "us": times[text], "model": 1e6 * model.seconds(facts, config)})
            if config == chosen:
                row["picked"] = times[text]
        best = min(times, key=lambda text: times[text])
        row["best"] = times[best]
        row["coding"] = times[best] - alone[best]  # of the rows, by a kernel of its own
        row |= {stored: microseconds(device, others[name, rows, stored]) for stored in ("bf16", "q4g128", "e4m3")}
        n, k, _ = base.LLAMA[name]
        row |= peers(n, k, rows)
        found.append(row)
        cells = " ".join(f"{row.get(c, float('nan')):10.1f}" for c in names)
        print(f"{name:8} {rows:5} {cells}   {best}", flush=True)
    for rows in ROWS:
        mine = [row for row in found if row["rows"] == rows]
        cells = " ".join(f"{sum(row.get(c, row['q4g128']) for row in mine):10.1f}" for c in names)
        print(f"{'all':8} {rows:5} {cells}")
    return found


def _tensors(product: Product) -> dict[str, torch.Tensor]:
    """As `gpu_w8a8.tensors_of`, also for 4-bit codes."""
    if product.kernel.step.stored.format.startswith("q4"):
        return tensors_of(product)
    return _tensors_of(product) | {"counters": torch.zeros(COUNTERS, dtype=torch.int32, device=base.PLACE)}


_tensors_of = base.tensors_of

if __name__ == "__main__":
    sys.exit(main())
