"""Layers after the pooling of hidden states, which the runtime computes for one vector."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from io import BytesIO
from math import erf
from typing import TYPE_CHECKING, TypeAlias

from ..errors import EngineFormatError
from ..format.manifest import EmbeddingFacts, TailLayer

if TYPE_CHECKING:
    import numpy as np
else:
    from ..late import np

Tail: TypeAlias = "Sequence[Callable[[np.ndarray], np.ndarray]]"  # layers, each float32 [K] -> [N]

_SMALLEST = 1e-12  # a vector shorter than this is not scaled to length 1, as in sentence-transformers
_EPS = 1e-5  # epsilon of torch's LayerNorm


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 0.5 * (1 + np.tanh(0.5 * x))


ACTIVATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "identity": lambda x: x,
    "tanh": lambda x: np.tanh(x),  # naming np.tanh here would import numpy at once
    "relu": lambda x: np.maximum(x, 0),
    "gelu": lambda x: x * np.array([0.5 * (1 + erf(v * 0.5**0.5)) for v in x.tolist()], dtype=np.float32),
    "sigmoid": _sigmoid,
    "silu": lambda x: x * _sigmoid(x),
}


def read_tail(facts: EmbeddingFacts, read: Callable[[str], bytes]) -> Tail:
    """Read the layers and their arrays from the engine's files. EngineFormatError if shapes do not fit together."""
    width = facts.row_width * (1 + len(facts.also))
    layers = []
    for layer in facts.tail:
        if layer.activation not in ACTIVATIONS:
            raise EngineFormatError(f"the engine has the activation function {layer.activation!r} behind its pooling")
        weight, bias, residual = (_array(name, read) for name in (layer.weight, layer.bias, layer.residual))
        expected = (len(weight), width) if layer.kind == "dense" and weight is not None else (width,)
        for name, array in ((layer.weight, weight), (layer.residual, residual)):
            if array is not None and array.shape != expected:
                raise EngineFormatError(f"{name} has the shape {array.shape}, not {expected}")
        width = expected[0]
        if bias is not None and bias.shape != (width,):
            raise EngineFormatError(f"{layer.bias} has the shape {bias.shape}, not {(width,)}")
        layers.append(partial(_layer, layer, weight, bias, residual))
    if layers and width != facts.dimension:
        raise EngineFormatError(f"the engine's vectors have {width} numbers, not {facts.dimension}")
    return layers


def _array(name: str, read: Callable[[str], bytes]) -> np.ndarray | None:
    if not name:
        return None
    try:
        return np.load(BytesIO(read(name)), allow_pickle=False).astype(np.float32, copy=False)
    except (ValueError, EOFError, KeyError) as error:
        raise EngineFormatError(f"{name} is not an array: {error}") from error


def _layer(
    layer: TailLayer, weight: np.ndarray | None, bias: np.ndarray | None, residual: np.ndarray | None, x: np.ndarray
) -> np.ndarray:
    if layer.kind == "normalize" or weight is None:
        return scaled(x)
    if layer.kind == "layer_norm":
        away = x - x.mean()
        found = away / np.sqrt((away * away).mean() + np.float32(_EPS)) * weight
        return found if bias is None else found + bias
    found = weight @ x
    found = ACTIVATIONS[layer.activation](found if bias is None else found + bias)
    if layer.adds_input:
        found = found + (x if residual is None else residual @ x)
    return found


def scaled(vector: np.ndarray) -> np.ndarray:
    """A vector scaled to length 1."""
    return vector / np.maximum(np.linalg.norm(vector), np.float32(_SMALLEST))
