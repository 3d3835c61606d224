"""The IR: a torch.fx graph over token-major tensors, with types on its nodes and weights as lazy handles.

Every value that depends on tokens has the token axis (or the logit row axis) first; `TensorType.shape` leaves it
out. There are no symbolic sizes: where an argument must name the token axis, as in aten.view, it is -1.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from ...runtime.format.batch import BatchArray, declaration_problem
from ..ops import AttentionSpec, named_arguments, traits_of
from ..weights.formats.dense import short_dtype
from ..weights.handles import Weight
from ..weights.pool import PoolSite
from .tensor_types import FIXED_INPUTS, infer_type, input_type, weight_type

LOGITS, HIDDEN = "logits", "hidden"  # names of outputs
TAP, DRAFT_LAYER = "tap", "draft_layer"  # names of sections, as the runtime has them (format/speculation.py)


@dataclass(frozen=True)
class ModelInfo:
    """Facts of the model that the graph does not show. `architecture` is for display only. padding: the token that pads
    batches of a fixed shape; icc's sequences are not padded."""

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_parameters: int
    max_position_embeddings: int | None
    dtype: torch.dtype
    padding: int | None = None

    @property
    def weight_dtype(self) -> str:
        """The element type of the checkpoint's weights in kernels: f32, bf16 or f16."""
        found = short_dtype(self.dtype)
        return found if found in ("bf16", "f16") else "f32"


@dataclass
class Graph:
    """The fx graph, its weights by name, and the facts that passes have established."""

    fx: fx.Graph
    weights: dict[str, Weight]
    info: ModelInfo
    facts: set[str] = field(default_factory=set)
    max_seq_len: int = 0
    picked: str = ""  # the token whose row a scoring graph returns: "first" or "last"
    declared: tuple[BatchArray, ...] = ()  # its inputs besides FIXED_INPUTS, see `declare`
    sites: tuple[PoolSite, ...] = ()  # where adapters add their terms
    ranks: int = 1  # how many processes run the graph together, see weights/shards.py
    stages: int = 1  # how many pipeline stages the ranks form; rank `stage * parts + part`
    gguf: str = ""  # llama.cpp's name of the architecture, if known and the graph has sites

    @property
    def parts(self) -> int:
        """The number of ranks that divide weights among them: those of one stage."""
        return self.ranks // self.stages

    @property
    def nodes(self) -> Iterable[fx.Node]:
        """Nodes in execution order."""
        return self.fx.nodes

    def copy(self) -> Graph:
        """A separate graph with nodes of the same names, over the same weights, which are never modified."""
        fresh = fx.Graph()
        fresh.output(fresh.graph_copy(self.fx, {}))
        return replace(self, fx=fresh, weights=dict(self.weights), facts=set(self.facts))

    def input(self, name: str) -> fx.Node | None:
        """The placeholder of that name: one of FIXED_INPUTS, or one that is declared. None if the graph has none."""
        return next((n for n in self.fx.nodes if n.op == "placeholder" and n.target == name), None)

    def fixed_input(self, name: str) -> fx.Node:
        """The placeholder of one of FIXED_INPUTS; it is made if the graph has none."""
        found = self.input(name)
        if found is None:
            with self.fx.inserting_after(next(n for n in reversed(self.fx.nodes) if n.op == "placeholder")):
                found = self.fx.placeholder(name)
            found.meta["type"] = FIXED_INPUTS[name]
        return found

    def declare(self, array: BatchArray) -> fx.Node:
        """A new input: its placeholder, typed by the array. One row per token, which requests may give, or, with shape
        ("D", ..), one per row for which a section runs. ValueError for an input that a program cannot declare."""
        if problem := declaration_problem((*self.declared, array)):
            raise ValueError(problem)
        self.declared = (*self.declared, array)
        first = next((n for n in self.fx.nodes if n.op != "placeholder"), None)
        with self.fx.inserting_before(first) if first is not None else nullcontext():
            node = self.fx.placeholder(array.name)
        node.meta["type"] = input_type(array)
        return node

    @property
    def outputs(self) -> dict[str, fx.Node]:
        """The results by name: LOGITS or HIDDEN first, then the outputs of sections, see `sections`."""
        return dict(self.end.args[0])  # type: ignore[arg-type]

    @property
    def end(self) -> fx.Node:
        """The fx node that holds the outputs."""
        return next(n for n in reversed(self.fx.nodes) if n.op == "output")

    def returns(self, **named: fx.Node) -> None:
        """Add outputs by name, or replace those of the same name."""
        if any(n.op == "output" for n in self.fx.nodes):
            self.end.args = ({**self.outputs, **named},)
        else:
            self.fx.output(named)

    def rename_output(self, old: str, new: str) -> None:
        """Give an output another name."""
        self.end.args = ({new if name == old else name: node for name, node in self.outputs.items()},)

    @property
    def embeds(self) -> bool:
        """Whether the output is hidden states, not logits."""
        return HIDDEN in self.outputs

    @property
    def attention_nodes(self) -> list[fx.Node]:
        """The calls of attention, in order."""
        return [n for n in self.nodes if n.op == "call_function" and traits_of(n.target).attention]

    @property
    def looks_ahead(self) -> bool:
        """Whether some attention sees later tokens, so that a sequence must run in one step."""
        return any(attention_spec(n).within_step for n in self.attention_nodes)

    @property
    def output(self) -> fx.Node:
        """The node whose value is the logits, or the hidden states of a graph that embeds."""
        found = self.outputs
        return found[HIDDEN] if HIDDEN in found else found[LOGITS]

    @property
    def sections(self) -> dict[str, dict[str, fx.Node]]:
        """The sections, which run only on request: the outputs of each section, by their names in it.

        An output "a.b" is the output b of section a. A section that gives LOGITS runs as a step of its own, with its
        own batch; any other runs after a step, for some of the step's logit rows (TAP: its tokens), which are the rows
        of the section's outputs.
        """
        found: dict[str, dict[str, fx.Node]] = {}
        for name, node in self.outputs.items():
            if name not in (LOGITS, HIDDEN):
                section, _, own = name.partition(".")
                found.setdefault(section, {})[own] = node
        return found

    def section_nodes(self, *sections: str) -> set[fx.Node]:
        """The nodes that these sections need and a step does not; of all sections if none is named."""
        wanted = [node for name, outputs in self.sections.items() if name in (sections or self.sections)
                  for node in outputs.values()]  # fmt: skip
        return ancestors(*wanted) - ancestors(self.output)

    def weight(self, node: fx.Node) -> Weight:
        """The handle behind a get_attr node."""
        return self.weights[str(node.target)]

    def add_weight(self, name: str, weight: Weight) -> fx.Node:
        """A new get_attr node at the insertion point; the name is made unique."""
        base, count = name, 1
        while name in self.weights and self.weights[name] is not weight:
            count += 1
            name = f"{base}#{count}"
        self.weights[name] = weight
        node = self.fx.create_node("get_attr", name, name=name.replace(".", "_").replace("#", "_"))
        node.meta["type"] = weight_type(weight)
        return node

    def call(self, target: Any, *args: Any, origin: fx.Node | None = None) -> fx.Node:
        """A new typed call at the insertion point; it gets the module path of `origin`; None: it has none."""
        node = self.fx.call_function(target, args)
        node.meta["type"] = infer_type(node)
        if origin is not None and "module" in origin.meta:
            node.meta["module"] = origin.meta["module"]
        return node

    def replace(self, old: fx.Node, new: fx.Node) -> None:
        """Let the users of `old` use `new`; the next `sweep` removes dead nodes."""
        old.replace_all_uses_with(new)

    def sweep(self) -> int:
        """Remove nodes without users and weights without nodes; returns how many nodes were removed."""
        removed = 0
        for node in reversed(list(self.fx.nodes)):
            if node.op in ("call_function", "get_attr") and not node.users:
                self.fx.erase_node(node)
                removed += 1
        used = {str(n.target) for n in self.fx.nodes if n.op == "get_attr"}
        self.weights = {k: w for k, w in self.weights.items() if k in used}
        return removed


def attention_spec(node: fx.Node) -> AttentionSpec:
    """The spec of a call of attention."""
    return named_arguments(node)["spec"]


def set_attention_spec(node: fx.Node, spec: AttentionSpec) -> None:
    """Give a call of attention another spec."""
    node.update_arg(node.args.index(attention_spec(node)), spec)  # type: ignore[arg-type]


def layer_of(node: fx.Node) -> int:
    """The number of the layer whose cache or state a call owns."""
    found = named_arguments(node)
    return found["spec"].layer if "spec" in found else found["layer"]


def set_layer(node: fx.Node, layer: int) -> None:
    """Give a call that owns a cache or a state another layer number."""
    names = list(named_arguments(node))
    if "spec" in names:
        set_attention_spec(node, replace(attention_spec(node), layer=layer))
    else:
        node.update_arg(names.index("layer"), layer)


def ancestors(*nodes: fx.Node) -> set[fx.Node]:
    """The nodes and all that they depend on."""
    found, pending = set(nodes), list(nodes)
    while pending:
        fresh = [n for n in pending.pop().all_input_nodes if n not in found]
        found.update(fresh)
        pending += fresh
    return found
