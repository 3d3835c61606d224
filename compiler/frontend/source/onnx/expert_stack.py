"""Joins equal computations of all experts into one computation per token and slot, with products by the selected
experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .errors import Refused
from .expert_values import PRODUCTS, Added, Handlers, Noted, Taken, row_handler
from .known import Known
from .table import OnnxCall


def computed(added: Added, handlers: Handlers) -> Tensor:
    """The sum over each token's selected experts of their results, [T, H]. Refused if the experts cannot be joined."""
    terms = sorted(added.terms, key=lambda term: term.expert)
    if [term.expert for term in terms] != list(range(added.picks.count)):
        raise Refused(f"{len(terms)} of {added.picks.count} experts")
    return _Stacked(added.picks.index, handlers).of(terms).sum(1)


class _Stacked:
    """Joined values of all experts, [T, S, N] for each token and slot."""

    def __init__(self, index: Tensor, handlers: Handlers) -> None:
        self._index, self._handlers = index, handlers
        self._known: dict[int, Any] = {}

    def of(self, values: Sequence[Any]) -> Any:
        """One value in place of the corresponding values of all experts."""
        first = values[0]
        if isinstance(first, Taken):
            if any(not isinstance(v, Taken) or (v.root, v.weights) != (first.root, first.weights) for v in values):
                raise Refused("experts of different rows")
            return first.value.unsqueeze(-1 if first.weights else 1)
        if not isinstance(first, Noted):
            return self._constants(values)
        key = id(first.call)
        if key not in self._known:
            self._known[key] = self._called([v.call if isinstance(v, Noted) else None for v in values])
        results = self._known[key]
        return results[first.result] if isinstance(results, (list, tuple)) else results

    def _constants(self, values: Sequence[Any]) -> Any:
        """The constant that all experts share, or the stack of their constants. Refused if shapes differ."""
        first = values[0]
        if all(v is first for v in values) or (isinstance(first, Known) and all(_equal(v, first) for v in values)):
            return first
        matrices = [v for v in values if isinstance(v, Tensor)]
        if len(matrices) < len(values) or any(v.shape != matrices[0].shape for v in matrices):
            raise Refused("experts of several forms")
        return torch.stack(tuple(matrices))

    def _called(self, calls: Sequence[OnnxCall | None]) -> Any:
        first = calls[0]
        if first is None or any(c is None or not _alike(c, first) for c in calls):
            raise Refused("experts that compute differently")
        columns = [[c.inputs[i] for c in calls if c is not None] for i in range(len(first.inputs))]
        if first.node.op_type == "Add":
            for product, bias in (columns, columns[::-1]):
                if _adds_to_product(product[0], bias[0]):
                    return self._product([p.call for p in product], self._constants(bias))
        if first.node.op_type in PRODUCTS:
            return self._product([c for c in calls if c is not None])
        inputs = [self.of(column) for column in columns]
        if any(self._is_stack(own, value) for own, value in zip(first.inputs, inputs, strict=True)):
            raise Refused("experts with constants of their own besides matrices and biases")
        attributes = {**first.attributes, "axis": -1} if first.node.op_type == "Split" else first.attributes
        if first.node.op_type == "Slice":
            inputs[3] = Known.of([-1])
        return row_handler(first, self._handlers)(replace(first, inputs=inputs, attributes=attributes, makers={}))

    def _is_stack(self, own: Any, value: Any) -> bool:
        return isinstance(own, Tensor) and isinstance(value, Tensor) and value.dim() == own.dim() + 1

    def _product(self, calls: Sequence[OnnxCall], bias: Any = None) -> Tensor:
        """x times each selected expert's matrix, plus its bias."""
        call = calls[0]
        if any(not _alike(c, call) for c in calls):
            raise Refused("experts that compute differently")
        op = call.node.op_type
        given = [i for i in range(2, len(call.inputs)) if isinstance(call.inputs[i], Tensor)]
        if op != "MatMul" and given:
            bias = self._constants([c.inputs[given[-1]] for c in calls])
        x, weight = self.of([c.inputs[0] for c in calls]), self.of([c.inputs[1] for c in calls])
        plain = call.attribute("alpha", 1.0) == 1.0 and call.attribute("beta", 1.0) == 1.0
        whole = isinstance(weight, Tensor) and weight.dim() == 3 and (bias is None or bias.dim() == 2)
        if not whole or not plain or call.attribute("transA", 0):
            raise Refused("experts that share a matrix")
        if op == "MatMul" or (op == "Gemm" and not call.attribute("transB", 0)):
            weight = weight.transpose(1, 2)
        return torch.ops.icc_trace.expert_linear(x.squeeze(1) if x.shape[1] == 1 else x, weight, bias, self._index)


def _adds_to_product(product: Any, bias: Any) -> bool:
    """Whether `bias` is a vector that is added to a product without a bias."""
    matrix = isinstance(product, Noted) and product.call.node.op_type == "MatMul"
    return matrix and isinstance(bias, Tensor) and bias.dim() == 1


def _equal(a: Any, b: Known) -> bool:
    return isinstance(a, Known) and a.array.shape == b.array.shape and a.items() == b.items()


def _alike(a: OnnxCall, b: OnnxCall) -> bool:
    same = a.node.op_type == b.node.op_type and a.node.domain == b.node.domain and len(a.inputs) == len(b.inputs)
    return same and {k: str(v) for k, v in a.attributes.items()} == {k: str(v) for k, v in b.attributes.items()}
