"""Identifies the inputs and outputs of an ONNX model by their names and shapes: tokens, masks, positions, and a KV
cache."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from onnx import GraphProto, TensorProto, ValueInfoProto
from torch import Tensor

from ....errors import UnsupportedModel
from .known import Known

_FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)
_INTEGERS = (TensorProto.INT64, TensorProto.INT32)
_TOKENS = ("input_ids", "tokens", "token_ids", "input", "input_tokens")
_CACHE = re.compile(r"past|cache(?!_position)|state|\bkv\b", re.IGNORECASE)
_LENGTH = re.compile(r"past|seq|len|total", re.IGNORECASE)
_POSITIONS = ("position_ids", "positions", "cache_position", "input_pos")


class AllRows:
    """The value of an input that selects the rows with logits: all rows."""


class Inputs:
    """The value of each input while the model is traced; UnsupportedModel for an input that icc has no value for."""

    def __init__(self, path: Path, graph: GraphProto, initializers: set[str]) -> None:
        self._inputs = [i for i in graph.input if i.name not in initializers]
        self._path = path
        names = [i.name for i in self._inputs]
        candidates = [i for i in self._inputs if _kind(i) in _INTEGERS and len(_dims(i)) in (1, 2)]
        found = next((n for n in _TOKENS if n in [i.name for i in candidates]), None)
        if found is None and len(candidates) == 1:
            found = candidates[0].name
        if found is None:
            raise UnsupportedModel(
                f"{path} takes {', '.join(names[:4]) or 'nothing'}, and no input_ids",
                "icc compiles language models that take token ids",
            )
        self._tokens = found
        self.cached = [i.name for i in self._inputs if self._is_cache(i)]
        for info in self._inputs:
            self._value(info, torch.zeros(1, 2, dtype=torch.int64, device="meta"))  # raises before anything is traced

    def values(self, ids: Tensor) -> dict[str, Any]:
        """Every input for token ids [1, T]: no padding, positions from 0, an empty cache."""
        return {info.name: self._value(info, ids) for info in self._inputs}

    def _is_cache(self, info: ValueInfoProto) -> bool:
        return _kind(info) in _FLOATS and len(_dims(info)) >= 3 and bool(_CACHE.search(info.name))

    def _value(self, info: ValueInfoProto, ids: Tensor) -> Any:
        name, dims, device = info.name, _dims(info), ids.device
        tokens = ids.shape[1]
        if name == self._tokens:
            return ids if len(dims) == 2 else ids.reshape(-1)
        if self._is_cache(info):
            return torch.zeros(_empty_cache(self._path, name, dims), device=device)
        if _kind(info) == TensorProto.BOOL and len(dims) <= 1 and "cache" in name:
            return Known.of([False] if dims else False, torch.bool)
        if name in _POSITIONS and len(dims) in (1, 2):
            places = torch.arange(tokens, device=device)
            return places if len(dims) == 1 else places[None]
        if "mask" in name and len(dims) == 2:
            return torch.ones(1, tokens, dtype=torch.int64, device=device)
        if name == "token_type_ids" and len(dims) == 2:
            return torch.zeros(1, tokens, dtype=torch.int64, device=device)
        if name == "logit_rows" and len(dims) == 1:
            return AllRows()
        if name == "num_logits_to_keep" and len(dims) <= 1:
            return Known.of([0] if dims else 0)
        raise UnsupportedModel(
            f"{self._path} has the input {name!r} {dims}, which icc has no value for",
            "icc gives token ids, positions, a mask without padding and an empty KV cache",
        )


def _kind(info: ValueInfoProto) -> int:
    return info.type.tensor_type.elem_type


def _dims(info: ValueInfoProto) -> list[int | str]:
    """The sizes of the axes; names for dynamic axes."""
    return [d.dim_value if d.HasField("dim_value") else d.dim_param or "?" for d in info.type.tensor_type.shape.dim]


def _empty_cache(path: Path, name: str, dims: list[int | str]) -> list[int]:
    """The shape with one sequence and no tokens: the first dynamic axis is the batch, the other the tokens.
    UnsupportedModel if that is not clear."""
    free = [i for i, size in enumerate(dims) if isinstance(size, str)]
    batch = [i for i in free if "batch" in str(dims[i]) or i == 0][:1]
    past = [i for i in free if i not in batch]
    if len(past) > 1:  # newer files of onnxruntime's builder have a dynamic head size, too
        past = [i for i in past if _LENGTH.search(str(dims[i]))]
    if len(past) != 1:
        raise UnsupportedModel(f"{path} has the input {name!r} {dims}: icc cannot tell which size counts the tokens")
    return [0 if i in past else 1 if isinstance(size, str) else size for i, size in enumerate(dims)]


def choose_output(path: Path, graph: GraphProto, hidden: bool) -> str:
    """The name of the output with the logits, or, if `hidden`, with the hidden states. UnsupportedModel if there is
    none."""
    integers = [o.name for o in graph.output if _kind(o) in _INTEGERS]
    names = [o.name for o in graph.output if o.name not in integers] or integers
    wanted = ("last_hidden_state", "hidden_states", "token_embeddings") if hidden else ("logits", "output", "lm_logits")
    for name in wanted:
        if name in names and name not in integers:
            return name
    own = [o.name for o in graph.output if not _CACHE.search(o.name) and "present" not in o.name]
    if len(own) == 1 and own != integers and ("logits" if hidden else "hidden") not in own[0]:
        return own[0]
    raise UnsupportedModel(
        f"{path} gives {', '.join(names[:4])}, and no {'hidden states' if hidden else 'logits'}",
        "" if hidden else "icc compiles causal language models with their LM head; for embeddings: --task embed",
    )


def labels_of(path: Path, graph: GraphProto) -> int | str:
    """The number of labels of a text's score, or the name of that axis if it is dynamic. UnsupportedModel for a file
    that scores tokens."""
    name = choose_output(path, graph, hidden=False)
    dims = next(_dims(o) for o in graph.output if o.name == name)
    if len(dims) == 2:
        return dims[1]
    raise UnsupportedModel(
        f"{path} gives {name} {dims}, and no score of a text", "icc compiles it without --task rerank"
    )
