"""Prompts of recurrences with a matrix as the state, as products over chunks: against the op's reference in float64."""

from __future__ import annotations

import pytest
import torch
from icc.compiler.backends.triton.kernels.state import CHUNK, GatedScan
from icc.compiler.backends.triton.spec import Shape
from icc.compiler.ops import OPS
from interpreting import make_kernel, run_kernel
from sizes import soak
from torch import Tensor

HEADS, SHARED = 2, 1
LENGTHS = (40, 1, 75, 30)  # of sequences that lie behind each other in a step


def random_inputs(tokens: int, key: int, value: int, kind: torch.dtype) -> dict[str, Tensor]:
    """Operands [tokens, heads, ..]; keys of length 1, decays of which some forget everything."""
    k = torch.nn.functional.normalize(torch.randn(tokens, SHARED, key), dim=-1)
    k[tokens // 2] = k[tokens // 2 - 1]  # a token that comes again
    found = {"q": torch.randn(tokens, SHARED, key), "k": k, "v": torch.randn(tokens, HEADS, value)}
    wide = {"decay": -(torch.rand(tokens, HEADS) ** 6) * 30, "beta": torch.rand(tokens, HEADS)}
    return {name: x.to(kind) for name, x in found.items()} | wide


def reference(x: dict[str, Tensor], delta: bool, beta: bool) -> tuple[Tensor, Tensor]:
    """Results [T, H, V], and the states behind all tokens [T, H, K, V]: what queries of all unit vectors read."""
    wide = {name: part.double() for name, part in x.items()}
    rest = wide["k"], wide["v"], wide["decay"], wide["beta"] if beta else None, delta, 0
    out = OPS["gated_scan"].reference(wide["q"], *rest)
    units = torch.eye(x["k"].shape[-1], dtype=torch.float64)
    states = [OPS["gated_scan"].reference(unit.expand(wide["q"].shape), *rest) for unit in units]
    return out, torch.stack(states, 2)


@pytest.mark.parametrize(
    ("delta", "beta", "kind", "key", "value"),
    [
        (True, True, torch.bfloat16, 24, 21),
        (False, True, torch.float32, 16, 40),
        *soak((True, False, torch.float32, 37, 70), (False, False, torch.bfloat16, 9, 16)),
    ],
)
def test_any_cut_of_a_prompt_gives_what_step_by_step_gives(
    delta: bool, beta: bool, kind: torch.dtype, key: int, value: int
) -> None:
    """Sequences beside each other, in steps that cut them; states are left within chunks, and gone on from."""
    torch.manual_seed(0)
    types = {torch.bfloat16: "bf16", torch.float32: "f32"}
    name = types[kind]
    kernel = make_kernel(
        "gated_scan", delta=delta, block_size=1000, heads=HEADS, shared=SHARED, key_dim=key, value_dim=value, chunk=16,
        types=(name, name, name, "f32", "f32" if beta else "", "f32"),
    )  # fmt: skip
    assert isinstance(kernel, GatedScan)
    sequences = [random_inputs(length, key, value, kind) for length in LENGTHS]
    wanted = [reference(x, delta, beta) for x in sequences]
    stride, state = kernel.state_stride, key * value
    kv = torch.full((3 * len(LENGTHS), stride), torch.nan)
    done = [0] * len(LENGTHS)
    for share in (0.6, 1.0):
        ends = [max(int(length * share), 1) for length in LENGTHS]
        present = [s for s, end in enumerate(ends) if end > done[s]]
        counts = [ends[s] - done[s] for s in present]
        parts = {n: torch.cat([sequences[s][n][done[s] : ends[s]] for s in present]) for n in sequences[0]}
        starts = torch.tensor([0, *torch.tensor(counts).cumsum(0)], dtype=torch.int32)
        slots = torch.full((int(starts[-1]),), -1, dtype=torch.int32)
        middles = [done[s] + count // 3 for s, count in zip(present, counts, strict=True)]
        for at, s, count, middle in zip(starts.tolist(), present, counts, middles, strict=False):
            slots[at + middle - done[s]] = len(LENGTHS) + s
            slots[at + count - 1] = s
        tokens = len(slots)
        batch = {
            "positions": torch.cat([torch.arange(done[s], ends[s]) for s in present]).to(torch.int32),
            "slot_mapping": slots, "seq_starts": starts, "block_tables": torch.tensor(present, dtype=torch.int32),
        }  # fmt: skip
        o = torch.full((tokens, HEADS * value), torch.nan)
        given = [parts[n].reshape(tokens, -1).contiguous() for n in ("q", "k", "v", "decay")]
        beta_rows = parts["beta"].reshape(tokens, -1).contiguous() if beta else None
        specs = run_kernel(
            kernel, [*given, beta_rows], [o], shape=Shape(256, False), batch=batch, kv=kv,
            sizes={"num_tokens": tokens, "num_seqs": len(present)},
        )  # fmt: skip
        assert [spec.entry for spec in specs] == (["gated_solve"] if delta else []) + ["gated_chunks"]
        for at, s, count, middle in zip(starts.tolist(), present, counts, middles, strict=False):
            results, states = wanted[s]
            expected = results[done[s] : ends[s]].reshape(count, -1)
            torch.testing.assert_close(o[at : at + count].double(), expected, rtol=1e-4, atol=1e-4)
            for block, token in ((s, ends[s] - 1), (len(LENGTHS) + s, middle)):
                if block != s and middle == ends[s] - 1:
                    continue
                found = kv[block, : HEADS * state].reshape(HEADS, key, value)
                torch.testing.assert_close(found.double(), states[token], rtol=1e-4, atol=1e-4)
        done = ends


def test_which_steps_take_chunks() -> None:
    facts = {"delta": True, "block_size": 32, "heads": 4, "shared": 2, "value_dim": 32, "chunk": 16}
    kernel = make_kernel("gated_scan", key_dim=128, **facts)
    assert isinstance(kernel, GatedScan) and CHUNK >= 16
    assert kernel.by_chunks(Shape(512, False)) and not kernel.by_chunks(Shape(16, True))
    assert not kernel.by_chunks(Shape(512, False, typical=128))  # deterministic engines
    by_row = make_kernel("gated_scan", key_dim=128, row_decay=True, **facts)
    large = make_kernel("gated_scan", key_dim=512, **facts)
    assert isinstance(by_row, GatedScan) and isinstance(large, GatedScan)
    assert not by_row.by_chunks(Shape(512, False)) and not large.by_chunks(Shape(512, False))
