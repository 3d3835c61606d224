"""Evaluates values of an exported program that do not depend on the token ids: masks, biases and tables.

Some models build their masks as tensors over pairs of tokens. Such a value depends only on sizes, positions and
weights, so it can be computed for some number of tokens and inspected.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from ...graph.interpret import as_compute
from ...weights.handles import Weight

_SHORT = 5  # tokens of the short sequence that is compared with a long one

# ops that look at the shape of their first operand only
_SHAPE_ONLY = (
    "sym_size",
    "sym_numel",
    "zeros_like",
    "ones_like",
    "full_like",
    "empty_like",
    "new_zeros",
    "new_ones",
    "new_full",
    "new_empty",
)


def _short(node: fx.Node) -> str:
    schema = getattr(node.target, "_schema", None)
    return str(schema.name).split("::")[1] if schema is not None else str(getattr(node.target, "__name__", ""))


class StaticValues:
    """The static nodes of a program, and their values for a given number of tokens.

    looked_at, loaded: nodes and weights that some evaluation depended on.
    """

    def __init__(self, program: ExportedProgram, weights: Mapping[str, Weight], padding: int | None = None) -> None:
        """padding: the id of the padding token, or None. No sequence holds it, so comparisons with it are static."""
        self._program = program
        self._weights = weights
        self._specs = {s.arg.name: s for s in program.graph_signature.input_specs}
        self._users = [n for n in program.graph.nodes if n.op == "placeholder" and self._is_user(n)]
        self.nodes: set[fx.Node] = set()
        self.padding: set[fx.Node] = set()  # nodes that compare tokens with the padding token
        self.looked_at: set[fx.Node] = set()
        self.loaded: set[str] = set()
        for node in program.graph.nodes:
            if node.op == "placeholder":
                static = node not in self._users or node is self._users[1]
            else:
                inputs = node.all_input_nodes
                if _short(node) in _SHAPE_ONLY:
                    inputs = inputs[1:]
                static = node.op == "call_function" and all(i in self.nodes for i in inputs)
                if padding is not None and self._asks_for_padding(node, padding):
                    static = True
                    self.padding.add(node)
            if static:
                self.nodes.add(node)

    def evaluate(self, node: fx.Node, tokens: int) -> Any:
        """The value of a static node in a sequence of `tokens` tokens; ValueError for a node that is not static."""
        needed = self._needed(node)
        self.looked_at |= needed
        env: dict[fx.Node, Any] = {}
        for current in self._program.graph.nodes:
            if current in needed:
                env[current] = self._run(current, env, tokens)
        return env[node]

    def table(self, node: fx.Node, axis: int, tokens: int) -> Tensor:
        """The value of a static node for every position, with its token axis first: [tokens, ..].

        ValueError if the value at a position depends on the length of the sequence.
        """
        whole = self.evaluate(node, tokens).movedim(axis, 0)
        part = self.evaluate(node, min(tokens, _SHORT)).movedim(axis, 0)
        if not torch.equal(part, whole[: len(part)]):
            raise ValueError("a value of a position that depends on the number of tokens")
        return whole.contiguous()

    def constant(self, node: fx.Node) -> Tensor:
        """The value of a static node without a token axis, in its shape.

        ValueError if it depends on the length of the sequence, or on a weight, which may be large.
        """
        if any(n.op == "placeholder" and n not in self._users and not self._is_constant(n) for n in self._needed(node)):
            raise ValueError("a value that is worked out of weights")
        value = self.evaluate(node, _SHORT)
        if not torch.equal(value, self.evaluate(node, _SHORT + 1)):
            raise ValueError("a value that depends on the number of tokens")
        return as_compute(value).contiguous()

    def _needed(self, node: fx.Node) -> set[fx.Node]:
        """The nodes that are needed to compute the value of a static node."""
        needed: set[fx.Node] = set()
        pending = [node]
        while pending:
            current = pending.pop()
            if current not in needed:
                needed.add(current)
                pending.extend(() if current in self.padding else current.all_input_nodes)
        return needed

    def _asks_for_padding(self, node: fx.Node, padding: int) -> bool:
        if _short(node) not in ("ne", "eq") or len(node.args) != 2 or node.args[1] != padding:
            return False
        source: Any = node.args[0]
        while source.op == "call_function" and _short(source) in ("_to_copy", "alias", "clone", "detach"):
            source = source.args[0]
        return bool(self._users) and source is self._users[0]

    def _is_user(self, node: fx.Node) -> bool:
        return self._specs[node.name].kind == InputKind.USER_INPUT

    def _is_constant(self, node: fx.Node) -> bool:
        return self._specs[node.name].kind == InputKind.CONSTANT_TENSOR

    def _run(self, node: fx.Node, env: dict[fx.Node, Any], tokens: int) -> Any:
        if node.op == "placeholder":
            return self._placeholder(node, tokens)
        if node in self.padding:
            shape = [tokens if isinstance(s, torch.SymInt) else int(s) for s in node.meta["val"].shape]
            return torch.full(shape, _short(node) == "ne")
        if node not in self.nodes:  # only its shape is used
            if not isinstance(node.meta["val"], Tensor):
                raise ValueError("a mask by what has more than one shape")
            shape = [tokens if isinstance(s, torch.SymInt) else int(s) for s in node.meta["val"].shape]
            return torch.zeros(shape, dtype=node.meta["val"].dtype)
        args = fx.map_arg(node.args, lambda n: env[n])
        kwargs = dict(fx.map_arg(node.kwargs, lambda n: env[n]))
        if kwargs.get("device") is not None:
            kwargs["device"] = torch.device("cpu")
        if _short(node).startswith(("_assert", "sym_constrain")):
            return None
        try:
            return node.target(*args, **kwargs)  # type: ignore[operator]
        except (RuntimeError, TypeError, NotImplementedError, IndexError) as error:
            reason = str(error).split("\n")[0]
            raise ValueError(f"a mask that cannot be computed for {tokens} tokens: {reason}") from error

    def _placeholder(self, node: fx.Node, tokens: int) -> Tensor:
        if node in self._users:
            is_positions = node is self._users[1]
            return torch.arange(tokens)[None] if is_positions else torch.zeros(1, tokens, dtype=torch.int64)
        spec = self._specs[node.name]
        name = str(spec.target)
        if self._is_constant(node):
            value = self._program.constants[name]
            if not isinstance(value, Tensor) or value.device.type == "meta":
                raise ValueError("a constant without a value")
            return value
        self.loaded.add(name.removeprefix("model."))
        return as_compute(self._weights[name.removeprefix("model.")].load())
