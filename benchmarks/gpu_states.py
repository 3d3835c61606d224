"""Recurrent layers on this machine's GPU: chunked prompts against a float64 reference, and the time per token.

    python benchmarks/gpu_states.py [--target h100]

A layer of Qwen3-Next (gated delta rule, 32 heads of 128 x 128) and one of a Mamba-2 model (state spaces, 80 heads of
128 x 64): two sequences in one step against the op's reference in float64 (results and final states), then a prompt of
2,048 tokens in chunks and token by token, in CUDA graphs. Then steps of one token for 1 and 64 sequences, with these
layers and with layers of Kimi Linear (a decay per row), Mamba and RecurrentGemma, with float32 and bf16 states: GB/s of
states read and written. The status is 0 if all answers are right.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from typing import Any

import torch
from gpu_w8a8 import Device
from icc.compiler.backends.triton.kernels.state import GatedScanKernel, StateKernel
from icc.compiler.backends.triton.objects.compile import compile_specs
from icc.compiler.backends.triton.plan import kernel_of
from icc.compiler.backends.triton.spec import LaunchSpec, Shape
from icc.compiler.backends.triton.tiling.choice import Tuner
from icc.compiler.ops import OPS
from icc.compiler.program.steps import state as steps
from icc.compiler.program.steps.base import STEPS, operand_fields
from icc.compiler.targets import TARGETS
from icc.runtime.executor.cuda.driver import Cuda
from icc.runtime.format.manifest import Limits
from icc.runtime.format.operands import BufferOperand

LIMITS = Limits(max_seq_len=8192, max_batch_size=64, max_step_tokens=2048)
LAYERS: dict[str, dict[str, Any]] = {
    "gated delta rule": {"heads": 32, "shared": 16, "key_dim": 128, "value_dim": 128, "delta": True},
    "state space": {"heads": 80, "shared": 1, "key_dim": 128, "value_dim": 64, "delta": False},
}
ONE_BY_ONE: dict[str, tuple[str, dict[str, Any]]] = {
    "gated delta rule": ("gated_scan", LAYERS["gated delta rule"]),
    "state space": ("gated_scan", LAYERS["state space"]),
    "decay per row": ("gated_scan", {**LAYERS["gated delta rule"], "shared": 32, "row_decay": True}),
    "Mamba": ("selective_scan", {"channels": 8192, "states": 16}),
    "linear recurrence": ("channel_scan", {"channels": 2560}),
    "convolution": ("causal_conv", {"channels": 8192, "taps": 4}),
}
BATCHES, COLD = (1, 64), 160 << 20  # bytes of states, more than any cache holds
PROMPT, CHECKED = 2048, (300, 41)
IMPRECISE = 2e-3  # error relative to the largest result; results are bf16


def kernel(heads: int, shared: int, key_dim: int, value_dim: int, delta: bool) -> GatedScanKernel:
    """The scan kernel of a layer with bf16 rows and float32 decays."""
    widths = {"q": shared * key_dim, "k": shared * key_dim, "v": heads * value_dim, "o": heads * value_dim}
    operands = {name: BufferOperand(name, "bf16", width) for name, width in widths.items()}
    rates = {name: BufferOperand(name, "f32", heads) for name in ("decay", "beta")}
    step = steps.GatedScan(
        kernel="scan", layer=0, **operands, **rates, heads=heads, shared=shared, key_dim=key_dim, value_dim=value_dim,
        delta=delta, chunk=0, block_size=LIMITS.max_seq_len,
    )  # fmt: skip
    found = kernel_of(step)
    assert isinstance(found, GatedScanKernel)
    return found


def with_warps(specs: tuple[LaunchSpec, ...], warps: int) -> tuple[LaunchSpec, ...]:
    """The launches with `warps` warps per program in the last one."""
    return (*specs[:-1], replace(specs[-1], num_warps=warps))


def kernel_of_one(op: str, facts: dict[str, Any], rounded: bool) -> StateKernel[Any]:
    """A layer's kernel with bf16 rows, float32 decays and weights, and bf16 states if `rounded`, else float32."""
    cls = STEPS[op]
    wide = {"decay", "beta", "dt", "a", "w"}
    facts = {"kernel": "scan", "block_size": LIMITS.max_seq_len, **facts} | ({"rounded": True} if rounded else {})
    if op == "gated_scan":
        facts |= {"chunk": 0, "layer": 0}
    names = [n for n in operand_fields(cls) if n != "bias"]
    made = {n: BufferOperand(n, "f32" if n in wide else "bf16", 1) for n in names}
    widths = cls(**made, **facts).widths()
    found = kernel_of(cls(**{n: BufferOperand(n, o.dtype, widths[n]) for n, o in made.items()}, **facts))
    assert isinstance(found, StateKernel)
    return found


def time_one(device: Device, name: str, made: StateKernel[Any], spec: LaunchSpec, batch: int) -> None:
    """Time a step of one token per sequence, which updates states in place; print microseconds and GB/s."""
    nbytes = 2 * batch * made.state_stride * (2 if made.rounded else 4)
    copies = max(1, min(COLD // nbytes, 64))
    kinds = {"f32": torch.float32, "bf16": torch.bfloat16}
    given = {
        n: (-torch.rand(batch, o.stride, device="cuda")).to(kinds[o.dtype]) / 8 for n, o in made.step.operands.items()
    }
    arange = torch.arange(batch + 1, dtype=torch.int32, device="cuda")
    given |= {"positions": arange[:batch] + 1, "seq_starts": arange, "slot_mapping": arange, "block_tables": arange}
    states = [
        torch.rand(batch, made.state_stride, device="cuda").to(torch.bfloat16 if made.rounded else torch.float32)
        for _ in range(copies)
    ]
    sizes = {"num_tokens": batch, "num_seqs": batch, "max_blocks": 1}

    def work() -> None:
        for kv in states:
            device.put(spec, given | {"kv": kv}, sizes)

    seconds = device.seconds(work) / copies
    kind = "bf16" if made.rounded else "f32"
    print(f"  {name}, {kind} states, {batch} sequences: {1e6 * seconds:.1f} us, {nbytes / seconds / 1e9:.0f} GB/s")


def tensors(made: GatedScanKernel, lengths: tuple[int, ...], scratch: int) -> dict[str, torch.Tensor]:
    """Random operands of several sequences in one step, whose states are written after their last tokens."""
    s, count = made.step, sum(lengths)
    keys = torch.nn.functional.normalize(torch.randn(count, s.shared, s.key_dim, device="cuda"), dim=-1)
    starts = torch.tensor([0, *lengths], device="cuda").cumsum(0)
    slots = torch.full((count,), -1, dtype=torch.int32, device="cuda")
    slots[starts[1:] - 1] = torch.arange(len(lengths), dtype=torch.int32, device="cuda")
    found = {
        "q": torch.randn(count, s.shared * s.key_dim, device="cuda").bfloat16(),
        "k": keys.reshape(count, -1).bfloat16(),
        "v": torch.randn(count, s.heads * s.value_dim, device="cuda").bfloat16(),
        "decay": -(torch.rand(count, s.heads, device="cuda") ** 6) * 5,
        "beta": torch.rand(count, s.heads, device="cuda"),
        "o": torch.full((count, s.heads * s.value_dim), torch.nan, device="cuda", dtype=torch.bfloat16),
        "positions": torch.cat([torch.arange(n, dtype=torch.int32, device="cuda") for n in lengths]),
        "slot_mapping": slots, "seq_starts": starts.to(torch.int32),
        "block_tables": torch.arange(len(lengths), dtype=torch.int32, device="cuda"),
        "kv": torch.full((len(lengths), made.state_stride), torch.nan, device="cuda"),
    }  # fmt: skip
    return found | {"solved": torch.empty(max(scratch, 256), dtype=torch.uint8, device="cuda")}


def compare(device: Device, name: str, made: GatedScanKernel, specs: tuple[LaunchSpec, ...], scratch: int) -> bool:
    """Whether the results of chunks and the final states are those of the reference."""
    s, given = made.step, tensors(made, CHECKED, scratch)
    put(device, specs, given, len(CHECKED))
    device.cuda.wait()
    wrong, at = 0.0, 0
    for number, length in enumerate(CHECKED):
        here = slice(at, at + length)
        q, k = (given[n][here].cpu().double().reshape(length, s.shared, s.key_dim) for n in ("q", "k"))
        v = given["v"][here].cpu().double().reshape(length, s.heads, s.value_dim)
        rest = v, given["decay"][here].cpu().double(), given["beta"][here].cpu().double(), s.delta, 0
        wanted = OPS["gated_scan"].reference(q, k, *rest).reshape(length, -1)
        wrong = max(wrong, _error(given["o"][here].cpu().double(), wanted))
        row = torch.zeros_like(q)
        row[-1, :, 3] = 1.0  # this query reads row 3 of the state after the last token
        wanted = OPS["gated_scan"].reference(row, k, *rest)[-1]
        size = s.key_dim * s.value_dim
        left = given["kv"][number, : s.heads * size].cpu().double().reshape(s.heads, s.key_dim, s.value_dim)[:, 3]
        wrong = max(wrong, _error(left, wanted))
        at += length
    print(f"{name}: error {wrong:.1e}", flush=True)
    return wrong < IMPRECISE * 4


def _error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).abs().max() / wanted.abs().max())


def put(device: Device, specs: tuple[LaunchSpec, ...], given: dict[str, torch.Tensor], seqs: int) -> None:
    """Launch all kernels on the stream."""
    sizes = {"num_tokens": len(given["o"]), "num_seqs": seqs, "max_blocks": 1}
    for spec in specs:
        device.put(spec, given, sizes)


def main() -> int:
    """Compile, check, measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="h100")
    parser.add_argument("--compile-only", action="store_true", help="needs no GPU")
    a = parser.parse_args()
    tuner = Tuner(TARGETS[a.target])
    chunks, one_by_one = Shape(PROMPT, False), Shape(PROMPT, False, typical=128)
    made = {name: kernel(**facts) for name, facts in LAYERS.items()}
    launches = {n: [k.launches(shape, LIMITS, tuner) for shape in (chunks, one_by_one)] for n, k in made.items()}
    ones = []
    for name, (op, facts) in ONE_BY_ONE.items():
        for rounded in (False, True) if "rounded" in STEPS[op].__struct_fields__ else (False,):
            one = kernel_of_one(op, facts, rounded)
            ones.append((name, one, one.launches(Shape(BATCHES[-1], True), LIMITS, tuner)[0]))
    every = [spec for both in launches.values() for specs in both for spec in specs] + [spec for *_, spec in ones]
    every += [spec for chunked, _ in launches.values() for warps in (1, 2) for spec in with_warps(chunked, warps)]
    objects = compile_specs(every, tuner.target)
    print(f"{len(objects)} kernels, {sum(o.spill_bytes for o in objects.values())} bytes spilled", flush=True)
    if a.compile_only:
        return 0
    device, right = Device(Cuda(), objects), True
    for name, (by_chunks, by_token) in launches.items():
        scratch = made[name].scratch(chunks, LIMITS, tuner).get("solved", 0)
        torch.manual_seed(0)
        right &= compare(device, name, made[name], by_chunks, scratch)
        given = tensors(made[name], (PROMPT,), scratch)
        few, two = (with_warps(by_chunks, warps) for warps in (1, 2))
        every = (("chunks", by_chunks), ("by 1 warp", few), ("by 2 warps", two), ("token by token", by_token))
        for text, specs in every:
            seconds = device.seconds(lambda specs=specs, given=given: put(device, specs, given, 1))
            print(f"  {text}: {1e9 * seconds / PROMPT:.0f} ns per token of a prompt of {PROMPT}", flush=True)
    print("one token of each sequence; bytes read and written:")
    for name, one, spec in ones:
        for batch in BATCHES:
            time_one(device, name, one, spec, batch)
    print("ALL RIGHT" if right else "WRONG")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
