"""The third door into transformers: expert layers whose own code cannot be exported, such as loops over the experts.

`FORMS` are what such modules compute, in products with the picked experts. A form takes the place of a module's code
where both give the same on small random weights: the module is copied with its widths divided by what they have in
common, run, and compared. So no form is taken by a name, and none that is almost right.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

Product = Callable[[Tensor, Tensor, Tensor], Tensor]  # x[T, K] or [T, S, K], weight[E, N, K], index[T, S] -> [T, S, N]
_TOKENS, _PICKED = 7, 2
_MOST_ELEMENTS = 2**24
_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Form:
    """`sizes` of a module: its width, that of its experts, how many there are, and indices of them; AttributeError or
    ValueError where it is not of this form. `methods`: its code, given the module and a product. `whole`: the call that
    goes through all of them."""

    sizes: Callable[[Any], tuple[int, int, int, int]]
    methods: Mapping[str, Callable[[Any, Product], Callable[..., Any]]]
    whole: Callable[..., Any] = lambda module, *given: module(*given)


def traced_product(x: Tensor, weight: Tensor, index: Tensor) -> Tensor:
    """The op that a trace leaves."""
    return torch.ops.icc_trace.expert_linear(x, weight, None, index)


def plain_product(x: Tensor, weight: Tensor, index: Tensor) -> Tensor:
    """What it computes; an index behind the last expert gives zeros."""
    x = x.unsqueeze(1) if x.dim() == 2 else x
    picked = weight[index.clamp(max=len(weight) - 1)]
    return (picked @ x.unsqueeze(-1)).squeeze(-1) * (index < len(weight)).unsqueeze(-1)


def _activation(module: nn.Module) -> Callable[..., Any]:
    for part in module.modules():
        for name in ("act_fn", "activation_fn", "activation"):
            if callable(found := getattr(part, name, None)):
                return found
    raise AttributeError("no activation")


def _gated_sizes(module: Any) -> tuple[int, int, int, int]:
    experts, width, inner = module.down_proj.shape
    return width, inner, experts, len(module.gate_up_proj)


def _gated(module: Any, product: Product) -> Callable[..., Tensor]:
    """gate_up_proj[E or more, 2I, H], down_proj[E, H, I]; indices from E on mean the token itself."""
    up, down, act = module.gate_up_proj, module.down_proj, _activation(module)

    def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        gate, hidden = product(hidden_states, up, top_k_index).chunk(2, dim=-1)
        out = product(act(gate) * hidden, down, top_k_index)
        if len(up) > len(down):
            itself = (top_k_index >= len(down)).unsqueeze(-1)
            out = torch.where(itself, hidden_states.unsqueeze(1), out)
        return (out * top_k_weights.unsqueeze(-1)).sum(dim=1)

    return forward


def _stacked_sizes(module: Any) -> tuple[int, int, int, int]:
    rows, width = module.mlp.w1.shape
    return width, rows // module.num_experts, module.num_experts, module.num_experts


def _stacked(module: Any, product: Product) -> Callable[..., Tensor]:
    """w1, v1 and w2 of E experts, one under the other, [E * I, H] each."""
    mlp, act = module.mlp, _activation(module)
    gate, up, down = (w.view(module.num_experts, -1, w.shape[-1]) for w in (mlp.w1, mlp.v1, mlp.w2))

    def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        hidden = act(product(rows, gate, top_k_index)) * product(rows, up, top_k_index)
        out = product(hidden, down.transpose(1, 2), top_k_index)
        return (out * top_k_weights.unsqueeze(-1)).sum(dim=1).view(hidden_states.shape)

    return forward


def _scaled_sizes(module: Any) -> tuple[int, int, int, int]:
    experts, inner, width = module.experts.down_proj.shape
    return width, inner, experts, len(module.router.weight)


def _scaled(module: Any, product: Product) -> Callable[..., tuple[Tensor, Tensor]]:
    """A layer that gives every expert the tokens times their scores, sigmoid(logit) or 0, and adds a shared expert:
    gate_up_proj[E, H, 2I], down_proj[E, I, H]."""
    router, experts, act = module.router, module.experts, _activation(module.experts)

    def forward(hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        logits = nn.functional.linear(rows, router.weight)
        values, index = torch.topk(logits, router.top_k, dim=1)
        scaled = rows.unsqueeze(1) * torch.sigmoid(values).unsqueeze(-1)
        gate, up = product(scaled, experts.gate_up_proj.transpose(1, 2), index).chunk(2, dim=-1)
        out = product(up * act(gate), experts.down_proj.transpose(1, 2), index)
        return module.shared_expert(rows) + out.sum(dim=1), logits

    return forward


def _routed(module: Any, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(indices, weights[T, S], logits) of the experts with the largest logits."""
    logits = nn.functional.linear(rows, module.router.layer.weight)
    values, index = torch.topk(logits, module.router.top_k, dim=1)
    return index, torch.softmax(values, dim=1), logits


def _sorted_sizes(module: Any) -> tuple[int, int, int, int]:
    experts, width, inner = module.output_linear.weight.shape
    return width, inner, experts, experts


def _sorted(module: Any, product: Product) -> Callable[..., Tensor]:
    """A layer whose code sorts the tokens by expert: input_linear[E, 2I, H], output_linear[E, H, I] and a bias."""
    up, down, act = module.input_linear, module.output_linear, _activation(module)

    def forward(layer_input: Tensor) -> Tensor:
        rows = layer_input.reshape(-1, layer_input.shape[-1])
        index, weights, _ = _routed(module, rows)
        gate, hidden = product(rows, up.weight, index).chunk(2, dim=-1)
        out = product(act(gate) * hidden, down.weight, index)
        return (out * weights.unsqueeze(-1)).sum(dim=1).view(layer_input.shape) + module.bias

    return forward


def _sorted_before(module: Any, product: Product) -> Callable[..., Any]:
    """As `_sorted`, with something between the two products: the first, [1, T, S, I]."""

    def map(layer_input: Tensor) -> tuple[Tensor, Tensor, Any]:
        rows = layer_input.reshape(-1, layer_input.shape[-1])
        index, weights, logits = _routed(module, rows)
        hidden = product(rows, module.input_linear.weight, index)
        return hidden.view(*layer_input.shape[:-1], *hidden.shape[1:]), logits, (index, weights)

    return map


def _sorted_behind(module: Any, product: Product) -> Callable[..., Tensor]:
    """The second, of [1, T, S, I]."""

    def reduce(layer_input: Tensor, topo_info: Any) -> Tensor:
        index, weights = topo_info
        out = product(layer_input.reshape(-1, *layer_input.shape[2:]), module.output_linear.weight, index)
        out = (out * weights.unsqueeze(-1)).sum(dim=1)
        return out.view(*layer_input.shape[:2], out.shape[-1]) + module.bias

    return reduce


def _between(module: Any, layer_input: Tensor) -> Tensor:
    hidden, _, routing = module.map(layer_input)
    return module.reduce(hidden, routing)


_PICKS = ("self", "hidden_states", "top_k_index", "top_k_weights")
# the forms that a module may be of, by what its forward takes
FORMS: dict[tuple[str, ...], tuple[Form, ...]] = {
    _PICKS: (Form(_gated_sizes, {"forward": _gated}), Form(_stacked_sizes, {"forward": _stacked})),
    ("self", "hidden_states"): (Form(_scaled_sizes, {"forward": _scaled}),),
    ("self", "layer_input"): (
        Form(_sorted_sizes, {"forward": _sorted}),
        Form(_sorted_sizes, {"map": _sorted_before, "reduce": _sorted_behind}, _between),
    ),
}


@contextlib.contextmanager
def replaced_experts(model: nn.Module) -> Iterator[None]:
    """Forms in the place of the modules of `model` that compute the same."""
    forms: dict[type, Form | None] = {}
    for module in model.modules():
        if type(module) not in forms:
            forms[type(module)] = _form_of(module)
    with contextlib.ExitStack() as stack:
        for cls, form in forms.items():
            for name, method in form.methods.items() if form is not None else ():
                stack.enter_context(mock.patch.object(cls, name, _traced(method)))
        yield


def _traced(method: Callable[[Any, Product], Callable[..., Any]]) -> Callable[..., Any]:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return method(self, traced_product)(*args, **kwargs)

    return forward


def _takes(module: nn.Module) -> tuple[str, ...]:
    code = getattr(type(module).forward, "__code__", None)
    return code.co_varnames[: code.co_argcount] if code is not None else ()


def _form_of(module: nn.Module) -> Form | None:
    """The form that computes what a module does, if it has experts that transformers' interface does not reach."""
    if hasattr(module, "has_gate"):  # it goes through the interface
        return None
    return next((form for form in FORMS.get(_takes(module), ()) if _same(module, form)), None)


def _same(module: nn.Module, form: Form) -> bool:
    """Whether a small copy of a module computes what the form says."""
    try:
        width, inner, experts, indices = form.sizes(module)
    except (AttributeError, TypeError, ValueError):
        return False
    with _disable_current_modes(), torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        shared = math.gcd(width, inner)
        small = divided(module, {n: n // shared for n in (width, inner, 2 * inner, experts * inner)}, generator)
        if small is None:
            return False
        x = torch.randn(1, _TOKENS, width // shared, generator=generator)
        index = torch.rand(_TOKENS, indices, generator=generator).argsort(dim=1)[:, :_PICKED]
        weights = torch.rand(index.shape, generator=generator)
        given = (index, weights) if _takes(module) == _PICKS else ()
        return any(_equal(small, form, (tokens, *given)) for tokens in (x, x[0]))


def _equal(module: nn.Module, form: Form, given: tuple[Tensor, ...]) -> bool:
    try:
        expected = form.whole(module, *given)
        with contextlib.ExitStack() as stack:
            for name, method in form.methods.items():
                stack.enter_context(mock.patch.object(module, name, method(module, plain_product)))
            found = form.whole(module, *given)
    except Exception:  # a model's own code, on sizes that it was not made for
        return False
    pairs = zip(*((v if isinstance(v, tuple) else (v,)) for v in (expected, found)), strict=True)
    return all(a.shape == b.shape and torch.allclose(a, b, _TOLERANCE, _TOLERANCE) for a, b in pairs)


def divided(module: nn.Module, sizes: dict[int, int], generator: torch.Generator) -> nn.Module | None:
    """A copy of a module with other sizes and random weights; None if that is large too. Experts come first in stacks
    of matrices."""
    small = copy.deepcopy(module)
    for part in small.modules():
        for name, value in vars(part).items():
            if type(value) is int:
                setattr(part, name, sizes.get(value, value))
        for name, weight in part._parameters.items():
            if weight is not None:
                kept = 1 if weight.dim() == 3 else 0
                shape = [*weight.shape[:kept], *(sizes.get(n, n) for n in weight.shape[kept:])]
                if math.prod(shape) > _MOST_ELEMENTS:
                    return None
                part._parameters[name] = nn.Parameter(torch.randn(shape, generator=generator))
    return small
