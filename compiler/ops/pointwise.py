"""Generated elementwise kernels: a chain of scalar instructions over broadcast operands.

A body is a list of lines in single assignment form, `t0 = mul a0 a1`: operands are inputs a<i>, earlier values t<j> or
literals. The same text is interpreted here by torch, and rendered by the code generators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from .base import Cost, op, tensor_bytes
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


def parse(line: str) -> tuple[str, str, list[str]]:
    """("t0", "mul", ["a0", "a1"]) of `t0 = mul a0 a1`."""
    target, _, right = line.partition(" = ")
    opcode, *operands = right.split()
    return target, opcode, operands


def is_literal(operand: str) -> bool:
    """True for a number, False for an input a<i> or a value t<j>."""
    return not (operand[0] in "at" and operand[1:].isdigit())


def _literal(text: str, like: Tensor) -> Tensor:
    """A literal as a 0-d tensor; whole numbers written without a point are integers."""
    if text in ("True", "False"):
        return torch.tensor(text == "True", device=like.device)
    integral = text.lstrip("-").isdigit()
    value = int(text) if integral else float(text)
    return torch.tensor(value, dtype=torch.int64 if integral else torch.float32, device=like.device)


@op(Traits(elementwise=True))
def pointwise(inputs: Sequence[Tensor], body: str) -> Tensor:
    """The last value of `body` (lines joined by "; ") over `inputs`, broadcast against each other from the right."""
    env: dict[str, Tensor] = {f"a{i}": t for i, t in enumerate(inputs)}
    last = inputs[0]
    for line in body.split("; "):
        target, opcode, operands = parse(line)
        args = [env[o] if o in env else _literal(o, inputs[0]) for o in operands]
        last = env[target] = OPCODES[opcode](*args)
    shape = torch.broadcast_shapes(*(t.shape for t in inputs))
    return last.expand(shape).clone() if tuple(last.shape) != tuple(shape) else last.clone()


@pointwise.set_cost
def _pointwise_cost(inputs: Sequence[Tensor], body: str) -> Cost:
    biggest = max(t.numel() for t in inputs)
    return Cost(float(biggest * (body.count(";") + 1)), tensor_bytes(*inputs) + 4 * biggest)


@pointwise.set_samples
def _pointwise_samples() -> Iterator[tuple[list[Tensor], str]]:
    x, y = torch.randn(3, 5, 7), torch.randn(3, 1, 7)
    yield [x, y], "t0 = silu a0; t1 = mul t0 a1"
    yield [x, torch.randn(7)], "t0 = add a0 a1; t1 = gelu_tanh t0; t2 = mul t1 0.5"
    yield [x], "t0 = gt a0 0.25; t1 = where t0 a0 -1.5"
