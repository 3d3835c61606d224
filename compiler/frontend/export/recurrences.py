"""Recognises recurrences along the tokens that modeling files define as functions: convolutions, delta rules, scans and
cells.

Each is one function over `SequenceOps`, with the parameter names of modeling files. Under a trace it leaves ops with a
state and the algebra around them; run on numbers it is the reference that a file's function is compared with.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ...errors import UnsupportedModel
from .substitution import Candidate, Code, CodeTrial, Substitution
from .traced_ops import COMPUTED, TRACED, SequenceOps

LOWEST = -1e38  # initial value of a running maximum
_EPS = 1e-6  # in the norm of queries and keys of a delta rule
# further parameters of functions in files, with the values that a trial passes
_BESIDE = {"chunk_size": 3, "recurrent_states": None}
# parameters that a call must not set: they carry state across calls, or pack several sequences
_STATES = (
    "initial_state", "initial_states", "output_final_state", "return_final_states", "return_last_state", "seq_idx",
    "cu_seqlens",
)  # fmt: skip


def causal_conv1d(
    ops: SequenceOps,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str | None,
) -> Tensor:
    """A depthwise causal convolution (package causal-conv1d, Dao): hidden_states[1, C, T], weight[C, K], bias[C] or
    None -> [1, C, T]. activation: None for no activation."""
    from transformers.activations import ACT2FN

    out = ops.conv(hidden_states, weight, bias)
    return out if activation is None else ACT2FN[activation](out)


def delta_rule(
    ops: SequenceOps,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    use_qk_l2norm_in_kernel: bool = False,
) -> Tensor:
    """The gated delta rule and Kimi delta attention (package fla): query, key[1, T, Hk, K], value[1, T, H, V],
    beta[1, T, H], g[1, T, H] or [1, T, H, K] -> as value."""
    width = query.shape[-1]
    if use_qk_l2norm_in_kernel:
        query, key = (_unit(x) for x in (query, key))
    return ops.gated(query * width**-0.5, key, value, g, beta, True)


def mamba2_scan(
    ops: SequenceOps,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,  # noqa: N803
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    *,
    D: Tensor | None = None,  # noqa: N803
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
) -> Tensor:
    """Mamba-2's scan (package mamba_ssm): hidden_states[1, T, H, P], dt[1, T, H], A, D[H], B, C[1, T, G, N] -> as
    hidden_states. D and dt_bias[H] may be None."""
    dt = _time_step(dt, dt_bias, dt_softplus)
    low, high = (float(limit) for limit in dt_limit)
    if low > 0 or not dt_softplus:
        dt = torch.clamp(dt, min=low)
    if high != float("inf"):
        dt = torch.clamp(dt, max=high)
    out = ops.gated(C, B, hidden_states, dt * A, dt, False)
    return out if D is None else out + hidden_states * (D[:, None] if D.dim() == 1 else D)


def mamba_scan(
    ops: SequenceOps,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,  # noqa: N803
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    *,
    D: Tensor | None = None,  # noqa: N803
    z: Tensor | None = None,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
) -> Tensor:
    """Mamba's scan (package mamba_ssm): hidden_states, dt, z[1, C, T], A[C, N], D[C], B, C[1, N, T] -> [1, C, T]. D, z
    and delta_bias[C] may be None."""
    dt = _time_step(dt, None if delta_bias is None else delta_bias[:, None], delta_softplus)
    out = ops.selective(hidden_states, dt, A, B, C)
    if D is not None:
        out = out + hidden_states * D[:, None]
    return out if z is None else out * functional.silu(z)


def linear_recurrence(ops: SequenceOps, hidden_states: Tensor, recurrent_gate: Tensor, reset: Tensor) -> Tensor:
    """h <- gate h + x from h = 0, and again from 0 wherever `reset`: hidden_states, recurrent_gate[1, T, C], reset[1,
    T, 1]."""
    gate = recurrent_gate * ~reset
    return gate * ops.channel(hidden_states, gate, False, 0.0) + hidden_states


def wkv(ops: SequenceOps, time_decay: Tensor, time_first: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """RWKV's attention (Peng et al. 2023, version 4): key, value[1, T, C], time_decay, time_first[C] -> [1, T, C].

    Numerator and denominator are those of a softmax over all tokens so far, in which a token's score decreases by
    exp(time_decay) per later token, and the current token's score has time_first added; both relative to a running
    maximum.
    """
    rate = -torch.exp(time_decay)
    top = ops.channel(key, rate.expand_as(key), True, LOWEST)
    after = torch.maximum(top + rate, key)
    keep, add = torch.exp(top + rate - after), torch.exp(key - after)
    numerator, denominator = (ops.channel(x, keep, False, 0.0) for x in (add * value, add))
    own = key + time_first
    most = torch.maximum(top, own)
    past, now = torch.exp(top - most), torch.exp(own - most)
    return (past * numerator + now * value) / (past * denominator + now)


def mlstm(
    ops: SequenceOps,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    igate: Tensor,
    fgate: Tensor,
    *,
    eps: float = 1e-6,
) -> Tensor:
    """xLSTM's matrix memory (Beck et al. 2024): query, key[1, H, T, K], value[1, H, T, V], gates[1, H, T] -> as value.

    C <- f C + i k v^T and n <- f n + i k with f = sigmoid, i = exp, relative to exp of a running maximum m; the result
    is C^T q / (max(|n^T q|, exp(-m)) + eps). n is one more column of C.
    """
    q, k, v = (x.transpose(1, 2) for x in (query * query.shape[-1] ** -0.5, key, value))
    gate, forget = igate.transpose(1, 2), functional.logsigmoid(fgate).transpose(1, 2)
    kept = forget + ops.channel(gate, forget, True, 0.0)
    top = torch.maximum(kept, gate)
    both = torch.cat([v, torch.ones_like(v[..., :1])], -1)
    out = ops.gated(q, k, both, kept - top, torch.exp(gate - top), False)
    norm = torch.maximum(out[..., -1:].abs(), torch.exp(-top)[..., None]) + eps
    return (out[..., :-1] / norm).transpose(1, 2)


def _unit(x: Tensor) -> Tensor:
    """x / sqrt(sum x^2 + eps) along the last axis of x [.., N], written as an RMS norm."""
    width = x.shape[-1]
    return functional.rms_norm(x, (width,), None, _EPS / width) * width**-0.5


def _time_step(dt: Tensor, bias: Tensor | None, softplus: bool) -> Tensor:
    dt = dt if bias is None else dt + bias
    return functional.softplus(dt) if softplus else dt


# small inputs, one dict of arguments per trial: 7 tokens are two whole blocks of 3 and a partial one

Inputs = Callable[[Callable[..., Tensor]], list[dict[str, Any]]]


def _conv_inputs(random: Callable[..., Tensor]) -> list[dict[str, Any]]:
    given = {"hidden_states": random(1, 4, 7), "weight": random(4, 3), "bias": None, "activation": None}
    return [given, given | {"bias": random(4), "activation": "silu"}]


def _delta_inputs(*rates: int) -> Inputs:
    """rates: sizes of the axes that the decay has after the head axis."""

    def inputs(random: Callable[..., Tensor]) -> list[dict[str, Any]]:
        shapes = {"query": (1, 7, 2, 4), "key": (1, 7, 2, 4), "value": (1, 7, 2, 3)}
        given: dict[str, Any] = {name: random(*shape) for name, shape in shapes.items()}
        given |= {"g": -random(1, 7, 2, *rates).abs(), "beta": random(1, 7, 2).sigmoid()}
        return [given, given | {"use_qk_l2norm_in_kernel": True}]

    return inputs


def _mamba2_inputs(random: Callable[..., Tensor]) -> list[dict[str, Any]]:
    given = {"hidden_states": random(1, 7, 4, 3), "dt": random(1, 7, 4), "A": -random(4).abs()}
    given |= {"B": random(1, 7, 2, 5), "C": random(1, 7, 2, 5)}
    more = {"D": random(4), "dt_bias": random(4), "dt_softplus": True}
    return [given, given | more, given | more | {"dt_limit": (0.3, 0.9)}]


def _mamba_inputs(random: Callable[..., Tensor]) -> list[dict[str, Any]]:
    given = {"hidden_states": random(1, 4, 7), "dt": random(1, 4, 7), "A": -random(4, 5).abs()}
    given |= {"B": random(1, 5, 7), "C": random(1, 5, 7)}
    return [given, given | {"D": random(4), "z": random(1, 4, 7), "delta_bias": random(4), "delta_softplus": True}]


def _linear_inputs(random: Callable[..., Tensor]) -> list[dict[str, Any]]:
    gate, reset = random(1, 7, 4).sigmoid(), torch.arange(7)[None, :, None] == 0
    return [{"hidden_states": random(1, 7, 4), "recurrent_gate": gate, "reset": reset}]


def _wkv_inputs(random: Callable[..., Tensor]) -> list[dict[str, Any]]:
    given = {name: random(4) for name in ("time_decay", "time_first")}
    return [given | {name: random(1, 7, 4) for name in ("key", "value")}]


def _mlstm_inputs(random: Callable[..., Tensor]) -> list[dict[str, Any]]:
    given = {name: random(1, 2, 7, 4) for name in ("query", "key", "value")}
    return [given | {name: random(1, 2, 7) for name in ("igate", "fgate")}]


def recurrence(
    body: Callable[..., Tensor], inputs: Inputs, settings: Callable[[Any], Mapping[str, Any]] = lambda module: {}
) -> Substitution:
    """The substitution of functions that compute `body` and whose first parameters are its positional ones.

    Parameters that only some functions have are keywords of `body`. inputs: makes the arguments of the trials, given a
    function that makes random tensors of a shape. settings: keywords of `body` that a method takes from its module.
    """
    names = tuple(inspect.signature(body).parameters)[1:]
    first = tuple(name for name, p in inspect.signature(body).parameters.items() if p.kind is not p.KEYWORD_ONLY)[1:]

    def find(candidate: Candidate) -> bool:
        return candidate.takes[: len(first)] == first

    def small(candidate: Candidate, generator: torch.Generator) -> Iterator[CodeTrial]:
        own = set(inspect.signature(candidate.function).parameters)
        beside = {name: value for name, value in _BESIDE.items() if name in own}
        this = () if candidate.module is None else (candidate.module,)
        for given in inputs(lambda *shape: torch.randn(shape, generator=generator)):
            known = {name: value for name, value in given.items() if name in own}
            options = {**settings(candidate.module), **known}
            yield CodeTrial(lambda known=known: candidate.function(*this, **known, **beside), (COMPUTED,), options)

    def replacement(candidate: Candidate) -> Mapping[str, Code]:
        signature, options = inspect.signature(candidate.function), settings(candidate.module)

        def run(*args: Any, **kwargs: Any) -> Tensor:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            given = {**bound.arguments.pop("kwargs", {}), **bound.arguments}
            for name in _STATES:
                if given.get(name) is not None and given[name] is not False:
                    raise UnsupportedModel(f"{body.__name__} with {name} is not supported", op=body.__name__)
            return body(TRACED, **{**options, **{name: given[name] for name in names if name in given}})

        return {candidate.name: run}

    return Substitution(find, small, body, replacement)


def _epsilon(module: Any) -> Mapping[str, Any]:
    return {"eps": float(getattr(getattr(module, "config", None), "eps", 1e-6))}


RECURRENCES = (
    recurrence(causal_conv1d, _conv_inputs),
    recurrence(delta_rule, _delta_inputs()),
    recurrence(delta_rule, _delta_inputs(4)),  # one decay per element of a head
    recurrence(mamba2_scan, _mamba2_inputs),
    recurrence(mamba_scan, _mamba_inputs),
    recurrence(linear_recurrence, _linear_inputs),
    recurrence(wkv, _wkv_inputs),
    recurrence(mlstm, _mlstm_inputs, _epsilon),
)
