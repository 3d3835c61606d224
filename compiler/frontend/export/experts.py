"""Replaces expert layers whose own code cannot be exported, such as loops over the experts, by products with the
selected experts.

Each function computes one kind of layer by means of `ops.product`: x[T, K] or [T, S, K], weight[E, N, K], index[T, S]
-> [T, S, N]. It is compared with a copy of the module, whose widths are divided by their greatest common divisor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .substitution import Candidate, Code, CodeTrial, Substitution, small_copy
from .traced_ops import COMPUTED, TRACED, SequenceOps

_TOKENS, _PICKED = 7, 2  # of a trial
# a module's width, its experts' width, the number of experts, and the number of valid expert indices
Sizes = Callable[[Any], tuple[int, int, int, int]]


def _activation(module: nn.Module) -> Code:
    for part in module.modules():
        for name in ("act_fn", "activation_fn", "activation"):
            if callable(found := getattr(part, name, None)):
                return found
    raise AttributeError("no activation")


def _gated_sizes(module: Any) -> tuple[int, int, int, int]:
    experts, width, inner = module.down_proj.shape
    return width, inner, experts, len(module.gate_up_proj)


def gated(ops: SequenceOps, module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """A gated layer: gate_up_proj[E or more, 2I, H], down_proj[E, H, I]; an index of E or more selects the token
    itself. hidden_states[T, H], top_k_*[T, S] -> [T, H]."""
    up, down, act = module.gate_up_proj, module.down_proj, _activation(module)
    gate, hidden = ops.product(hidden_states, up, top_k_index).chunk(2, dim=-1)
    out = ops.product(act(gate) * hidden, down, top_k_index)
    if len(up) > len(down):
        itself = (top_k_index >= len(down)).unsqueeze(-1)
        out = torch.where(itself, hidden_states.unsqueeze(1), out)
    return (out * top_k_weights.unsqueeze(-1)).sum(dim=1)


def _stacked_sizes(module: Any) -> tuple[int, int, int, int]:
    rows, width = module.mlp.w1.shape
    return width, rows // module.num_experts, module.num_experts, module.num_experts


def stacked(ops: SequenceOps, module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """A layer whose w1, v1 and w2 hold all E experts, stacked: [E * I, H] each. hidden_states[1, T, H] -> [1, T, H]."""
    mlp, act = module.mlp, _activation(module)
    gate, up, down = (w.view(module.num_experts, -1, w.shape[-1]) for w in (mlp.w1, mlp.v1, mlp.w2))
    rows = hidden_states.reshape(-1, hidden_states.shape[-1])
    hidden = act(ops.product(rows, gate, top_k_index)) * ops.product(rows, up, top_k_index)
    out = ops.product(hidden, down.transpose(1, 2), top_k_index)
    return (out * top_k_weights.unsqueeze(-1)).sum(dim=1).view(hidden_states.shape)


def _scaled_sizes(module: Any) -> tuple[int, int, int, int]:
    experts, inner, width = module.experts.down_proj.shape
    return width, inner, experts, len(module.router.weight)


def scaled(ops: SequenceOps, module: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    """A layer whose experts read the tokens scaled by their scores, sigmoid(logit) or 0, and that adds a shared expert:
    gate_up_proj[E, H, 2I], down_proj[E, I, H]. Returns [T, H] and the logits [T, E]."""
    router, experts, act = module.router, module.experts, _activation(module.experts)
    rows = hidden_states.reshape(-1, hidden_states.shape[-1])
    logits = nn.functional.linear(rows, router.weight)
    values, index = torch.topk(logits, router.top_k, dim=1)
    given = rows.unsqueeze(1) * torch.sigmoid(values).unsqueeze(-1)
    gate, up = ops.product(given, experts.gate_up_proj.transpose(1, 2), index).chunk(2, dim=-1)
    out = ops.product(up * act(gate), experts.down_proj.transpose(1, 2), index)
    return module.shared_expert(rows) + out.sum(dim=1), logits


def _routed(module: Any, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(indices, weights[T, S], logits) of the experts with the largest logits."""
    logits = nn.functional.linear(rows, module.router.layer.weight)
    values, index = torch.topk(logits, module.router.top_k, dim=1)
    return index, torch.softmax(values, dim=1), logits


def _sorted_sizes(module: Any) -> tuple[int, int, int, int]:
    experts, width, inner = module.output_linear.weight.shape
    return width, inner, experts, experts


def by_expert(ops: SequenceOps, module: Any, layer_input: Tensor) -> Tensor:
    """A layer whose code sorts the tokens by expert: input_linear[E, 2I, H], output_linear[E, H, I] and a bias.
    layer_input[1, T, H] -> [1, T, H]."""
    up, down, act = module.input_linear, module.output_linear, _activation(module)
    rows = layer_input.reshape(-1, layer_input.shape[-1])
    index, weights, _ = _routed(module, rows)
    gate, hidden = ops.product(rows, up.weight, index).chunk(2, dim=-1)
    out = ops.product(act(gate) * hidden, down.weight, index)
    return (out * weights.unsqueeze(-1)).sum(dim=1).view(layer_input.shape) + module.bias


def first_product(ops: SequenceOps, module: Any, layer_input: Tensor) -> tuple[Tensor, Tensor, Any]:
    """The first product of such a layer, if the model computes something between its two products: layer_input[1, T, H]
    -> [1, T, S, I]; also the logits, and the routing for the second product."""
    rows = layer_input.reshape(-1, layer_input.shape[-1])
    index, weights, logits = _routed(module, rows)
    hidden = ops.product(rows, module.input_linear.weight, index)
    return hidden.view(*layer_input.shape[:-1], *hidden.shape[1:]), logits, (index, weights)


def second_product(ops: SequenceOps, module: Any, layer_input: Tensor, topo_info: Any) -> Tensor:
    """The second product: layer_input[1, T, S, I] -> [1, T, H]."""
    index, weights = topo_info
    out = ops.product(layer_input.reshape(-1, *layer_input.shape[2:]), module.output_linear.weight, index)
    out = (out * weights.unsqueeze(-1)).sum(dim=1)
    return out.view(*layer_input.shape[:2], out.shape[-1]) + module.bias


def _both_products(ops: SequenceOps, module: Any, layer_input: Tensor) -> Tensor:
    hidden, _, routing = first_product(ops, module, layer_input)
    return second_product(ops, module, hidden, routing)


def _map_and_reduce(module: Any, layer_input: Tensor) -> Tensor:
    hidden, _, routing = module.map(layer_input)
    return module.reduce(hidden, routing)


def expert_layer(
    takes: tuple[str, ...],
    sizes: Sizes,
    body: Callable[..., Any],
    parts: Mapping[str, Callable[..., Any]] | None = None,
    run: Callable[..., Any] = lambda module, *given: module(*given),
) -> Substitution:
    """The substitution of modules whose `forward` takes these parameters and which compute `body`.

    sizes: raises AttributeError or ValueError for a module with other weights. parts: the methods to replace, by name;
    None: `forward` is replaced. run: calls a module, for the comparison with `body`.
    """

    def find(candidate: Candidate) -> bool:
        through_interface = hasattr(candidate.module, "has_gate")  # transformers' registry replaces it
        return candidate.name == "forward" and candidate.takes == takes and not through_interface

    def small(candidate: Candidate, generator: torch.Generator) -> Iterator[CodeTrial]:
        width, inner, experts, indices = sizes(candidate.module)
        shared = math.gcd(width, inner)
        smaller = {n: n // shared for n in (width, inner, 2 * inner, experts * inner)}
        module = small_copy(candidate.module, smaller, generator)
        x = torch.randn(1, _TOKENS, width // shared, generator=generator)
        index = torch.rand(_TOKENS, indices, generator=generator).argsort(dim=1)[:, :_PICKED]
        weights = torch.rand(index.shape, generator=generator)
        given = (index, weights)[: len(takes) - 1]
        try:
            run(module, x, *given)
        except Exception:  # the module takes tokens without a batch axis
            x = x[0]
        yield CodeTrial(lambda: run(module, x, *given), (COMPUTED, module, x, *given))

    def traced(code: Callable[..., Any]) -> Code:
        return lambda self, *args, **kwargs: code(TRACED, self, *args, **kwargs)

    functions = {name: traced(code) for name, code in (parts or {"forward": body}).items()}
    return Substitution(find, small, body, lambda candidate: functions)


_PICKS = ("hidden_states", "top_k_index", "top_k_weights")
EXPERTS = (
    expert_layer(_PICKS, _gated_sizes, gated),
    expert_layer(_PICKS, _stacked_sizes, stacked),
    expert_layer(("hidden_states",), _scaled_sizes, scaled),
    expert_layer(("layer_input",), _sorted_sizes, by_expert),
    expert_layer(
        ("layer_input",),
        _sorted_sizes,
        _both_products,
        {"map": first_product, "reduce": second_product},
        _map_and_reduce,
    ),
)
