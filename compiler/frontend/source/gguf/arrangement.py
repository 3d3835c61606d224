"""Undoes the changes that llama.cpp's conversion makes to tensors: by transformers' processors, and by rules that they
lack."""

from __future__ import annotations

from collections.abc import Callable, Collection
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ....errors import UnsupportedModel
from ....weights.handles import Derived, GivenRows, QuantizedWeight, SortedColumns, Transposed, Weight, derive
from .architectures import Architecture

# tensors of layers with states
_STATES = (
    "ssm_a", "ssm_dt.bias", "ssm_conv1d.weight", "ssm_conv1d.bias", "ssm_norm.weight", "ssm_alpha.weight",
    "ssm_beta.weight", "ssm_out.weight", "ssm_d", "attn_gate.weight", "attn_qkv.weight",
)  # fmt: skip
Values = Callable[[np.ndarray], np.ndarray]
_SAME = np.zeros(0, np.int64)  # stands for an unchanged order of rows


class Arrangement:
    """The arrangement of tensors in files of an architecture, for a configuration: the order of their rows, their axes
    and their values. tensors: the names of a file's tensors."""

    def __init__(self, arch: str, own: Architecture, tensors: Collection[str], config: Any) -> None:
        from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

        self.config, self.turned = config, own.turned_experts
        self.rows, self.between, self.tensors = own.rows, own.between, tensors
        facts = {"n_head": getattr(config, "num_attention_heads", None), **config.to_dict()}
        self.processor: Any = TENSOR_PROCESSORS.get(own.like or arch, TensorProcessor)(config=facts)
        self._plain = type(self.processor).process is TensorProcessor.process

    def undone(self, weight: Weight, name: str) -> Weight:
        """A weight in transformers' arrangement. name: the tensor's name in the file. UnsupportedModel for a quantized
        tensor whose values would change."""
        if name.endswith(".ssm_a"):
            weight = derive(lambda values: torch.log(-values.to(torch.float32)), weight)
        part = name.removeprefix("blk.").partition(".")[2]
        order = self.rows(self.config, part) if self.rows is not None else None
        if order is not None:
            return _ordered(weight, order, columns=part == "ssm_out.weight")
        if self._keeps(name):
            return weight
        if isinstance(weight, QuantizedWeight):
            return _blocks(weight, name, lambda values: self._values(values, name))
        probe = np.broadcast_to(np.float32(-1), weight.shape)
        shown = self._values(probe, name)
        if shown is probe:
            return weight

        def load(values: Tensor) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(self._values(values.to(torch.float32).numpy(), name)))

        return Derived(load, (weight,), shown.shape, torch.float32)

    def stacked(self, first: Weight, second: Weight) -> Weight:
        """One weight [N + M, K] of two matrices [N, K] and [M, K], its rows in transformers' order."""
        order = self.between(self.config) if self.between is not None else None
        if isinstance(first, QuantizedWeight) and isinstance(second, QuantizedWeight):
            if first.format.merges_with(second.format):
                return GivenRows((first, second), order)
        dtype = first.dtype if first.dtype == second.dtype else torch.float32

        def joined(*values: Tensor) -> Tensor:
            found = torch.cat([value.to(dtype) for value in values])
            return found if order is None else found[order.to(found.device)]

        return derive(joined, first, second)

    def order(self, name: str, rows: int, columns: int) -> tuple[np.ndarray, bool] | None:
        """See `_row_order`, for the file's matrix of that name [rows, columns]. None as there."""
        part = name.removeprefix("blk.").partition(".")[2]
        if self.rows is not None and (found := self.rows(self.config, part)) is not None:
            return (
                None if part == "ssm_out.weight" else (found.numpy(), False)
            )  # its columns are reordered, not its rows
        if self._keeps(name):
            return _SAME, False
        return _row_order(lambda values: self._values(values, name), rows, columns)

    def _keeps(self, name: str) -> bool:
        """Whether the conversion leaves a tensor unchanged, or its changes are undone elsewhere."""
        layer, _, part = name.removeprefix("blk.").partition(".")
        of_states = part in _STATES and f"blk.{layer}.ssm_a" in self.tensors
        return self._plain or of_states or name.endswith(("_exps.weight", "_exps.bias"))

    def _values(self, values: np.ndarray, name: str) -> np.ndarray:
        taken: dict[str, Any] = {"tensors": {}}
        result = self.processor.process(
            weights=values, name=name, tensor_key_mapping=None, parsed_parameters=taken
        ).weights
        found = next((v.numpy() for v in taken["tensors"].values()), result)
        return (
            values if found.shape == (1, *values.shape) and values.ndim > 1 else found
        )  # the processor took it for a vector

    def latent(self, found: dict[str, Weight]) -> dict[str, Weight]:
        """The joined key and value matrices of latent attention, by parameter name. Their halves are removed from
        `found`.

        A file has keys [heads, rank, dim] and values [heads, dim, rank]; transformers has one matrix [heads * dims,
        rank]. The result is float16 if a half is quantized, because the groups of the keys do not lie along its rows.
        """
        joined: dict[str, Weight] = {}
        for name in [name for name in found if name.endswith("kv_b_proj.weight.k")]:
            keys, values = found.pop(name), found.pop(f"{name[:-1]}v", None)
            if values is None:
                continue  # then the parameter is reported as missing
            quantized = isinstance(keys, QuantizedWeight) or isinstance(values, QuantizedWeight)
            dtype = torch.float16 if quantized else keys.dtype if keys.dtype == values.dtype else torch.float32
            joined[name[:-2]] = derive(
                lambda k, v, dtype=dtype: torch.cat([k.mT, v], 1).flatten(0, 1).to(dtype), keys, values
            )
        return joined

    def experts(self, pieces: list[Weight]) -> Weight:
        """Gate and up of experts [E, I, H] as one weight [E, 2 I, H]; their biases [E, I] as [E, 2 I]. For transposed
        experts: [E, H, 2 I], with gate and up interleaved element by element."""
        gate, up = pieces
        count = gate.shape[-1] if len(gate.shape) == 2 else gate.shape[-2]
        order = torch.arange(2 * count).view(2, count).T.reshape(-1) if self.turned else None
        if isinstance(gate, QuantizedWeight) and isinstance(up, QuantizedWeight) and gate.format.merges_with(up.format):
            joined = GivenRows((gate, up), order)
            return Transposed(joined) if self.turned else joined
        dtype = gate.dtype if gate.dtype == up.dtype else torch.float32
        axis = 1

        def both(*values: Tensor) -> Tensor:
            found = torch.cat([value.to(dtype) for value in values], axis)
            found = found if order is None else found.index_select(axis, order.to(found.device))
            return found.mT if self.turned and found.dim() == 3 else found

        return derive(both, gate, up)

    def down(self, weight: Weight) -> Weight:
        """The last matrices of experts [E, H, I], transposed to [E, I, H] for models with transposed experts."""
        if not self.turned or len(weight.shape) != 3:
            return weight
        return Transposed(weight) if isinstance(weight, QuantizedWeight) else derive(lambda values: values.mT, weight)


def _ordered(weight: Weight, order: Tensor, columns: bool) -> Weight:
    """A tensor with its rows, or its columns, in another order [n]; quantized groups are kept."""
    if isinstance(weight, QuantizedWeight):
        return SortedColumns(weight, order.argsort()) if columns else GivenRows((weight,), order)
    if columns:
        return derive(lambda values: values[:, order.to(values.device)], weight)
    return derive(lambda v: v.reshape(len(order), -1)[order.to(v.device)].reshape(v.shape), weight)


def shaped(weight: Weight, shape: tuple[int, ...]) -> Weight:
    """The weight reshaped to the model's shape if the two differ only in axes of size 1 or a flattening; else
    unchanged."""
    if isinstance(weight, (QuantizedWeight, Transposed)) or tuple(weight.shape) == tuple(shape):
        return weight
    turned = sorted(size for size in weight.shape if size > 1) == sorted(size for size in shape if size > 1)
    if prod(weight.shape) != prod(shape) or (turned and _squeezed(weight.shape) != _squeezed(shape)):
        return weight
    return derive(lambda values: values.reshape(shape), weight)


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size for size in shape if size > 1)


def _row_order(arrange: Values, rows: int, columns: int) -> tuple[np.ndarray, bool] | None:
    """The old row number of each row after `arrange` is applied to a matrix [rows, columns]: int64 [rows], or [] if the
    order is unchanged; and whether it transposes the matrix. None if it does anything else."""
    numbers = np.arange(rows, dtype=np.int32)[:, None]
    try:
        shown = arrange(numbers)
    except ValueError:  # it needs all columns
        shown = arrange(np.ascontiguousarray(np.broadcast_to(numbers, (rows, columns))))
    if shown.shape[0] != rows:
        return (_SAME, True) if np.array_equal(shown[0], numbers[:, 0]) else None
    first = shown[:, 0]
    if not np.array_equal(np.sort(first), numbers[:, 0]):
        return None
    return _SAME if np.array_equal(first, numbers[:, 0]) else first.astype(np.int64), False


def _blocks(weight: QuantizedWeight, name: str, arrange: Values) -> Weight:
    """Undo a reordering of rows or a transposition of a quantized matrix: blocks lie along rows and are kept.
    UnsupportedModel for other changes."""
    found = _row_order(arrange, *weight.shape) if len(weight.shape) == 2 else None
    if found is None:
        raise UnsupportedModel(
            f"tensor {name!r} comes quantized, and its values are not those of the model's parameter"
        )
    order, is_turned = found
    if is_turned:
        return Transposed(weight)
    return GivenRows((weight,), torch.from_numpy(order)) if len(order) else weight
