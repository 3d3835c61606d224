"""Writes recurrences along the tokens: a Scan over each sequence of the batch, whose body computes one token."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from onnx import TensorProto, helper
from torch import fx

from ..graph.tensor_types import type_of
from .attention import split
from .writer import Table, Writer

HANDLERS = Table()
Step = Callable[..., tuple[str, str]]  # (state, the token's inputs ..) -> (state, output)


@HANDLERS.handles("gated_scan")
def _gated_scan(w: Writer, node: fx.Node) -> str:
    """A scan with the state [B, Hk, H / Hk, K, V] of all heads; queries and keys broadcast over the heads that share
    them."""
    q, k, v, decay, beta, delta, _ = node.args
    (shared, width), (heads, values) = type_of(k).shape, type_of(v).shape  # type: ignore[arg-type, misc]
    group, b = heads // shared, w.b  # type: ignore[operator]
    by_row = type_of(decay).rank == 3  # type: ignore[arg-type]
    rows = split(b, w.sequences, b.add("Exp", w.value(decay)), shared, group, width if by_row else 1, 1)
    query, key = (split(b, w.sequences, w.value(x), shared, 1, 1, width) for x in (q, k))
    value = split(b, w.sequences, w.value(v), shared, group, 1, values)
    share = [] if beta is None else [split(b, w.sequences, w.value(beta), shared, group, 1, 1)]

    def step(state: str, query: str, key: str, value: str, rows: str, *share: str) -> tuple[str, str]:
        state = b.add("Mul", state, rows)
        update = b.add("Sub", value, b.add("MatMul", key, state)) if delta else value
        if share:
            update = b.add("Mul", update, share[0])
        column = b.add("Transpose", key, perm=[0, 1, 2, 4, 3])
        state = b.add("Add", state, b.add("Mul", column, update))
        return state, b.add("MatMul", query, state)

    state = (shared, group, width, values)
    return b.reshape(_scan(w, state, 0.0, (query, key, value, rows, *share), step), -1, heads, values)  # type: ignore[arg-type]


@HANDLERS.handles("selective_scan")
def _selective_scan(w: Writer, node: fx.Node) -> str:
    """A scan with the state [B, N, C]."""
    x, dt, a, key, query, _ = node.args
    states, channels = type_of(a).shape  # type: ignore[arg-type]
    b, rates = w.b, w.value(a)
    given = [split(b, w.sequences, w.value(v), 1, channels) for v in (x, dt)]
    columns = [split(b, w.sequences, w.value(v), states, 1) for v in (key, query)]

    def step(state: str, x: str, dt: str, key: str, query: str) -> tuple[str, str]:
        kept = b.add("Mul", b.add("Exp", b.add("Mul", dt, rates)), state)
        state = b.add("Add", kept, b.add("Mul", b.add("Mul", dt, x), key))
        return state, b.add("ReduceSum", b.add("Mul", state, query), b.ints(1), keepdims=0)

    return b.reshape(_scan(w, (states, channels), 0.0, (*given, *columns), step), -1, channels)  # type: ignore[arg-type]


@HANDLERS.handles("channel_scan")
def _channel_scan(w: Writer, node: fx.Node) -> str:
    """A scan with the state [B, C]; the output of a token is the state before it."""
    x, decay, maximum, start, _ = node.args
    channels, b = type_of(x).shape[0], w.b  # type: ignore[arg-type]
    given = [split(b, w.sequences, w.value(v), channels) for v in (x, decay) if v is not None]

    def step(state: str, x: str, *decay: str) -> tuple[str, str]:
        after = b.add("Identity", x)
        if decay:
            kept = b.add("Add" if maximum else "Mul", decay[0], state)
            after = b.add("Max" if maximum else "Add", kept, x)
        return after, b.add("Identity", state)

    return b.reshape(_scan(w, (channels,), float(start), given, step), -1, channels)  # type: ignore[arg-type]


def _scan(w: Writer, state: tuple[int, ...], start: float, inputs: Sequence[str], step: Step) -> str:
    """The outputs [B, S, ..] of `step` for each token of inputs [B, S, ..]; the first state is [B, *state], filled with
    `start`."""
    b = w.b
    batch = b.add("Slice", w.sequences.shape, b.ints(0), b.ints(1))
    first = b.add("Expand", b.number(start), b.add("Concat", batch, b.ints(*state), axis=0))

    def info(name: str, rank: int | None = None) -> Any:
        return helper.make_tensor_value_info(name, TensorProto.FLOAT, None if rank is None else [None] * rank)

    with b.body() as nodes:
        names = [b.unique(f"{b.module or 'scan'}/{name}") for name in ("state", *["token"] * len(inputs))]
        after, out = step(*names)
    body = b.subgraph(nodes, [info(names[0], 1 + len(state)), *map(info, names[1:])], [info(after), info(out)])
    axes = [1] * len(inputs)  # the token axis
    found = b.add("Scan", first, *inputs, outputs=2, body=body, num_scan_inputs=len(inputs),
                  scan_input_axes=axes, scan_output_axes=axes[:1])  # fmt: skip
    return found[1]
