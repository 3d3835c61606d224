"""Generated elementwise kernels: a chain of scalar instructions (see body.py) over broadcast operands.

The same body is interpreted here by torch, and rendered by the code generators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from .base import Cost, op, tensor_bytes
from .body import Body, Number
from .traits import Traits

_gelu = torch.nn.functional.gelu

# opcode -> torch function; the code generators implement exactly these names
OPCODES: dict[str, Callable[..., Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.true_divide,
    "floordiv": lambda a, b: torch.div(a, b, rounding_mode="floor"),
    "remainder": torch.remainder,
    "pow": torch.pow,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "where": torch.where,
    "eq": torch.eq,
    "ne": torch.ne,
    "lt": torch.lt,
    "le": torch.le,
    "gt": torch.gt,
    "ge": torch.ge,
    "logical_and": torch.logical_and,
    "logical_or": torch.logical_or,
    "logical_not": torch.logical_not,
    "neg": torch.neg,
    "abs": torch.abs,
    "sign": torch.sign,
    "exp": torch.exp,
    "expm1": torch.expm1,
    "log": torch.log,
    "log1p": torch.log1p,
    "sin": torch.sin,
    "cos": torch.cos,
    "tan": torch.tan,
    "tanh": torch.tanh,
    "erf": torch.erf,
    "sigmoid": torch.sigmoid,
    "silu": torch.nn.functional.silu,
    "gelu_erf": lambda x: _gelu(x),
    "gelu_tanh": lambda x: _gelu(x, approximate="tanh"),
    "relu": torch.relu,
    "softplus": torch.nn.functional.softplus,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "reciprocal": torch.reciprocal,
    "floor": torch.floor,
    "ceil": torch.ceil,
    "round": torch.round,
    "trunc": torch.trunc,
    "to_f32": lambda x: x.to(torch.float32),
    "to_i32": lambda x: x.to(torch.int32),
    "to_bool": lambda x: x.to(torch.bool),
    "copy": lambda x: x.clone(),
}


def _literal(value: Number, like: Tensor) -> Tensor:
    """A number as a 0-d tensor: a boolean, int64 or float32."""
    dtype = torch.bool if isinstance(value, bool) else torch.int64 if isinstance(value, int) else torch.float32
    return torch.tensor(value, dtype=dtype, device=like.device)


@op(Traits(elementwise=True))
def pointwise(inputs: Sequence[Tensor], body: str) -> Tensor:
    """The result of `body`, as text, over `inputs`, whose shapes are broadcast against each other from the right."""
    last = Body.parse(body).evaluate(
        inputs, lambda value: _literal(value, inputs[0]), lambda _, opcode, values: OPCODES[opcode](*values)
    )
    shape = torch.broadcast_shapes(*(t.shape for t in inputs))
    return last.expand(shape).clone() if tuple(last.shape) != tuple(shape) else last.clone()


@pointwise.set_cost
def _pointwise_cost(inputs: Sequence[Tensor], body: str) -> Cost:
    biggest = max(t.numel() for t in inputs)
    return Cost(float(biggest * len(Body.parse(body).instructions)), tensor_bytes(*inputs) + 4 * biggest)


@pointwise.set_samples
def _pointwise_samples() -> Iterator[tuple[list[Tensor], str]]:
    x, y = torch.randn(3, 5, 7), torch.randn(3, 1, 7)
    yield [x, y], "t0 = silu a0; t1 = mul t0 a1"
    yield [x, torch.randn(7)], "t0 = add a0 a1; t1 = gelu_tanh t0; t2 = mul t1 0.5"
    yield [x], "t0 = gt a0 0.25; t1 = where t0 a0 -1.5"
