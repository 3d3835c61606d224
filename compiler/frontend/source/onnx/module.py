"""The model of an ONNX file as a torch module on meta: its forward runs the nodes, one handler each.

From there on it is like any other model: torch.export traces it, and the frontend recognises written-out attention,
masks and positions. Inputs for a KV cache are empty, and its outputs are not computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from onnx import GraphProto, NodeProto, helper
from torch import Tensor, nn

from ....errors import IccError, UnsupportedModel
from ....handlers import joined
from ....weights.handles import Weight
from . import attention_ops, elementwise_ops, experts, index_ops, norm_ops, product_ops, reduce_ops, shape_ops
from .container import OnnxContainer, open_tensor, sorted_nodes
from .errors import UNEXPECTED, Refused, one_line
from .inputs import Inputs, choose_output
from .integers import stored_integers
from .known import SMALL, Known, constant
from .names import scope_of, weight_names
from .packed import packed_weights, plain_reads, without_reshapes
from .table import OnnxCall

_PARTS = (shape_ops, index_ops, elementwise_ops, product_ops, reduce_ops, norm_ops, attention_ops)
HANDLERS = joined(*(part.HANDLERS for part in _PARTS))


class _Scope(nn.Module):
    """A module of the model that was exported: it holds its weights, and its nodes are run through its forward."""

    def forward(self, run: Any) -> Any:
        return run()


@dataclass(frozen=True)
class _Place:
    """The owner and name of a constant's parameter, which torch.export replaces while it traces."""

    owner: nn.Module
    name: str
    small: Known | None

    def value(self) -> Any:
        parameter = getattr(self.owner, self.name)
        return parameter if self.small is None else Known(self.small.array, self.small.dtype, parameter)


class OnnxModel(_Scope):
    """The nodes that the chosen output needs, and their weights as parameters on meta."""

    def __init__(self, container: OnnxContainer, hidden: bool = False) -> None:
        super().__init__()
        graph = container.graph
        self._path = container.path
        self._given = Inputs(container.path, graph, set(container.tensors))
        self._output = choose_output(container.path, graph, hidden)
        self._nodes = _needed(sorted_nodes(graph.node), self._output)
        self._handles: dict[str, Weight] = {}
        self._makers: dict[str, OnnxCall] = {}
        self._scopes: dict[str, _Scope] = {"": self}
        self._constants: dict[str, _Place] = {}
        read = {name for node in self._nodes for name in _reads(node)} | {self._output}
        tensors: dict[str, Weight] = {name: t for name, t in container.tensors.items() if name in read}
        tensors |= self._constant_nodes(container)
        self._nodes, integers = stored_integers(without_reshapes(self._nodes, tensors), tensors)
        self._nodes = _needed(self._nodes, self._output)
        derived = packed_weights(self._nodes, tensors) | integers
        names = weight_names(self._nodes, {**tensors, **derived})
        unpacked = {n for node in self._nodes for n in [*plain_reads(node, derived), *_inner_reads(node)]}
        self._packed = tensors.keys() - unpacked  # parts of a packed weight
        for name, weight in {**tensors, **derived}.items():
            if name in derived or name in unpacked:
                self._constants[name] = self._place(names[name], weight)

    @property
    def handles(self) -> dict[str, Weight]:
        """A weight for every parameter, by its qualified name."""
        return self._handles

    def forward(self, input_ids: Tensor, **_: Any) -> Any:
        """The output for token ids [1, T]: logits [1, T, V], hidden states [1, T, H] or scores [1, labels]."""
        return self._computed(self._given.values(input_ids), input_ids)

    def _computed(self, given: Mapping[str, Any], input_ids: Tensor) -> Any:
        env = {name: place.value() for name, place in self._constants.items()}
        env.update(given)
        self._makers.clear()
        self._run(self._nodes, env, input_ids.device)
        self._makers.clear()
        return SimpleNamespace(logits=env[self._output])

    def _run(self, nodes: Sequence[NodeProto], env: dict[str, Any], device: torch.device) -> None:
        for node in nodes:
            if all(output in env for output in node.output if output):
                continue  # its outputs are known: a packed weight, or a constant
            scope = self._scopes.get(scope_of(node), self)
            results = scope(lambda node=node: self._call(node, env, device)) if scope is not self else None
            results = self._call(node, env, device) if results is None else results
            for name, value in zip(node.output, results, strict=False):
                if name:
                    env[name] = value

    def _call(self, node: NodeProto, env: dict[str, Any], device: torch.device) -> list[Any]:
        name = node.op_type if node.domain in ("", "ai.onnx") else f"{node.domain}.{node.op_type}"
        attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        inputs = [env.get(i) if i else None for i in node.input]
        try:
            if name == "If":
                return self._branch(attributes, inputs[0], env, device)
            handler = HANDLERS.get(name) or HANDLERS.get(node.op_type)
            wanted = [i for i in node.input if i and i not in self._packed]
            if handler is None or (missing := [i for i in wanted if i not in env]):
                raise Refused("icc has no translation of the op" if handler is None else f"{missing[0]!r} has no value")
            weights = [i in self._constants for i in node.input]
            call = OnnxCall(node, attributes, inputs, device, weights, self._makers)
            special = any(isinstance(value, experts.VALUES) for value in inputs)
            result = experts.follow(call, HANDLERS) if special else handler(call)
            self._makers.update(dict.fromkeys(filter(None, node.output), call))
        except Refused as error:
            raise self._refusal(node, str(error)) from error
        except IccError:
            raise
        except UNEXPECTED as error:
            raise self._refusal(node, f"an unexpected form ({one_line(error)})") from error
        return list(result) if isinstance(result, (tuple, list)) else [result]

    def _refusal(self, node: NodeProto, reason: str) -> UnsupportedModel:
        return UnsupportedModel(
            f"{node.op_type} (node {node.name or node.output[0]!r} of {self._path.name}) cannot be compiled: {reason}",
            "give the Hugging Face checkpoint that the ONNX model was exported from",
            op=node.op_type,
            module=scope_of(node),
        )

    def _branch(self, attributes: Mapping[str, Any], condition: Any, env: dict[str, Any], device: torch.device) -> Any:
        """The results of the branch of an If whose condition does not depend on the tokens, as in files that run with
        or without a cache."""
        if not isinstance(condition, Known):
            raise Refused("a branch that depends on the tokens")
        branch: GraphProto = attributes["then_branch" if condition.item() else "else_branch"]
        inner = dict(env)
        for proto in branch.initializer:
            inner[proto.name] = self._constant(proto.name, open_tensor(self._path, proto))
        self._run([node for node in branch.node if node.op_type != "Constant" or not self._take(node, inner)],
                  inner, device)  # fmt: skip
        return [inner[output.name] for output in branch.output]

    def _take(self, node: NodeProto, env: dict[str, Any]) -> bool:
        """Put the constant of a node of a branch into `env`."""
        env[node.output[0]] = self._constant(node.output[0], _constant_weight(self._path, node))
        return True

    def _constant(self, name: str, weight: Weight) -> Any:
        value = constant(weight) if _is_small(weight) else None
        if value is None:
            raise Refused(f"a weight {name!r} inside a branch")
        return value

    def _constant_nodes(self, container: OnnxContainer) -> dict[str, Weight]:
        return {n.output[0]: _constant_weight(container.path, n) for n in self._nodes if n.op_type == "Constant"}

    def _place(self, name: str, weight: Weight) -> _Place:
        """Add a parameter on meta for a weight; the value of a small constant is also known."""
        *path, last = name.split(".")
        owner, last = self._scope(path), _free(last)
        dtype = torch.float32 if weight.dtype.is_floating_point else weight.dtype
        parameter = nn.Parameter(torch.empty(weight.shape, dtype=dtype, device="meta"), requires_grad=False)
        owner.register_parameter(last, parameter)
        self._handles[".".join([*map(_free, path), last])] = weight
        return _Place(owner, last, constant(weight) if _is_small(weight) else None)

    def _scope(self, path: Sequence[str]) -> _Scope:
        """The module at a path, created if there is none."""
        found: _Scope = self
        for depth, part in enumerate(map(_free, path)):
            inner = found._modules.get(part)
            if inner is None:
                inner = _Scope()
                found.add_module(part, inner)
                self._scopes[".".join(path[: depth + 1])] = inner
            assert isinstance(inner, _Scope)
            found = inner
        return found


class TypedOnnxModel(OnnxModel):
    """An ONNX model with token types for the two texts of a pair. config: has the number of token types."""

    def __init__(self, container: OnnxContainer, config: Any) -> None:
        super().__init__(container)
        self.config = config

    def forward(self, input_ids: Tensor, token_type_ids: Tensor | None = None, **_: Any) -> Any:
        """As OnnxModel, with a type for each token [1, T]; None: all of type 0."""
        types = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
        return self._computed({**self._given.values(input_ids), **types}, input_ids)


def _free(part: str) -> str:
    """A part of a name, changed if every torch module has an attribute of that name, such as `half` or `type`."""
    return f"{part}_" if hasattr(_Scope, part) or part in ("training", "forward") else part


def _is_small(weight: Weight) -> bool:
    """Whether the values of a constant are read: single numbers, and small integer tensors for sizes and axes."""
    count = 1
    for size in weight.shape:
        count *= size
    return count == 1 if weight.dtype.is_floating_point else count <= SMALL


def _constant_weight(path: Any, node: NodeProto) -> Weight:
    from ....weights.handles import Constant

    attribute = node.attribute[0]
    value = helper.get_attribute_value(attribute)
    if attribute.name == "value":
        return open_tensor(path, value)
    kinds = {"value_float": torch.float32, "value_floats": torch.float32, "value_int": torch.int64}
    if attribute.name not in (*kinds, "value_ints"):
        raise UnsupportedModel(f"Constant (node {node.name!r} of {path.name}) holds {attribute.name}", op="Constant")
    return Constant(torch.tensor(value, dtype=kinds.get(attribute.name, torch.int64)))


def _reads(node: NodeProto) -> list[str]:
    """The names that a node reads, including those of its subgraphs."""
    return [*filter(None, node.input), *_inner_reads(node)]


def _inner_reads(node: NodeProto) -> list[str]:
    found: list[str] = []
    for attribute in node.attribute:
        for graph in [attribute.g] if attribute.HasField("g") else attribute.graphs:
            found += [name for inner in graph.node for name in _reads(inner)] + [o.name for o in graph.output]
    return found


def _needed(nodes: Sequence[NodeProto], output: str) -> list[NodeProto]:
    """The nodes that an output depends on, in order."""
    wanted, kept = {output}, []
    for node in reversed(nodes):
        if wanted.intersection(node.output):
            kept.append(node)
            wanted.update(_reads(node))
    return kept[::-1]
