"""How an op is declared: once, and everything else is derived.

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

Declaring is registering, wherever it is done: the verifier, the passes, the interpreter and the lowering look an op up
by the target of a node (`op_of`, `traits_of`) when they meet it, and keep no tables of their own. An op that has
`instructions` is drawn into `icc.pointwise` by the fusion and needs no kernel; any other needs a lowering and a kernel
per back end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from .. import extensions
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

    `overload` is what a node calls. `instructions` tells how the fusion writes an elementwise op.
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

    @property
    def is_lowered(self) -> bool:
        """Whether the op reaches the lowering, and so needs a kernel; no pass takes it in or replaces it."""
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
        """Import what other packages declare (entry points icc.ops); happens once, when an op is not known."""
        if not self._extended:
            self._extended = True
            extensions.load_all(GROUP)

    def lowered(self) -> Iterator[Op]:
        """The ops that may reach the lowering."""
        return (declared for declared in self.values() if declared.is_lowered)


OPS = Registry()


def op_of(target: Any) -> Op | None:
    """The declared op that a node's target calls; None for what is not one, such as a placeholder or getitem."""
    return OPS.find(target)


def traits_of(target: Any) -> Traits:
    """The traits of a node's target; of what is no declared op, none."""
    declared = OPS.find(target)
    return NO_TRAITS if declared is None else declared.traits


def op(
    traits: Traits = NO_TRAITS,
    tolerance: float = 1e-5,
    instructions: Instructions | None = None,
    namespace: str = "icc",
) -> Callable[[Callable[..., Any]], Op]:
    """Declare `<namespace>::<function name>` and register it."""

    def declare(fn: Callable[..., Any]) -> Op:
        name = fn.__name__ if namespace == "icc" else f"{namespace}.{fn.__name__}"
        if name in OPS:
            raise ValueError(f"an op named {name!r} is declared already")
        custom = torch.library.custom_op(f"{namespace}::{fn.__name__}", fn, mutates_args=())
        custom.register_fake(fn)
        overload = getattr(getattr(torch.ops, namespace), fn.__name__).default
        return OPS.add(Op(name, fn, overload, traits, tolerance, instructions, doc=fn.__doc__ or ""))

    return declare


def tensor_bytes(*tensors: torch.Tensor | None) -> int:
    """Bytes of the given tensors; None counts nothing."""
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)
