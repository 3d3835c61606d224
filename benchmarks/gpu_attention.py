"""Attention kernels on this machine's GPU: correctness against float64, then the speed of every tiling beside torch's.

    python benchmarks/gpu_attention.py [--target h100] [--only prefill,decode,latent,dims] [--compile-only]

prefill: prompts of Llama 8B (32 query heads, 8 KV heads, 128 dims, bf16), alone and after a cached prefix; decode: its
decode batches; latent: decode steps of DeepSeek V3's heads (128 over one latent of 576 dims, values are its first 512);
dims: prompts of these, and of heads of 64 and 256 dims. Each is checked at a small size against float64, then timed in
CUDA graphs over several caches, so that no key comes out of L2. Prints the cost model's choice, the fastest tilings,
TFLOP/s or GB/s, and torch's scaled_dot_product_attention (flash and cuDNN) on contiguous keys. The status is 0 if all
answers are right.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from gpu_w8a8 import Device, torch_seconds
from icc.compiler.backends.triton.kernels.attention import AttentionKernel
from icc.compiler.backends.triton.kernels.caches import KV_ALIGN
from icc.compiler.backends.triton.objects.compile import Compiled, compile_specs, spec_key
from icc.compiler.backends.triton.plan import kernel_of
from icc.compiler.backends.triton.spec import LaunchSpec, Shape
from icc.compiler.backends.triton.tiling.attention import (
    MOST_SPLITS,
    AttentionTiling,
    Workload,
    _shared_bytes,
    decode_tiling,
    mixed_tiling,
)
from icc.compiler.backends.triton.tiling.choice import Tuner
from icc.compiler.program.steps.attention import Attention as Step
from icc.compiler.targets import TARGETS
from icc.runtime.format.kv import KVLayer
from icc.runtime.format.manifest import Limits
from icc.runtime.format.operands import BufferOperand
from icc.runtime.format.plan import COUNTERS

LIMITS = Limits(max_seq_len=16384, max_batch_size=64, max_step_tokens=8192)
BLOCK = 64
IMPRECISE = 1.5e-2  # error relative to the largest result; attention weights and results are rounded to bf16
COLD = 160 << 20  # bytes of caches, more than L2 holds
SHOWN = 6  # how many of the fastest tilings are printed


@dataclass(frozen=True)
class Layer:
    """The heads of a layer and their dims. shared: values are the first dims of the keys (a latent)."""

    q_heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    shared: bool = False

    def kernel(self) -> AttentionKernel:
        """Its kernel over bf16 pages, for queries that are rotated already."""
        kv = KVLayer(self.kv_heads, self.key_dim, self.value_dim, shared=self.shared, align=KV_ALIGN)
        q = BufferOperand("q", "bf16", self.q_heads * self.key_dim)
        o = BufferOperand("o", "bf16", self.q_heads * self.value_dim)
        cached: dict[str, Any] = {"kv": kv, "cache": "bf16", "block_size": BLOCK}
        found = kernel_of(Step(kernel="a", q=q, o=o, q_heads=self.q_heads, scale=self.key_dim**-0.5, **cached))
        assert isinstance(found, AttentionKernel)
        return found


@dataclass(frozen=True)
class Case:
    """`seqs` sequences, each with `before` tokens in the cache and `new` tokens in the step."""

    layer: Layer
    seqs: int
    before: int
    new: int

    @property
    def decode(self) -> bool:
        return self.new == 1

    @property
    def flops(self) -> float:
        seen = self.seqs * self.new * (self.before + (self.new + 1) / 2)
        return 2.0 * seen * self.layer.q_heads * (self.layer.key_dim + self.layer.value_dim)

    @property
    def read(self) -> float:
        """Bytes of the cache that the step reads."""
        layer = self.layer
        dims = layer.key_dim + (0 if layer.shared else layer.value_dim)
        return 2.0 * self.seqs * (self.before + self.new) * layer.kv_heads * dims

    @property
    def text(self) -> str:
        return f"{self.seqs} x {self.new} behind {self.before}"


@dataclass(frozen=True)
class Choice:
    """A tiling with its launches."""

    name: str
    specs: tuple[LaunchSpec, ...]
    splits: int


LLAMA, DEEPSEEK = Layer(32, 8, 128, 128), Layer(128, 1, 576, 512, shared=True)
SMALL, GEMMA = Layer(32, 8, 64, 64), Layer(16, 8, 256, 256)
CASES = {
    "prefill": (Case(LLAMA, 1, 0, 512), Case(LLAMA, 1, 0, 2048), Case(LLAMA, 1, 0, 8192), Case(LLAMA, 4, 6144, 512)),
    "decode": (Case(LLAMA, 1, 2047, 1), Case(LLAMA, 1, 8191, 1), Case(LLAMA, 16, 2047, 1), Case(LLAMA, 64, 2047, 1)),
    "latent": (Case(DEEPSEEK, 1, 4095, 1), Case(DEEPSEEK, 16, 4095, 1), Case(DEEPSEEK, 64, 2047, 1)),
    "dims": (Case(SMALL, 1, 0, 2048), Case(GEMMA, 1, 0, 2048), Case(DEEPSEEK, 1, 0, 1024)),
}
CHECKED = {
    "prefill": (Case(LLAMA, 3, 77, 333), Case(LLAMA, 1, 0, 700)),
    "decode": (Case(LLAMA, 3, 500, 1), Case(LLAMA, 1, 1500, 1)),
    "latent": (Case(DEEPSEEK, 3, 500, 1),),
    "dims": (Case(SMALL, 2, 70, 100), Case(GEMMA, 2, 70, 100), Case(DEEPSEEK, 2, 70, 50)),
}


def choices(case: Case, tuner: Tuner) -> Iterator[Choice]:
    """Yield the tiling that the cost model picks, then all others that may be faster."""
    kernel, shape = case.layer.kernel(), Shape(case.seqs * case.new, case.decode)
    splits = kernel._splits(shape, LIMITS, tuner)
    picked = decode_tiling(kernel.workload, tuner) if case.decode else mixed_tiling(*_facts(kernel, shape, tuner))

    def made(name: str, tiling: AttentionTiling, splits: int) -> Choice:
        launches = kernel._decode(tiling, splits, shape) if case.decode else kernel._mixed(tiling, splits)
        return Choice(f"{name}{text_of(tiling)} /{splits}", launches, splits)

    yield made("picked ", picked, splits)
    for heads, rows, tile, warps, stages in _others(case):
        tiling = replace(picked, rows=rows, heads=heads, tile=tile, warps=warps, stages=stages)
        config = {"rows": rows, "tile": tile, "stages": stages}
        if _shared_bytes(kernel.workload, tuner.target, config) > tuner.target.shared_memory_kib << 10:
            continue
        for count in sorted({splits, max(splits // 2, 1), min(splits * 2, 64)}) if case.decode else (1,):
            yield made("", tiling, count)


def _facts(kernel: AttentionKernel, shape: Shape, tuner: Tuner) -> tuple[Workload, int, Tuner]:
    return kernel.workload, shape.tiled_tokens, tuner


def _others(case: Case) -> Iterator[tuple[int, int, int, int, int]]:
    """(query heads, rows, keys, warps, stages) of tilings worth a try."""
    group = case.layer.q_heads // case.layer.kv_heads
    if case.decode:
        for rows, warps in ((16, 4), (32, 8), (64, 8)) if group > 64 else ((16, 4),):
            for tile in (32, 64):
                for stages in (2, 3, 4):
                    yield min(group, rows), rows, tile, warps, stages
        return
    for rows, warps in ((64, 4), (64, 8), (128, 8), (128, 4)):
        for tile in (32, 64, 128):
            for stages in (2, 3, 4):
                if rows * case.layer.value_dim <= 8192 * warps and (warps == 4 or rows == 128 or group > 64):
                    yield min(group, rows), rows, tile, warps, stages


def text_of(t: AttentionTiling) -> str:
    return f"m{t.rows} h{t.heads} n{t.tile} w{t.warps} p{t.stages}"


def tensors_of(case: Case, splits: int, caches: int = 1) -> list[dict[str, torch.Tensor]]:
    """Random operands, one set per cache, over pages in random order."""
    layer, kernel = case.layer, case.layer.kernel()
    length, tokens = case.before + case.new, case.seqs * case.new
    each = -(-length // BLOCK)
    q = torch.randn(tokens, layer.q_heads * layer.key_dim, device="cuda").bfloat16()
    states = tokens * layer.q_heads * splits
    common = {
        "q": q, "o": torch.full((tokens, layer.q_heads * layer.value_dim), torch.nan, device="cuda").bfloat16(),
        "seq_starts": torch.arange(case.seqs + 1, device="cuda", dtype=torch.int32) * case.new,
        "context_lens": torch.full((case.seqs,), length, device="cuda", dtype=torch.int32),
        "positions": (torch.arange(tokens, device="cuda") % case.new + case.before).to(torch.int32),
        "tree_masks": torch.zeros(tokens, 2, device="cuda", dtype=torch.int32),
        "counters": torch.zeros(COUNTERS * case.seqs, device="cuda", dtype=torch.int32),
        "peaks": torch.empty(states, device="cuda"), "totals": torch.empty(states, device="cuda"),
        "partials": torch.empty(states * layer.value_dim, device="cuda"),
    }  # fmt: skip
    found = []
    for _ in range(caches):
        pages = torch.randn(case.seqs * each, kernel.page_stride, device="cuda").bfloat16()
        tables = torch.randperm(case.seqs * each, device="cuda").to(torch.int32).view(case.seqs, each)
        found.append({**common, "kv": pages, "block_tables": tables})
    return found


def put(device: Device, choice: Choice, case: Case, given: dict[str, torch.Tensor]) -> None:
    """Launch all kernels of a tiling on the stream."""
    sizes = {
        "num_tokens": case.seqs * case.new, "num_seqs": case.seqs, "max_blocks": given["block_tables"].shape[1],
        "num_moves": 0,
    }  # fmt: skip
    for spec in choice.specs:
        device.put(spec, given, sizes)


def expected(case: Case, given: dict[str, torch.Tensor]) -> torch.Tensor:
    """The reference result in float64 [tokens, heads * value_dim]."""
    layer, kernel = case.layer, case.layer.kernel()
    length, found = case.before + case.new, []
    for seq in range(case.seqs):
        pages = given["kv"][given["block_tables"][seq].long()].double()
        width = layer.kv_heads * BLOCK * layer.key_dim
        k = pages[:, :width].view(-1, layer.kv_heads, BLOCK, layer.key_dim).transpose(0, 1).flatten(1, 2)[:, :length]
        if layer.shared:
            v = k[..., : layer.value_dim]
        else:
            v = pages[:, kernel.values_offset :][:, : layer.kv_heads * BLOCK * layer.value_dim]
            v = v.reshape(-1, layer.kv_heads, BLOCK, layer.value_dim).transpose(0, 1).flatten(1, 2)[:, :length]
        q = given["q"][seq * case.new : (seq + 1) * case.new].double().view(case.new, layer.q_heads, -1).transpose(0, 1)
        k, v = (x.repeat_interleave(layer.q_heads // layer.kv_heads, 0) for x in (k, v))
        scores = q @ k.transpose(1, 2) * layer.key_dim**-0.5
        later = torch.ones(case.new, length, dtype=torch.bool, device="cuda").triu(case.before + 1)
        weights = scores.masked_fill(later, -torch.inf).softmax(-1)
        found.append((weights @ v).transpose(0, 1).reshape(case.new, -1))
    return torch.cat(found)


def error_of(device: Device, choice: Choice, case: Case, given: dict[str, torch.Tensor], wanted: torch.Tensor) -> float:
    given["o"].fill_(torch.nan)
    torch.cuda.synchronize()
    put(device, choice, case, given)
    device.cuda.wait()
    error = float((given["o"].double() - wanted).abs().max() / wanted.abs().max())
    return error if error == error else float("inf")


def peer(case: Case, caches: int) -> dict[str, float]:
    """Microseconds of torch's flash and cuDNN kernels on contiguous keys, by name."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.bias import causal_lower_right

    layer, length, found = case.layer, case.before + case.new, {}
    kwargs: dict[str, Any] = {"scale": layer.key_dim**-0.5}
    q = torch.randn(case.seqs, layer.q_heads, case.new, layer.key_dim, device="cuda").bfloat16()
    heads = case.seqs, layer.kv_heads, length
    ks, vs = (
        [torch.randn(*heads, dim, device="cuda").bfloat16() for _ in range(caches)]
        for dim in (layer.key_dim, layer.value_dim)
    )
    if case.new > 1:
        kwargs |= {"attn_mask": causal_lower_right(case.new, length)} if case.before else {"is_causal": True}
    for name, backend in (("flash", SDPBackend.FLASH_ATTENTION), ("cudnn", SDPBackend.CUDNN_ATTENTION)):

        def work() -> None:
            for k, v in zip(ks, vs, strict=True):
                torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True, **kwargs)

        with sdpa_kernel(backend):
            try:
                found[name] = torch_seconds(work, caches)
            except (TypeError, ValueError, NotImplementedError) as error:
                print(f"torch, {name}: {str(error).splitlines()[0][:100]}")
    return found


def compare(device: Device, name: str, cases: tuple[Case, ...], tuner: Tuner) -> dict[str, float]:
    """Check every tiling on small cases; the largest relative error by tiling."""
    found: dict[str, float] = {}
    for case in cases:
        torch.manual_seed(0)
        every = list(choices(case, tuner))
        given = tensors_of(case, MOST_SPLITS if case.decode else 1)[0]
        wanted = expected(case, given)
        for choice in every:
            if all(spec_key(spec) in device.objects for spec in choice.specs):
                plain = choice.name.split(" /")[0]
                found[plain] = max(found.get(plain, 0.0), error_of(device, choice, case, given, wanted))
    wrong = {key: error for key, error in found.items() if not error < IMPRECISE}
    print(f"{name}: {len(found)} tilings, largest error {max(found.values()):.1e}; wrong: {wrong or 'none'}")
    return found


def measure(device: Device, case: Case, tuner: Tuner, until: float) -> None:
    """Time the tilings that compiled, until the time `until`, and torch's kernels."""
    caches = max(1, min(int(COLD // case.read), 8))
    picked, rows = "", []
    givens = tensors_of(case, MOST_SPLITS if case.decode else 1, caches)
    for choice in choices(case, tuner):
        if not all(spec_key(spec) in device.objects for spec in choice.specs) or time.monotonic() > until:
            continue

        def work(choice: Choice = choice, givens: list[dict[str, torch.Tensor]] = givens) -> None:
            for given in givens:
                put(device, choice, case, given)

        rows.append((1e6 * device.seconds(work) / caches, choice.name))
        picked = picked or choice.name
    del givens
    peers = peer(case, caches) if not case.layer.shared else {}
    shown = " ".join(f"{name} {us:.1f}" for name, us in peers.items())
    print(f"{case.text} ({case.read / 1e6:.0f} MB, {case.flops / 1e9:.1f} GFLOP); torch {shown or 'none'}")
    for us, name in sorted(rows)[:SHOWN] + [row for row in rows if row[1] == picked]:
        rates = f"{case.flops / us / 1e6:6.0f} TFLOP/s {case.read / us / 1e3:6.0f} GB/s"
        print(f"  {us:8.1f} us {rates}  {name}", flush=True)


def main() -> int:
    """Compile, check, measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="h100")
    parser.add_argument("--only", default="prefill,decode,latent,dims")
    parser.add_argument("--compile-only", action="store_true", help="needs no GPU")
    parser.add_argument("--seconds", type=float, default=60.0, help="limit for timing; cases after it are skipped")
    a = parser.parse_args()
    tuner = Tuner(TARGETS[a.target])
    names = a.only.split(",")
    every = [case for name in names for case in (*CASES[name], *CHECKED[name])]
    specs = [spec for case in every for choice in choices(case, tuner) for spec in choice.specs]
    objects = compile_specs(specs, tuner.target, refused={})
    most = tuner.target.shared_memory_kib << 10
    fits: dict[str, Compiled] = {key: o for key, o in objects.items() if o.shared_bytes <= most and not o.spill_bytes}
    print(f"{len(objects)} kernels, {len(fits)} fit and do not spill", flush=True)
    if a.compile_only:
        return 0
    device = Device(_cuda(), fits)
    errors = {name: compare(device, name, CHECKED[name], tuner) for name in names}
    until = time.monotonic() + a.seconds
    for name in names:
        for case in CASES[name]:
            measure(device, case, tuner, until)
    right = all(error < IMPRECISE for found in errors.values() for error in found.values())
    print("ALL RIGHT" if right else "WRONG")
    return 0 if right else 1


def _cuda() -> Any:
    from icc.runtime.executor.cuda.driver import Cuda

    return Cuda()


if __name__ == "__main__":
    sys.exit(main())
