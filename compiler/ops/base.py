"""Declares ops: each is declared once, and everything else is derived.

    @op(Traits(elementwise=True), namespace="acme")
    def squared(x: Tensor) -> Tensor:
        "x * x."
        return x * x

    @squared.set_cost
    def _(x): return Cost(x.numel(), 2 * tensor_bytes(x))

    @squared.set_samples
    def _(): yield (torch.randn(3, 7),)

The decorated function is the op's schema, reference, oracle and fake at once. Every tensor that depends on tokens is
token-major: its first axis is the token (or logit row) axis, and the op treats each row on its own, unless its traits
say that it mixes tokens.

A declaration in any module also registers the op: the verifier, the passes, the interpreter and the lowering look an op
up by the target of a node (`op_of`, `traits_of`) and keep no tables of their own. Fusion merges an op that has
`instructions` into `icc.pointwise`, so it needs no kernel; any other op needs a lowering and a kernel per back end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from inspect import Parameter, signature
from typing import Any, get_type_hints

import torch
from torch import fx

from ...runtime import extensions
from ..constant_argument import ConstantArgument
from .body import Operand
from .traits import NO_TRAITS, Traits

GROUP = "icc.ops"  # entry points of other packages: modules that declare ops

# A BodyWriter, then the op's operands (of the body, or numbers) -> the result's operand of the body.
Instructions = Callable[..., Operand]


@dataclass(frozen=True)
class Cost:
    """Work of one call: floating point operations and bytes moved (weights and activations)."""

    flops: float
    bytes: float


@dataclass
class Op:
    """A declared op. `tolerance` bounds max |kernel - reference| / max |reference| in float32.

    `overload` is the target that a node calls. `instructions` writes an elementwise op into a fused body; None if
    fusion cannot.
    """

    name: str
    reference: Callable[..., Any]
    overload: Any
    traits: Traits
    tolerance: float
    instructions: Instructions | None = None
    cost: Callable[..., Cost] | None = None
    samples: Callable[[], Iterable[tuple[Any, ...]]] | None = None
    doc: str = ""

    @cached_property
    def parameters(self) -> dict[str, Any]:
        """The names of the arguments in order, each with its default, or Parameter.empty."""
        return {name: parameter.default for name, parameter in signature(self.reference).parameters.items()}

    def named(self, node: fx.Node) -> dict[str, Any]:
        """The arguments of a node's call by name, defaults included."""
        given = {**dict(zip(self.parameters, node.args, strict=False)), **node.kwargs}
        return {name: given.get(name, default) for name, default in self.parameters.items()}

    def ordered(self, **named: Any) -> tuple[Any, ...]:
        """Named arguments as a node's tuple: in order, without defaults at the end. TypeError if one is missing or a
        name is unknown."""
        unknown = named.keys() - self.parameters.keys()
        values = {**self.parameters, **named}
        missing = [name for name, value in values.items() if value is Parameter.empty]
        if unknown or missing:
            raise TypeError(f"{self.name}: {', '.join((*unknown, *missing))}")
        found = [(value, self.parameters[name]) for name, value in values.items()]
        while found and found[-1][0] is found[-1][1]:
            found.pop()
        return tuple(value for value, _ in found)

    @property
    def is_lowered(self) -> bool:
        """Whether the op reaches the lowering and needs a kernel, because no pass merges or replaces it."""
        return self.instructions is None and not self.traits.abstract

    def set_cost(self, fn: Callable[..., Cost]) -> Callable[..., Cost]:
        """Decorator: the cost function, which takes the op's own arguments."""
        self.cost = fn
        return fn

    def set_samples(self, fn: Callable[[], Iterable[tuple[Any, ...]]]) -> Callable[[], Iterable[tuple[Any, ...]]]:
        """Decorator: a generator of argument tuples for the generated tests, odd sizes included."""
        self.samples = fn
        return fn


class Registry(dict[str, Op]):
    """Every declared op by name: "linear" for icc::linear, else with the namespace, "aten.view"."""

    def __init__(self) -> None:
        super().__init__()
        self._by_target: dict[Any, Op] = {}
        self._extended = False

    def add(self, declared: Op, *targets: Any) -> Op:
        """Register an op under the overloads (or whole packets of overloads) that stand for it; ValueError if a name
        is taken."""
        if declared.name in self:
            raise ValueError(f"an op named {declared.name!r} is declared already")
        self[declared.name] = declared
        self._by_target.update(dict.fromkeys(targets or (declared.overload,), declared))
        return declared

    def find(self, target: Any) -> Op | None:
        """The op that a node's target calls, or None."""
        found = self._by_target.get(target) or self._by_target.get(getattr(target, "overloadpacket", None))
        if found is None and not self._extended and hasattr(target, "overloadpacket"):
            self.extend()
            return self.find(target)
        return found

    def extend(self) -> None:
        """Import the ops that other packages declare (entry points icc.ops); this happens once, when an op is not
        known."""
        if not self._extended:
            self._extended = True
            extensions.load_all(GROUP)

    def lowered(self) -> Iterator[Op]:
        """The ops that may reach the lowering."""
        return (declared for declared in self.values() if declared.is_lowered)


OPS = Registry()


def op_of(target: Any) -> Op | None:
    """The declared op that a node's target calls; None for any other target, such as a placeholder or getitem."""
    return OPS.find(target)


def traits_of(target: Any) -> Traits:
    """The traits of a node's target; NO_TRAITS if it is not a declared op."""
    declared = OPS.find(target)
    return NO_TRAITS if declared is None else declared.traits


def named_arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments of a call of a declared op, by name, defaults included."""
    declared = OPS.find(node.target)
    assert declared is not None, f"{node.target} is no declared op"
    return declared.named(node)


class OpTarget:
    """The target of an op that has a ConstantArgument among its arguments: torch's schemas have no type for it."""

    def __init__(self, namespace: str, fn: Callable[..., Any]) -> None:
        self.namespace, self._fn = namespace, fn
        self.__name__, self.__qualname__, self.__module__ = fn.__name__, fn.__name__, fn.__module__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.overrides.has_torch_function(args):
            return torch.overrides.handle_torch_function(self, args, *args, **kwargs)
        return self._fn(*args, **kwargs)

    def __deepcopy__(self, memo: object) -> OpTarget:
        return self  # nodes are compared with the op's own

    def name(self) -> str:
        """The name in the style of torch's ops, "icc::attention"."""
        return f"{self.namespace}::{self.__name__}"

    def __str__(self) -> str:
        return f"{self.namespace}.{self.__name__}"


def op(
    traits: Traits = NO_TRAITS,
    tolerance: float = 1e-5,
    instructions: Instructions | None = None,
    namespace: str = "icc",
) -> Callable[[Callable[..., Any]], Op]:
    """Declare `<namespace>::<function name>` and register it.

    A function with a ConstantArgument among its arguments is called directly; any other becomes an op of torch.
    instructions: None for an op that fusion does not merge.
    """

    def declare(fn: Callable[..., Any]) -> Op:
        name = fn.__name__ if namespace == "icc" else f"{namespace}.{fn.__name__}"
        if name in OPS:
            raise ValueError(f"an op named {name!r} is declared already")
        if instructions is not None:
            _check_arguments(name, fn, instructions)
        return OPS.add(Op(name, fn, _target(namespace, fn), traits, tolerance, instructions, doc=fn.__doc__ or ""))

    return declare


def _check_arguments(name: str, fn: Callable[..., Any], instructions: Instructions) -> None:
    """Raise TypeError if the parameters of `instructions` are not a body followed by the op's."""
    taken = signature(fn).parameters
    try:
        signature(instructions).bind("body", *taken)
    except TypeError as error:
        raise TypeError(f"instructions of op {name!r} take (body, {', '.join(taken)}): {error}") from None


def _target(namespace: str, fn: Callable[..., Any]) -> Any:
    """The target that nodes call."""
    hints = [hint for name, hint in get_type_hints(fn).items() if name != "return"]
    if any(isinstance(hint, type) and issubclass(hint, ConstantArgument) for hint in hints):
        return OpTarget(namespace, fn)
    custom = torch.library.custom_op(f"{namespace}::{fn.__name__}", fn, mutates_args=())
    custom.register_fake(fn)
    return getattr(getattr(torch.ops, namespace), fn.__name__).default


def tensor_bytes(*tensors: torch.Tensor | None) -> int:
    """Bytes of the given tensors; None counts nothing."""
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)
