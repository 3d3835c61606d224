"""Prompts through recurrences with matrix states, as products over chunks, against the op's reference in float64."""

from __future__ import annotations

import pytest
import torch
from icc.compiler.backends.triton.kernels.state import CHUNK, GatedScanKernel
from icc.compiler.backends.triton.spec import Shape
from icc.compiler.ops import OPS
from interpreting import make_kernel, run_kernel
from sizes import soak
from torch import Tensor

HEADS, SHARED = 2, 1
LENGTHS = (40, 1, 75, 30)  # of consecutive sequences in a step


def random_inputs(tokens: int, key: int, value: int, kind: torch.dtype) -> dict[str, Tensor]:
    """Operands [tokens, heads, ..]; keys of length 1, and decays, some of which erase the state."""
    k = torch.nn.functional.normalize(torch.randn(tokens, SHARED, key), dim=-1)
    k[tokens // 2] = k[tokens // 2 - 1]  # a repeated token
    found = {"q": torch.randn(tokens, SHARED, key), "k": k, "v": torch.randn(tokens, HEADS, value)}
    wide = {"decay": -(torch.rand(tokens, HEADS) ** 6) * 30, "beta": torch.rand(tokens, HEADS)}
    return {name: x.to(kind) for name, x in found.items()} | wide


def reference(x: dict[str, Tensor], delta: bool, beta: bool) -> tuple[Tensor, Tensor]:
    """Results [T, H, V], and the states after all tokens [T, H, K, V], read with all unit vectors as queries."""
    wide = {name: part.double() for name, part in x.items()}
    rest = wide["k"], wide["v"], wide["decay"], wide["beta"] if beta else None, delta, 0
    out = OPS["gated_scan"].reference(wide["q"], *rest)
    units = torch.eye(x["k"].shape[-1], dtype=torch.float64)
    states = [OPS["gated_scan"].reference(unit.expand(wide["q"].shape), *rest) for unit in units]
    return out, torch.stack(states, 2)


@pytest.mark.parametrize(
    ("delta", "beta", "kind", "key", "value", "rounded"),
    [
        (True, True, torch.bfloat16, 24, 21, False),
        (False, True, torch.float32, 16, 40, False),
        *soak((True, False, torch.float32, 37, 70, False), (False, False, torch.bfloat16, 9, 16, False)),
        *soak((True, True, torch.float32, 24, 21, True)),
    ],
)
def test_any_cut_of_a_prompt_gives_what_step_by_step_gives(
    delta: bool, beta: bool, kind: torch.dtype, key: int, value: int, rounded: bool
) -> None:
    """Several sequences, in steps that divide them, one of them after a full block; steps end within chunks and
    continue from there."""
    torch.manual_seed(0)
    types = {torch.bfloat16: "bf16", torch.float32: "f32"}
    name = types[kind]
    kernel = make_kernel(
        "gated_scan", delta=delta, block_size=45, heads=HEADS, shared=SHARED, key_dim=key, value_dim=value, chunk=0,
        rounded=rounded,
        types=(name, name, name, "f32", "f32" if beta else "", "f32"),
    )  # fmt: skip
    assert isinstance(kernel, GatedScanKernel)
    sequences = [random_inputs(length, key, value, kind) for length in LENGTHS]
    wanted = [reference(x, delta, beta) for x in sequences]
    stride, state = kernel.state_stride, key * value
    kv = torch.full((3 * len(LENGTHS), stride), torch.nan, dtype=torch.bfloat16 if rounded else torch.float32)
    near = {"rtol": 2e-2, "atol": 2e-2} if rounded else {"rtol": 1e-4, "atol": 1e-4}
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
            torch.testing.assert_close(o[at : at + count].double(), expected, **near)
            for block, token in ((s, ends[s] - 1), (len(LENGTHS) + s, middle)):
                if block != s and middle == ends[s] - 1:
                    continue
                found = kv[block, : HEADS * state].reshape(HEADS, key, value)
                torch.testing.assert_close(found.double(), states[token], **near)
        done = ends


def in_bf16(x: Tensor) -> Tensor:
    return x.float().bfloat16().double()


@pytest.mark.parametrize("op", ["gated_scan", "selective_scan"])
def test_rounded_states_are_those_of_any_cut(op: str) -> None:
    """Token by token and in steps that end anywhere: bit-equal, and equal to states rounded after every token."""
    torch.manual_seed(1)
    tokens, keys, values = 9, 5, 6
    if op == "gated_scan":
        x = random_inputs(tokens, keys, values, torch.float32)
        widths = {"heads": HEADS, "shared": SHARED, "key_dim": keys, "value_dim": values, "delta": True, "chunk": 0}
        widths["present"] = ("beta",)
        rows, fixed = [x[name].reshape(tokens, -1) for name in ("q", "k", "v", "decay", "beta")], {}
    else:
        widths, fixed = {"channels": values, "states": keys}, {2: -torch.rand(keys, values) * 4}
        rows = [torch.randn(tokens, n) for n in (values, values, keys, keys)]
        rows[1] = rows[1].abs()
    kernel = make_kernel(op, block_size=1000, rounded=True, **widths)
    found = []
    for ends in ([tokens], [1, 2, 7, tokens]):
        kv, start, parts = torch.full((1, kernel.state_stride), torch.nan, dtype=torch.bfloat16), 0, []
        for end in ends:
            count = end - start
            o = torch.empty(count, HEADS * values if op == "gated_scan" else values)
            slots = torch.full((count,), -1, dtype=torch.int32)
            slots[-1] = 0
            batch = {
                "positions": torch.arange(start, end, dtype=torch.int32), "slot_mapping": slots,
                "seq_starts": torch.tensor([0, count], dtype=torch.int32),
                "block_tables": torch.zeros(1, dtype=torch.int32),
            }  # fmt: skip
            given = [row[start:end].contiguous() for row in rows]
            for place, weight in fixed.items():
                given.insert(place, weight)
            run_kernel(kernel, given, [o], shape=Shape(16, True), batch=batch, kv=kv, sizes={"num_seqs": 1})
            parts.append(o)
            start = end
        found.append((torch.cat(parts), kv))
    assert torch.equal(found[0][0], found[1][0])
    wanted, state = [], None
    for t in range(tokens):
        if op == "gated_scan":
            q, k, v, decay, beta = (x[name][t].double() for name in ("q", "k", "v", "decay", "beta"))
            state = torch.zeros(HEADS, keys, values, dtype=torch.float64) if state is None else state
            state = state * decay.exp()[:, None, None]
            u = beta[:, None] * (v - torch.einsum("hkv,hk->hv", state, k.expand(HEADS, keys)))
            state = state + k.expand(HEADS, keys)[..., None] * u[:, None]
            wanted.append(torch.einsum("hkv,hk->hv", state, q.expand(HEADS, keys)).reshape(-1))
        else:
            one, dt, b, c = (row[t].double() for row in rows)
            state = torch.zeros(keys, values, dtype=torch.float64) if state is None else state
            state = torch.exp(dt * fixed[2].double()) * state + (dt * one) * b[:, None]
            wanted.append((state * c[:, None]).sum(0))
        state = in_bf16(state)
    torch.testing.assert_close(found[0][0].double(), torch.stack(wanted), rtol=1e-5, atol=1e-5)
    assert state is not None and torch.equal(found[0][1][0, : state.numel()].double(), state.reshape(-1))


def test_which_steps_take_chunks() -> None:
    facts = {"delta": True, "block_size": 32, "heads": 4, "shared": 2, "value_dim": 32, "chunk": 0}
    kernel = make_kernel("gated_scan", key_dim=128, **facts)
    assert isinstance(kernel, GatedScanKernel) and CHUNK >= 16
    assert kernel.by_chunks(Shape(512, False)) and not kernel.by_chunks(Shape(16, True))
    assert not kernel.by_chunks(Shape(512, False, typical=128))  # deterministic engines
    by_row = make_kernel("gated_scan", key_dim=128, row_decay=True, **facts)
    large = make_kernel("gated_scan", key_dim=512, **facts)
    assert isinstance(by_row, GatedScanKernel) and isinstance(large, GatedScanKernel)
    assert not by_row.by_chunks(Shape(512, False)) and not large.by_chunks(Shape(512, False))
