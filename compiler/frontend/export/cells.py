"""Recurrent cells that modeling files write out as loops over the tokens, with no kernel's name to know them by.

A function is a candidate by the names of its parameters, and is replaced only if it computes, of random tensors, what
ours does. Ours are written over two recurrences, so that the graph gets ops with a state and the algebra around them.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...ops import OPS
from .interfaces import traced

LOWEST = -1e38  # before the first token, of a running maximum
TOKENS, WIDTH, HEADS = 5, 4, 2  # of the random tensors


@traced
def channel_scan(x: Tensor, decay: Tensor | None, maximum: bool, start: float) -> Tensor:
    """icc::channel_scan of one sequence: x, decay[1, T, C] -> [1, T, C]."""
    return torch.empty_like(x)


@dataclass(frozen=True)
class Recurrences:
    """The ops of a sequence, as they are traced or as they compute."""

    channel: Callable[..., Tensor]
    gated: Callable[..., Tensor]


def _reference(name: str) -> Callable[..., Tensor]:
    def run(*args: Any) -> Tensor:
        return OPS[name].reference(*(a[0] if isinstance(a, Tensor) else a for a in args), 0)[None]

    return run


TRACED = Recurrences(
    lambda *args: torch.ops.icc_trace.channel_scan(*args), lambda *args: torch.ops.icc_trace.gated_scan(*args)
)
COMPUTED = Recurrences(_reference("channel_scan"), _reference("gated_scan"))


def linear_recurrence(ops: Recurrences, hidden_states: Tensor, recurrent_gate: Tensor, reset: Tensor) -> Tensor:
    """h = gate h + x from 0, where `reset` from 0 again: hidden_states, recurrent_gate[1, T, C], reset[1, T, 1]."""
    gate = recurrent_gate * ~reset
    return gate * ops.channel(hidden_states, gate, False, 0.0) + hidden_states


def wkv(ops: Recurrences, time_decay: Tensor, time_first: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """RWKV's attention (Peng et al. 2023, version 4): key, value[1, T, C], time_decay, time_first[C] -> [1, T, C].

    Numerator and denominator are those of a softmax over all tokens so far, each one weighed less by exp(time_decay)
    per token since then, and time_first more for the token itself; both relative to a running maximum.
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
    ops: Recurrences, query: Tensor, key: Tensor, value: Tensor, igate: Tensor, fgate: Tensor, eps: float
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


# The parameters of a cell, and what runs in the place of a function that has them.
CELLS: dict[tuple[str, ...], Callable[..., Tensor]] = {
    ("hidden_states", "recurrent_gate", "reset"): linear_recurrence,
    ("time_decay", "time_first", "key", "value"): wkv,
    ("query", "key", "value", "igate", "fgate"): mlstm,
}


@contextlib.contextmanager
def recurrent_cells(model: nn.Module) -> Iterator[None]:
    """Ours in the place of the loops that the modules of `model` run."""
    found = [(owner, name, ours) for owner, name, ours in _candidates(model) if ours is not None]
    with contextlib.ExitStack() as stack:
        _divide_results(model, stack)
        for owner, name, ours in found:
            stack.enter_context(mock.patch.object(owner, name, ours))
        yield


def _divide_results(model: nn.Module, stack: contextlib.ExitStack) -> None:
    """For a model that divides its weights before it runs (RWKV, whose hidden states are halved every few layers to fit
    into 16 bits): what these weights give is divided instead, so that those of the checkpoint stay."""
    for module in model.modules():
        if not hasattr(module, "_rescale_layers") or getattr(module, "layers_are_rescaled", True):
            continue
        divisors = _divisors(module._rescale_layers)  # type: ignore[arg-type]
        stack.callback(setattr, module, "layers_are_rescaled", False)
        for part in module.modules():
            divisor = divisors.get(id(getattr(part, "weight", None)), 1)
            if divisor != 1:
                part.result_divisor = divisor  # type: ignore[assignment]
                stack.callback(part.register_forward_hook(_divided).remove)


def _divisors(divide: Callable[[], Any]) -> dict[int, float]:
    """What a function divides tensors by, by their ids; it divides none."""
    found: dict[int, float] = {}

    def note(weight: Tensor, by: float) -> Tensor:
        found[id(weight)] = by
        return weight

    with mock.patch.object(Tensor, "div_", note):
        divide()
    return found


def _divided(module: nn.Module, args: Any, result: Tensor) -> Tensor:
    return result / module.result_divisor  # type: ignore[operator]


def _candidates(model: nn.Module) -> Iterator[tuple[Any, str, Callable[..., Any] | None]]:
    """(class or file, name, what replaces the function of that name, if anything does)."""
    modules = {type(module): module for module in model.modules()}
    for cls, module in modules.items():
        for name, function in vars(cls).items():
            yield cls, name, _replacement(function, module)
    for file in sorted({cls.__module__ for cls in modules} & sys.modules.keys()):
        for name, function in vars(sys.modules[file]).items():
            if getattr(function, "__module__", "") == file:
                yield sys.modules[file], name, _replacement(function, None)


def _replacement(function: Any, module: nn.Module | None) -> Callable[..., Any] | None:
    """The cell for a function; None if its parameters or its results are not those of one. `module` has the method."""
    if not inspect.isfunction(function):
        return None
    signature = inspect.signature(function)
    parameters = tuple(name for name in signature.parameters if name != "self")
    names = next((names for names in CELLS if names == parameters[: len(names)]), None)
    if names is None:
        return None
    cell: Callable[..., Tensor] = CELLS[names]
    if cell is mlstm:
        cell = partial(mlstm, eps=float(getattr(getattr(module, "config", None), "eps", 1e-6)))
    given = _random(names)
    first = {} if module is None else {"self": module}
    absent = {name: None for name in signature.parameters if name == "recurrent_states"}
    try:
        with torch.no_grad():
            result = function(**first, **given, **absent)
    except Exception:  # whatever it needs, it is no cell
        return None
    pair, expected = isinstance(result, tuple), cell(COMPUTED, **given)
    value = result[0] if pair else result
    if value.shape != expected.shape or not torch.allclose(value, expected, atol=1e-5):
        return None

    def ours(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs).arguments
        out = cell(TRACED, **{name: bound[name] for name in names})
        return (out, None) if pair else out

    return ours


def _random(names: tuple[str, ...]) -> dict[str, Any]:
    """What a cell is asked about."""
    shape = (1, HEADS, TOKENS, WIDTH) if "query" in names else (1, TOKENS, WIDTH)
    shapes = {"igate": shape[:3], "fgate": shape[:3], "time_decay": shape[2:], "time_first": shape[2:]}
    source = torch.Generator("cpu").manual_seed(0)
    given: dict[str, Any] = {
        name: torch.randn(shapes.get(name, shape), generator=source, device="cpu") for name in names
    }
    if "reset" in given:
        given["reset"] = torch.arange(TOKENS, device="cpu")[None, :, None] == 0
        given["recurrent_gate"] = given["recurrent_gate"].sigmoid()
    return given
