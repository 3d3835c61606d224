"""The program of the recurrent layers: each at odd shapes, with its step-by-step float64 reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from cpu_cases import Arrays, normal
from cpu_harness import Batch, Builder, Case, Runner
from icc.compiler.ops import OPS
from icc.compiler.program.steps.state import CausalConv, ChannelScan, GatedScan, SelectiveScan, StateStep
from icc.runtime.format.kv import KVLayer
from sizes import SOAK

BLOCK = 12  # tokens: no multiple of a chunk, and some chunks end where a block does
# heads, shared, key_dim, value_dim, delta, decays per row, beta
SCANS = [(4, 2, 24, 40, True, False, True), (2, 2, 37, 21, True, True, True), (3, 1, 16, 16, False, False, True)]
SCANS += [(2, 1, 8, 70, False, True, False)] * SOAK


def _reference(op: str, *args: Any) -> np.ndarray:
    """The op's own reference, in float64."""
    wide = [torch.from_numpy(a.astype(np.float64)) if isinstance(a, np.ndarray) else a for a in args]
    return OPS[op].reference(*wide).numpy()


def _add(b: Builder, step: StateStep, feeds: dict[str, Any], y: str, expect: Any) -> None:
    b.layers.append(KVLayer(state=step.state))
    b.step(step)
    b.cases.append(Case(step.op, feeds, lambda a: {y: expect(a)}))


def rounded_scan(q: Any, k: Any, v: Any, decay: Any, beta: Any) -> np.ndarray:
    """The delta rule in float64, its matrices rounded to bf16 after every eighth token."""
    heads, share = v.shape[1], v.shape[1] // k.shape[1]
    state, out = np.zeros((heads, k.shape[2], v.shape[2])), np.zeros(v.shape)
    for t in range(len(v)):
        key, query = (np.repeat(x[t], share, axis=0).astype(np.float64) for x in (k, q))
        state = state * np.exp(decay[t].astype(np.float64)).reshape(heads, -1)[..., None]
        u = beta[t].astype(np.float64)[:, None] * (v[t] - np.einsum("hkv,hk->hv", state, key))
        state = state + key[..., None] * u[:, None]
        out[t] = np.einsum("hkv,hk->hv", state, query)
        if t % 8 == 7:
            state = torch.from_numpy(state).float().bfloat16().double().numpy()
    return out


def add_scan(b: Builder, shape: tuple[Any, ...], rounded: bool = False) -> None:
    heads, shared, key, value, delta, by_row, scaled = shape
    name = f"{'rounded' if rounded else ''}scan{len(b.layers)}"

    def unit(rng: np.random.Generator, rows: int) -> np.ndarray:
        x = rng.standard_normal((rows, shared, key))
        return (x / np.linalg.norm(x, axis=-1, keepdims=True)).astype(np.float32).reshape(rows, -1)

    def rate(rng: np.random.Generator, rows: int) -> np.ndarray:
        return rng.uniform(0, 1, (rows, heads)).astype(np.float32)

    decays = heads * (key if by_row else 1)

    def decay(rng: np.random.Generator, rows: int) -> np.ndarray:
        return (-(rng.uniform(0, 1, (rows, decays)) ** 6) * 30).astype(np.float32)

    feeds = {"q": normal(shared * key), "k": unit, "v": normal(heads * value), "decay": decay}
    feeds |= {"beta": rate} if scaled else {}
    widths = {"q": shared * key, "k": shared * key, "v": heads * value, "decay": decays, "beta": heads}
    operands: dict[str, Any] = {part: b.buffer(f"{name}.{part}", [widths[part]]) for part in feeds}
    o = b.buffer(f"{name}.o", [heads * value])
    step = GatedScan(
        rows="tokens", layer=len(b.layers), **operands, o=o, heads=heads, shared=shared, key_dim=key, value_dim=value,
        chunk=8, row_decay=by_row, delta=delta, block_size=BLOCK, rounded=rounded,
    )  # fmt: skip

    def expect(a: Arrays) -> np.ndarray:
        q, k = (a[f"{name}.{part}"].reshape(-1, shared, key) for part in "qk")
        v, g = a[f"{name}.v"].reshape(-1, heads, value), a[f"{name}.decay"]
        g = g.reshape(-1, heads, key) if by_row else g
        beta = a[f"{name}.beta"] if scaled else None
        if rounded:
            return rounded_scan(q, k, v, g, beta).reshape(len(v), -1)
        return _reference("gated_scan", q, k, v, g, beta, delta, 0).reshape(len(v), -1)

    _add(b, step, {f"{name}.{part}": feed for part, feed in feeds.items()}, o.name, expect)


def add_conv(b: Builder, rng: np.random.Generator, channels: int, taps: int, biased: bool) -> None:
    name = f"conv{len(b.layers)}"
    w = rng.standard_normal((taps, channels)).astype(np.float32)
    bias = rng.standard_normal(channels).astype(np.float32) if biased else None
    x, y = b.buffer(f"{name}.x", [channels]), b.buffer(f"{name}.y", [channels])
    step = CausalConv(
        rows="tokens", layer=len(b.layers), x=x, w=b.plain(f"{name}.w", w), y=y, channels=channels, taps=taps,
        bias=None if bias is None else b.plain(f"{name}.b", bias), block_size=BLOCK,
    )  # fmt: skip
    _add(b, step, {x.name: normal(channels)}, y.name, lambda a: _reference("causal_conv", a[x.name], w, bias, 0))


def rounded_states(x: Any, dt: Any, a: Any, b: Any, c: Any) -> np.ndarray:
    """Mamba's scan in float64, its states rounded to bf16 after every token."""
    state, out = np.zeros(a.shape), np.zeros(x.shape)
    for t in range(len(x)):
        wide = dt[t].astype(np.float64)
        state = np.exp(wide * a) * state + (wide * x[t]) * b[t].astype(np.float64)[:, None]
        out[t] = (state * c[t].astype(np.float64)[:, None]).sum(0)
        state = torch.from_numpy(state).float().bfloat16().double().numpy()
    return out


def add_selective(b: Builder, rng: np.random.Generator, channels: int, states: int, rounded: bool = False) -> None:
    name = f"{'rounded' if rounded else ''}selective{len(b.layers)}"
    a_ = -(rng.uniform(0, 4, (states, channels)) ** 2).astype(np.float32)
    widths = {"x": channels, "dt": channels, "b": states, "c": states}
    operands: dict[str, Any] = {part: b.buffer(f"{name}.{part}", [width]) for part, width in widths.items()}
    y = b.buffer(f"{name}.y", [channels])
    step = SelectiveScan(
        rows="tokens", layer=len(b.layers), **operands, a=b.plain(f"{name}.a", a_), y=y, channels=channels,
        states=states, block_size=BLOCK, rounded=rounded,
    )  # fmt: skip
    feeds: dict[str, Any] = {f"{name}.{part}": normal(width) for part, width in widths.items()}
    feeds[f"{name}.dt"] = lambda rng, rows: rng.uniform(0, 1, (rows, channels)).astype(np.float32)
    parts = [f"{name}.{part}" for part in ("x", "dt", "b", "c")]

    def expect(a: Arrays) -> np.ndarray:
        x, dt, bs, cs = (a[part] for part in parts)
        if rounded:
            return rounded_states(x, dt, a_, bs, cs)
        return _reference("selective_scan", x, dt, a_, bs, cs, 0)

    _add(b, step, feeds, y.name, expect)


def add_channels(b: Builder, channels: int, decays: bool, maximum: bool, start: float) -> None:
    name = f"channels{len(b.layers)}"
    x, y = b.buffer(f"{name}.x", [channels]), b.buffer(f"{name}.y", [channels])
    feeds: dict[str, Any] = {x.name: normal(channels)}
    decay = b.buffer(f"{name}.decay", [channels]) if decays else None
    if decay:
        feeds[decay.name] = lambda rng, rows: (rng.uniform(0, 1, (rows, channels)) - maximum).astype(np.float32)
    step = ChannelScan(
        rows="tokens", layer=len(b.layers), x=x, decay=decay, y=y, channels=channels, maximum=maximum, start=start,
        block_size=BLOCK,
    )  # fmt: skip

    def expect(a: Arrays) -> np.ndarray:
        return _reference("channel_scan", a[x.name], decay and a[decay.name], maximum, start, 0)

    _add(b, step, feeds, y.name, expect)


def all_states() -> Builder:
    """A program with every kind of step that has a state."""
    b, rng = Builder(block_size=BLOCK), np.random.default_rng(7)
    for shape in SCANS:
        add_scan(b, shape)
    add_conv(b, rng, 33, 4, True)
    add_conv(b, rng, 16, 3, False)
    add_selective(b, rng, 21, 16)
    add_scan(b, SCANS[0], rounded=True)
    add_selective(b, rng, 21, 5, rounded=True)
    if SOAK:
        add_scan(b, SCANS[1], rounded=True)
    add_channels(b, 70, True, False, 0.0)
    add_channels(b, 21, True, True, -3.0)
    add_channels(b, 16, False, False, 0.0)
    return b


def split(runner: Runner, feeds: Arrays, ends: list[int], table: list[int]) -> Arrays:
    """The outputs of a sequence that is run in steps ending at the tokens `ends`, with its states in the blocks of
    `table`."""
    parts, start = [], 0
    for end in ends:
        batch = Batch([(start, end - start, table)], BLOCK)
        parts.append(runner.step(batch, {name: value[start:end] for name, value in feeds.items()}))
        start = end
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0] if name != "logits"}
