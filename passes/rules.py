"""Rewrite rules: pattern / check / rewrite, with a reason for every refusal.

A pattern is built from small pieces (`call`, `Any`, `Var`, `Lit`, `either`); commutative ops match in both orders.
`apply_rules` walks the graph once, in execution order, and rewrites where a rule matches and its check does not refuse.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from ..compiler.graph.graph import Graph
from .base import PassContext, PassResult, Refusal

aten = torch.ops.aten
Bindings = dict[str, Any]


@dataclass(frozen=True)
class Var:
    """Matches any node, including weights and inputs but not numbers, and binds it; one name always matches one
    node."""

    name: str


@dataclass(frozen=True)
class Lit:
    """Matches any number and binds it."""

    name: str


@dataclass(frozen=True)
class CallPattern:
    """Matches a call of one of `targets` with these arguments."""

    targets: tuple[Any, ...]
    args: tuple[Any, ...]
    commutative: bool = False


@dataclass(frozen=True)
class Through:
    """Matches the inner pattern, looking through calls of `targets` at their first argument (views)."""

    targets: tuple[Any, ...]
    inner: Any


@dataclass(frozen=True)
class Either:
    """Matches the first alternative that matches."""

    alternatives: tuple[Any, ...]


def call(target: Any, *args: Any) -> CallPattern:
    """A call pattern. The call has these arguments first, and may have more; add and mul match in both orders.

    TypeError if the target is an op with all its overloads (`aten.tanh`), which no node calls.
    """
    if isinstance(target, torch._ops.OpOverloadPacket):
        known = ", ".join(f"{target}.{overload}" for overload in target.overloads())
        raise TypeError(f"{target} stands for several overloads: name one of {known}")
    return CallPattern((target,), args, target in (aten.add.Tensor, aten.mul.Tensor))


def either(*alternatives: Any) -> Either:
    """Alternatives, tried in order."""
    return Either(alternatives)


def through_views(inner: Any) -> Through:
    """The inner pattern with any aten.view around it."""
    return Through((aten.view.default,), inner)


def match(pattern: Any, value: Any, bound: Bindings) -> Iterator[Bindings]:
    """All ways in which `value` fits `pattern`, as bindings that extend `bound`."""
    if isinstance(pattern, Var):
        if isinstance(value, fx.Node) and bound.get(pattern.name, value) is value:
            yield {**bound, pattern.name: value}
    elif isinstance(pattern, Lit):
        if isinstance(value, (int, float)) and bound.get(pattern.name, value) == value:
            yield {**bound, pattern.name: value}
    elif isinstance(pattern, (Either, Through)):
        yield from _match_one_of(pattern, value, bound)
    elif isinstance(pattern, CallPattern):
        yield from _match_call(pattern, value, bound)
    elif isinstance(pattern, (list, tuple)):
        if isinstance(value, (list, tuple)) and len(value) == len(pattern):
            yield from _match_all(list(pattern), list(value), bound)
    elif not isinstance(value, fx.Node) and pattern == value:
        yield bound


def _match_one_of(pattern: Either | Through, value: Any, bound: Bindings) -> Iterator[Bindings]:
    if isinstance(pattern, Either):
        for alternative in pattern.alternatives:
            yield from match(alternative, value, bound)
        return
    yield from match(pattern.inner, value, bound)
    if isinstance(value, fx.Node) and value.target in pattern.targets:
        yield from match(pattern, value.args[0], bound)


def _match_call(pattern: CallPattern, value: Any, bound: Bindings) -> Iterator[Bindings]:
    if not isinstance(value, fx.Node) or value.target not in pattern.targets or len(value.args) < len(pattern.args):
        return
    args = list(value.args[: len(pattern.args)])
    yield from _match_all(list(pattern.args), args, bound)
    if pattern.commutative:
        yield from _match_all(list(pattern.args), [args[1], args[0], *args[2:]], bound)


def _match_all(patterns: list[Any], values: list[Any], bound: Bindings) -> Iterator[Bindings]:
    if not patterns:
        yield bound
        return
    for extended in match(patterns[0], values[0], bound):
        yield from _match_all(patterns[1:], values[1:], extended)


@dataclass(frozen=True)
class Fail:
    """A check's refusal, with the reason that --explain prints."""

    reason: str


class Rule(ABC):
    """One rewrite. `pattern` describes the root, the last of the nodes that are replaced; `check` may refuse; `rewrite`
    returns the replacement of the root.

    Other nodes of the match may have more users, for which they stay in the graph. If the rewrite then does not pay
    off, the rule must refuse in `check`.
    """

    name: ClassVar[str]
    pattern: Any

    def check(self, graph: Graph, root: fx.Node, found: Bindings) -> Fail | None:
        """None to rewrite, or the reason why not. `found` has the match of each Var and Lit of the pattern, by name."""
        return None

    @abstractmethod
    def rewrite(self, graph: Graph, root: fx.Node, found: Bindings) -> fx.Node:
        """Build the replacement with `graph.call`; new nodes go right before the root."""


def apply_rules(graph: Graph, rules: Sequence[Rule], ctx: PassContext) -> PassResult:
    """Apply the first rule that matches at each node, in execution order."""
    counts: Counter[str] = Counter()
    for root in list(graph.nodes):
        if root.op != "call_function" or not root.users:
            continue
        for rule in rules:
            if _try(graph, rule, root, ctx):
                counts[rule.name] += 1
                break
    return PassResult(bool(counts), counts)


def _try(graph: Graph, rule: Rule, root: fx.Node, ctx: PassContext) -> bool:
    reason = ""
    for found in match(rule.pattern, root, {}):
        refusal = rule.check(graph, root, found)
        if refusal is None:
            with graph.fx.inserting_before(root):
                graph.replace(root, rule.rewrite(graph, root, found))
            return True
        reason = reason or refusal.reason
    if reason:
        ctx.refusals.append(Refusal(rule.name, root.name, reason))
    return False
