"""Reads graph text back: `print_graph(parse_graph(text)) == text` for any text that the printer wrote.

The text gives a weight's name, storage and shape; its values come from a seed and its name. A value's type is inferred
and must agree with the text. Empty lines and lines that begin with # do not count.
"""

from __future__ import annotations

import operator
import re
import zlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from ...runtime.format.batch import BatchArray
from ..constant_argument import ConstantArgument
from ..errors import GraphTextError, UsageError
from ..ops import OPS, traits_of
from ..ops.base import OpTarget
from ..weights.formats.dense import DTYPES
from ..weights.formats.registry import find_format
from ..weights.handles import Constant, RoundedWeight, Weight
from .graph import LOGITS, Graph, ModelInfo
from .tensor_types import DRAFT_ROWS, FIXED_INPUTS, LOGIT_ROWS, TOKENS, TensorType, infer_type

_ROWS = {"T": TOKENS, "L": LOGIT_ROWS, "D": DRAFT_ROWS}
_TYPE = r"(\w+)\[([^\]]*)\]"
_CALL = re.compile(r"%(\w+): (.+?) = ([\w.]+)\((.*)\)(?:  # (.*))?")
_INPUT = re.compile(rf"%(\w+): ({_TYPE})(?: < (\d+))?(?: = ([-+.\w]+))?")
_OUTPUT = re.compile(r"(?:([\w.]+)=)?%(\w+)")
_TOKEN = re.compile(
    r'\s*(?:(?P<string>"[^"]*")|@(?P<weight>[^\s:]+): (?P<stored>[\w+]+)\[(?P<shape>[^\]]*)\]|%(?P<value>\w+)'
    r"|(?P<dtype>torch\.\w+)|(?P<word>None|True|False)|(?P<constant>[A-Z]\w*)\{|(?P<key>[a-z_]\w*)=|(?P<mark>[\[\],}])"
    r"|(?P<number>[^\s,\]}]+))"
)


def parse_graph(text: str, seed: int = 0) -> Graph:
    """The graph that `text` describes; GraphTextError names the line that cannot be read or is not true."""
    return _Parser(seed).graph(text)


def seeded_values(name: str, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Values of `shape` that depend on the name and the seed: floats are normal, integers 0 or 1, so that they can
    index anything."""
    generator = torch.Generator().manual_seed((zlib.crc32(name.encode()) + seed) % 2**63)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(0, 2, shape, generator=generator).to(dtype)


class _Parser:
    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._graph = Graph(fx.Graph(), {}, ModelInfo("graph text", 0, 0, 0, 0, None, torch.float32))
        self._values: dict[str, fx.Node] = {}
        self._weights: dict[str, fx.Node] = {}

    def graph(self, text: str) -> Graph:
        lines = [(n, line) for n, line in enumerate(text.splitlines(), 1) if line.strip() and line.lstrip()[0] != "#"]
        for position, (number, line) in enumerate(lines):
            try:
                self._line(line.strip(), position == 0, position == len(lines) - 1)
            except Exception as error:  # an op that is run on types may raise any error
                raise GraphTextError(number, line.strip(), str(error).splitlines()[0]) from error
        if not lines:
            raise GraphTextError(1, "", "there is no graph")
        self._graph.info = self._info()
        return self._graph

    def _line(self, line: str, first: bool, last: bool) -> None:
        if first:
            return self._header(line)
        if last:
            return self._return(line)
        found = _CALL.fullmatch(line)
        if found is None:
            raise ValueError("this is not `%name: type = op(arguments)`")
        name, shown, target, arguments, module = found.groups()
        args, kwargs = self._arguments(arguments)
        node = self._graph.fx.call_function(find_target(target), tuple(args), kwargs)
        node.meta["type"] = infer_type(node)
        if module:
            node.meta["module"] = module
        kind = node.meta["type"]
        inferred = f"({', '.join(map(str, kind))})" if isinstance(kind, tuple) else str(kind)
        if inferred != shown:
            raise ValueError(f"the type is {inferred}")
        self._values[name] = node
        return None

    def _header(self, line: str) -> None:
        if not (line.startswith("graph(") and line.endswith("):")):
            raise ValueError("a graph begins with `graph(%token_ids: i64[T]):`")
        inputs = line[len("graph(") : -len("):")]
        for found in _INPUT.finditer(inputs):
            name, shown, dtype, shape, bound, fill = found.groups()
            if name in FIXED_INPUTS:
                node = self._graph.fx.placeholder(name)
                node.meta["type"] = _tensor_type(shown)
            else:
                rows, _, sizes = shape.partition(",")
                node = self._graph.declare(BatchArray(name, (rows, *_sizes(sizes)), dtype, fill=_number(fill or "0")))
            self._values[name] = node
            self._graph.max_seq_len = int(bound) if bound else self._graph.max_seq_len
        if not self._values:
            raise ValueError("a graph has inputs")

    def _return(self, line: str) -> None:
        if not line.startswith("return "):
            raise ValueError("a graph ends with `return %name`")
        outputs: dict[str, fx.Node] = {}
        for part in line.removeprefix("return ").split(", "):
            found = _OUTPUT.fullmatch(part)
            if found is None:
                raise ValueError(f"{part!r} is not an output")
            name, value = found.groups()
            outputs[name or LOGITS] = self._value(value)
        self._graph.returns(**outputs)

    def _value(self, name: str) -> fx.Node:
        if name not in self._values:
            raise ValueError(f"%{name} is not defined before it is used")
        return self._values[name]

    def _arguments(self, text: str) -> tuple[list[Any], dict[str, Any]]:
        tokens = _tokens(text)
        args, kwargs = list[Any](), dict[str, Any]()
        for token in tokens:
            if token.lastgroup == "key":
                kwargs[token["key"]] = self._argument(next(tokens), tokens)
            elif token["mark"] != ",":
                args.append(self._argument(token, tokens))
        return args, kwargs

    def _argument(self, token: re.Match[str], tokens: Iterator[re.Match[str]]) -> Any:
        if token["mark"] == "[":
            items: list[Any] = []
            for inner in tokens:
                if inner["mark"] == "]":
                    return items
                if inner["mark"] != ",":
                    items.append(self._argument(inner, tokens))
            raise ValueError("a list does not end")
        if token["constant"] is not None:
            return self._constant(token["constant"], tokens)
        if token["value"] is not None:
            return self._value(token["value"])
        if token["weight"] is not None:
            return self._weight(token["weight"], token["stored"], _sizes(token["shape"]))
        if token["string"] is not None:
            return token["string"][1:-1]
        if token["dtype"] is not None:
            return getattr(torch, token["dtype"].removeprefix("torch."))
        if token["word"] is not None:
            return {"None": None, "True": True, "False": False}[token["word"]]
        return _number(token["number"])

    def _constant(self, name: str, tokens: Iterator[re.Match[str]]) -> ConstantArgument:
        """The value after `Name{`, up to its closing brace."""
        if name not in ConstantArgument.KNOWN:
            raise ValueError(f"there is no {name}")
        fields: dict[str, Any] = {}
        for token in tokens:
            if token["mark"] == "}":
                return ConstantArgument.KNOWN[name](**fields)
            if token["key"] is not None:
                fields[token["key"]] = self._argument(next(tokens), tokens)
        raise ValueError(f"{name} does not end")

    def _weight(self, name: str, stored: str, shape: tuple[int, ...]) -> fx.Node:
        if name not in self._weights:
            weight = stored_weight(name, stored, shape, self._seed)
            self._graph.weights[name] = weight
            self._weights[name] = self._graph.add_weight(name, weight)
        return self._weights[name]

    def _info(self) -> ModelInfo:
        graph = self._graph
        parameters = sum(torch.Size(w.shape).numel() for w in graph.weights.values())
        layers = sum(traits_of(n.target).stateful for n in graph.nodes)
        width = graph.output.meta["type"].shape[-1]
        return ModelInfo("graph text", width, width, layers, parameters, None, torch.float32)


def stored_weight(name: str, stored: str, shape: tuple[int, ...], seed: int) -> Weight:
    """A weight of seeded values, stored as the printer shows it: an element type, or a storage format by its name.
    ValueError if `stored` is neither."""
    if stored in DTYPES:
        return Constant(seeded_values(name, shape, DTYPES[stored], seed))
    try:
        return RoundedWeight(Constant(seeded_values(name, shape, torch.float32, seed)), find_format(stored))
    except UsageError:
        raise ValueError(f"{stored!r} is not a way to store a weight") from None


def find_target(name: str) -> Any:
    """The op that the printer shows as `name`: getitem, icc.rms_norm, aten.mul.Tensor. ValueError if there is no such
    op."""
    if name == "getitem":
        return operator.getitem
    OPS.extend()  # torch knows another package's ops once they are imported
    own = OPS.get(name.removeprefix("icc."))
    if own is not None and isinstance(own.overload, OpTarget):
        return own.overload
    namespace, _, rest = name.partition(".")
    packet, _, overload = rest.partition(".")
    try:
        return getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")
    except AttributeError:
        raise ValueError(f"there is no op {name}") from None


def _tokens(text: str) -> Iterator[re.Match[str]]:
    at = 0
    while at < len(text.rstrip()):
        found = _TOKEN.match(text, at)
        if found is None:
            raise ValueError(f"{text[at:]!r} cannot be read")
        yield found
        at = found.end()


def _number(text: str) -> int | float:
    return int(text) if text.lstrip("-").isdigit() else float(text)


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(int(s) for s in text.split(",") if s.strip())


def _tensor_type(text: str) -> TensorType:
    found = re.fullmatch(_TYPE, text)
    if found is None or found[1] not in DTYPES:
        raise ValueError(f"{text!r} is not a type")
    first, *rest = [s.strip() for s in found[2].split(",")] if found[2] else [""]
    rows = _ROWS.get(first)
    shape = _sizes(",".join(rest if rows else [first, *rest]))
    return TensorType(rows, shape, DTYPES[found[1]])
