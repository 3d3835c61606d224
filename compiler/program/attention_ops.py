"""Lowering of attention and related ops: rotary embedding, the KV write, an index's choice of keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import fx

from ...runtime.format.kv import KVLayer
from ..graph.tensor_types import type_of
from ..kv_formats import find_kv_format
from ..ops import OPS, AttentionSpec, named_arguments
from ..ops.body import Body
from .context import WITHIN_STEP, Lowerer, row_kind
from .placed import Placed
from .steps.attention import Attention, ChooseKeys, KvWrite, NewKeys, Rotary

# the two halves of a rotated vector: x cos - other sin and x cos + other sin
_TURNS = [Body.parse(f"t0 = mul a0 a2; t1 = mul a1 a3; t2 = {sign} t0 t1") for sign in ("sub", "add")]


def rope(low: Lowerer, node: fx.Node) -> Placed:
    """Rotary embedding outside attention, as three elementwise kernels: rare, so not a kernel of its own."""
    x = low.placed(node.args[0])
    cos, sin = (low.placed(n) for n in node.args[1:3])
    dim = x.shape[-1]
    r = cos.shape[-1]
    out = low.new(node)
    rows = [t.view((1, t.shape[-1])) for t in (cos, sin)]
    half = node.args[3] == "half"
    pieces = [(0, r // 2, r // 2, r, 1), (r // 2, r, 0, r // 2, 1)] if half else [(0, r, 1, r, 2), (1, r, 0, r, 2)]
    for turn, (start, end, other, other_end, step) in zip(_TURNS, pieces, strict=True):
        parts = [x.slice(1, start, end, step), x.slice(1, other, other_end, step)]
        tables = [t.slice(1, start, end, step) for t in rows if t is not None]
        low.elementwise(turn, [*parts, *tables], out.slice(1, start, end, step), node)
    if r < dim:
        low.copy(x.slice(1, r, dim, 1), out.slice(1, r, dim, 1), node)
    return out


def _begins(k: Placed, v: Placed) -> bool:
    """Whether values are the first elements of their head's key, in the same memory."""
    place = (k.space, k.name, k.offset, k.row_stride, k.shape[0], k.strides)
    return place == (v.space, v.name, v.offset, v.row_stride, v.shape[0], v.strides) and v.shape[1] <= k.shape[1]


def _written(low: Lowerer, given: Mapping[str, Any], kind: str) -> tuple[Placed, Placed, bool]:
    """Keys and values in the form written to a cache of that kind, and whether values are the beginning of keys and
    need not be stored."""
    k, v = low.dense(low.placed(given["k"])), low.placed(given["v"])
    shared = _begins(k, v) and given["k_cos"] is None and find_kv_format(kind).shares(v.shape[1])
    return k, v if shared else low.dense(v), shared


def paged_attention(low: Lowerer, node: fx.Node) -> Placed:
    """Write rotated K and V into the pages, unless an earlier layer has done so, then attend: two steps, or one for
    both."""
    given = named_arguments(node)
    spec: AttentionSpec = given["spec"]
    seen, policy, within = spec.mask, spec.policy, spec.within_step
    q = low.dense(low.placed(given["q"]))
    kind = low.options.kv_dtype if within else low.options.kv_of(spec.layer)
    writes = within or low.first_of(low.kv_layer(spec.layer))  # a layer may read the cache that another has written
    k, v, shared = _written(low, given, kind) if writes else (None, None, False)
    vectors = {name: low.vector(given[name]) for name in ("q_cos", "q_sin", "k_cos", "k_sin", "sinks", "alibi", "bias")}
    by_row, by_key = (
        None if given[name] is None else low.dense(low.placed(given[name])) for name in ("row_bias", "key_bias")
    )
    chooses = policy is not None and policy.chooses
    window, front = (seen.window, 0) if policy is None or chooses else (policy.size, policy.beside)
    if k is None or v is None:  # in this step, or in an earlier one
        cached = low.builder.kv_layers[low.kv_layer(spec.layer)].layer
    else:
        align = low.options.profile.kv_align
        cached = KVLayer(k.shape[0], k.shape[1], v.shape[1], shared=shared, scored=chooses, align=align)
    layer = low.scratch_layer(cached) if within else low.kv_layer(spec.layer)
    low.cache(layer, cached, kind, WITHIN_STEP if within else window, policy)
    kept: dict[str, Any] = {"layer": layer, "kv": cached, "cache": kind, "block_size": low.options.block_size}

    def rotary(cos: Any) -> Rotary:
        if cos is None:
            return Rotary(style=spec.rope)
        rows, width = type_of(cos).shape
        return Rotary(width, rows, spec.rope)

    new: dict[str, Any] = {}
    if k is not None and v is not None:
        write = KvWrite(
            k=k.operand, v=None if shared else v.operand, cos=vectors["k_cos"], sin=vectors["k_sin"],
            rotary=rotary(given["k_cos"]), **kept,
        )  # fmt: skip
        if low.options.profile.joins:
            new = {"new": NewKeys(write.k, write.v, write.cos, write.sin), "new_rotary": write.rotary}
        else:
            low.emit(write, node)
    out = low.new(node)
    attend = Attention(
        rows=row_kind(out), q=q.operand, cos=vectors["q_cos"], sin=vectors["q_sin"],
        sinks=vectors["sinks"], alibi=vectors["alibi"], o=out.operand, rotary=rotary(given["q_cos"]),
        q_heads=q.shape[0], scale=float(spec.scale), window=window, front=front, chunk=seen.chunk,
        softcap=float(spec.softcap), ahead=seen.ahead, bias=vectors["bias"],
        evicts=policy.kind if policy is not None and chooses else "",  # type: ignore[arg-type]
        budget=policy.size if policy is not None and chooses else 0,
        recent=policy.beside if policy is not None and chooses else 0,
        bias_width=0 if given["bias"] is None else type_of(given["bias"]).shape[1],
        row_bias=by_row and by_row.operand, row_bias_width=by_row.shape[1] if by_row else 0, later=spec.later,
        row_bias_shared=by_row is not None and by_row.shape[0] < q.shape[0],
        key_bias=by_key and by_key.operand, key_bias_width=by_key.shape[1] if by_key else 0,
        key_later=spec.key_later, **kept, **new,
    )  # fmt: skip
    low.emit(attend, node)
    return out


def choose_keys(low: Lowerer, node: fx.Node) -> Placed:
    """Write the index's keys into their own cache, then choose."""
    q, k, w = (low.dense(low.placed(n)) for n in node.args[:3])
    number, count, width = (int(a) for a in node.args[3:])  # type: ignore[call-overload]
    dim, layer = k.shape[1], low.kv_layer(number)
    align = low.options.profile.kv_align
    cached, kind = KVLayer(1, dim, dim, shared=True, align=align), low.options.kv_dtype
    low.cache(layer, cached, kind, 0)
    kept: dict[str, Any] = {"layer": layer, "kv": cached, "cache": kind, "block_size": low.options.block_size}
    low.emit(KvWrite(k=k.operand, **kept), node)
    out = low.new(node)
    step = ChooseKeys(
        rows=row_kind(out), q=q.operand, w=w.operand, o=out.operand, heads=q.shape[0], count=count, width=width, **kept,
    )  # fmt: skip
    low.emit(step, node)
    return out


_FUNCTIONS = {"rope": rope, "paged_attention": paged_attention, "choose_keys": choose_keys}
ATTENTION_LOWERING = {OPS[name].overload: fn for name, fn in _FUNCTIONS.items()}
