"""Maps checkpoint tensors to the model's parameters by transformers' own renamings and conversions, lazily.

transformers 5 keeps, per model type, an ordered list of renamings and converters (merged experts, split or fused
projections). The same list is applied here to handles instead of tensors; a converter runs when its result is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...errors import CheckpointError, TensorError
from ...weights.handles import Constant, GatheredRows, QuantizedWeight, SortedColumns, Transposed, Weight
from .linear_experts import JoinedExperts, joined

_MOST_PARTS = 8  # parts of a matrix with different column orders
_ROWS = 4096  # rows that are compared at once


@dataclass
class _ConverterGroup:
    """One conversion: a converter, the tensors it takes by source pattern, and the key it was first seen for."""

    converter: Any
    first_key: str
    sources: list[tuple[str, str, Weight]]  # (checkpoint key, source pattern, tensor)
    model: nn.Module

    def convert(self, on_meta: bool) -> dict[str, Tensor]:
        """Run the conversion. Returns the results by key, of any shape; on_meta: only their shapes and dtypes."""
        converter = deepcopy(self.converter)
        for key, pattern, weight in self.sources:
            converter.add_tensor(self.first_key, key, pattern, _reader(weight, on_meta))
        result = converter.convert(self.first_key, model=self.model, config=self.model.config)
        return {k: v[0] if isinstance(v, list) else v for k, v in result.items()}


def _reader(weight: Weight, on_meta: bool) -> Any:
    if on_meta:
        return lambda: torch.empty(weight.shape, dtype=weight.dtype, device="meta")
    return weight.load


@dataclass
class Converted(Weight):
    """One result of a conversion; loading it runs the whole conversion and keeps only this result."""

    group: _ConverterGroup
    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def load(self) -> Tensor:
        """The value of this result, in its shape. Runs the conversion."""
        return self.group.convert(on_meta=False)[self.key]


def model_weights(
    model: nn.Module,
    tensors: Mapping[str, Weight],
    computed: Mapping[str, Tensor],
    unplaced: dict[str, str] | None = None,
) -> dict[str, Weight]:
    """A handle for every parameter and buffer of `model` (on meta) by its qualified name.

    computed: the buffers that no checkpoint stores. unplaced: filled with the tensors that the model has no parameter
    for, each with the name of the parameter that it would be; None: they are not reported. Raises TensorError if a
    tensor is missing or has a wrong shape.
    """
    expected: dict[str, Tensor] = dict(model.state_dict())
    return completed(model, _rename_and_convert(model, tensors, expected, unplaced), computed)


def completed(model: nn.Module, found: dict[str, Weight], computed: Mapping[str, Tensor]) -> dict[str, Weight]:
    """`found`, handles by the names of the model's parameters, completed with computed buffers and tied parameters.

    Raises TensorError if a tensor is missing or has a wrong shape. Image and audio towers without any tensor in the
    checkpoint are left out.
    """
    expected: dict[str, Tensor] = dict(model.state_dict())
    absent = _absent_towers(model, found)
    for name, value in computed.items():
        found.setdefault(name, Constant(value))
    follow_ties(model, found, expected)
    for name, parameter in expected.items():
        if name not in found and name.startswith(absent):
            continue
        if name not in found:
            raise TensorError(name, "is missing from the checkpoint", _why_missing(model, name))
        if tuple(found[name].shape) != tuple(parameter.shape):
            raise TensorError(
                name,
                f"has shape {list(found[name].shape)}, the config says {list(parameter.shape)}",
                "the checkpoint does not match its configuration",
            )
        dtype = found[name].dtype
        if parameter.is_floating_point() and parameter.dim() > 1 and not dtype.is_floating_point:
            raise TensorError(
                name,
                f"is stored as {str(dtype).removeprefix('torch.')}, and config.json does not say what its numbers mean",
                "a quantization_config tells so; or give the unquantized checkpoint",
            )
    return found


def _absent_towers(model: nn.Module, found: Mapping[str, Weight]) -> tuple[str, ...]:
    """The name prefixes of the modules beside the decoder of a multimodal model for which no tensor was found. Text
    does not need them."""
    config: Any = getattr(model, "config", None)
    if config is None or not hasattr(model, "get_decoder") or not {*config.sub_configs} - {"text_config"}:
        return ()
    decoder, head = model.get_decoder(), model.get_output_embeddings()  # type: ignore[operator]
    path = next((path for path, module in model.named_modules() if module is decoder), "")
    around = [".".join(path.split(".")[:end]) for end in range(path.count(".") + 1)] if path else []
    beside = [
        f"{place}.{child}.".removeprefix(".")
        for place in around
        for child, module in model.get_submodule(place).named_children()
        if module is not head and not f"{path}.".startswith(f"{place}.{child}.".removeprefix("."))
    ]
    return tuple(part for part in beside if not any(name.startswith(part) for name in found))


def _why_missing(model: nn.Module, name: str) -> str:
    head = getattr(model, "get_output_embeddings", lambda: None)()
    if head is not None and head in (module for path, module in model.named_modules() if name.startswith(f"{path}.")):
        return "a checkpoint without LM head gives embeddings: --task embed"
    return "the checkpoint does not match its configuration"


def _rename_and_convert(
    model: nn.Module,
    tensors: Mapping[str, Weight],
    expected: dict[str, Tensor],
    unplaced: dict[str, str] | None,
) -> dict[str, Weight]:
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    mapping = get_model_conversion_mapping(model)  # type: ignore[arg-type]
    renamings = [m for m in mapping if isinstance(m, WeightRenaming)]
    converters = [m for m in mapping if isinstance(m, WeightConverter)]
    by_pattern = {p: c for c in converters for p in c.source_patterns}
    prefix: str = model.base_model_prefix  # type: ignore[assignment]
    found: dict[str, Weight] = {}
    groups: dict[str, _ConverterGroup] = {}
    for key in sorted(tensors, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, expected)
        if name not in expected and key in expected:
            name, pattern = key, None
        if name not in expected:
            if (whole := joined(name, expected)) is not None:
                made = _ConverterGroup(JoinedExperts.of(whole, model, expected), whole, [], model)
                groups.setdefault(whole, made).sources.append((name, "", tensors[key]))
            elif unplaced is not None:
                unplaced[key] = name
            continue  # skip a tensor that the model does not use, as transformers does
        if pattern is None:
            found[name] = tensors[key]
            continue
        group = groups.setdefault(name, _ConverterGroup(by_pattern[pattern], name, [], model))
        group.sources.append((key, pattern, tensors[key]))
    for group in groups.values():
        try:
            results = group.convert(on_meta=True)
        except MemoryError:
            raise
        except Exception as error:
            raise CheckpointError(f"cannot convert the tensors of {group.first_key!r}: {error}") from error
        stored = _stored(group, results)
        for name, value in results.items():
            dtype = value.dtype
            found[name] = stored.get(name) or Converted(group, name, tuple(value.shape), dtype)
    return found


def _stored(group: _ConverterGroup, results: Mapping[str, Tensor]) -> dict[str, Weight]:
    """The results of a conversion that only moves rows of quantized matrices, still quantized; empty for other
    conversions.

    This is found by running it on matrices of one column that hold their row numbers.
    """
    weights = [weight for _, _, weight in group.sources]
    pieces = [weight.source if isinstance(weight, SortedColumns) else weight for weight in weights]
    quantized = tuple(piece for piece in pieces if isinstance(piece, QuantizedWeight) and len(piece.shape) == 2)
    first = quantized[0].format if quantized else None
    if first is None or len(quantized) < len(pieces) or first.block[0] != 1:
        return {}
    if not all(first.merges_with(piece.format) for piece in quantized):
        return {}
    sorts = any(isinstance(weight, SortedColumns) for weight in weights)
    starts = np.cumsum([0, *(piece.shape[0] for piece in quantized)]).tolist()
    numbers = [torch.arange(a, b).unsqueeze(1) for a, b in pairwise(starts)]
    probe = _ConverterGroup(group.converter, group.first_key, [], group.model)
    probe.sources = [(k, p, Constant(n)) for (k, p, _), n in zip(group.sources, numbers, strict=True)]
    try:
        moved = probe.convert(on_meta=False)
    except Exception:  # it reads columns, too
        return {}
    found: dict[str, Weight] = {}
    for name, rows in moved.items():
        *lead, n, k = results[name].shape
        if rows.shape == (*lead, n, 1) and k == quantized[0].shape[1]:
            given = GatheredRows(quantized, rows.squeeze(-1))
            order = _orders(weights, starts, given) if sorts else None
            if order is not None or not sorts:
                found[name] = given if order is None else SortedColumns(given, order)
        elif rows.shape == (*lead, 1, k) and n == quantized[0].shape[1] and not sorts:
            found[name] = Transposed(GatheredRows(quantized, rows.squeeze(-2)))
    return found


def _orders(weights: list[Weight], starts: list[int], given: GatheredRows) -> Tensor | None:
    """The column orders of gathered rows of `weights`, in the form of SortedColumns: [K] or [.., parts, K]. starts: the
    first row of each weight. None if a matrix has more than a few parts with different orders."""
    n, k = given.shape[-2:]
    orders = [weight.order if isinstance(weight, SortedColumns) else torch.arange(k) for weight in weights]
    known: dict[bytes, int] = {}
    which = torch.tensor([known.setdefault(order.numpy().tobytes(), i) for i, order in enumerate(orders)])
    each = which[torch.bucketize(given.index, torch.tensor(starts[1:]), right=True)]
    if bool((each == each.flatten()[0]).all()):
        return orders[int(each.flatten()[0])]
    changes = 1 + int((each[..., 1:] != each[..., :-1]).sum(-1).max())
    parts = next((p for p in range(changes, n + 1) if n % p == 0 and _constant(each.unflatten(-1, (p, -1)))), n)
    return torch.stack(orders)[each.unflatten(-1, (parts, -1))[..., 0]] if parts <= _MOST_PARTS else None


def _constant(values: Tensor) -> bool:
    """Whether values [.., N] are equal along the last axis."""
    return bool((values == values[..., :1]).all())


def follow_ties(model: nn.Module, found: dict[str, Weight], expected: dict[str, Tensor]) -> None:
    """Give tied parameters one handle, whichever of them the checkpoint stores.

    If the checkpoint stores both with different values, each keeps its own and the model is not tied there, as in
    transformers (`PreTrainedModel.tie_weights`).
    """
    ties: dict[str, str] = getattr(model, "all_tied_weights_keys", {}) or {}
    for target, source in list(ties.items()):
        if target in found and source not in found:
            found[source] = found[target]
        elif target in found and not _equal(found[target], found[source]):
            _untie(model, target)
            del ties[target]
        elif source in found and target in expected:
            found[target] = found[source]


def _equal(one: Weight, other: Weight) -> bool:
    """Whether two handles have the same values. They are loaded only if their shapes and formats are equal."""
    if one is other:
        return True
    formats = [weight.format if isinstance(weight, QuantizedWeight) else None for weight in (one, other)]
    if one.shape != other.shape or formats[0] != formats[1]:
        return False
    values = [weight.load() for weight in (one, other)]
    return all(torch.equal(a.float(), b.float()) for a, b in zip(*(v.split(_ROWS) for v in values), strict=True))


def _untie(model: nn.Module, name: str) -> None:
    """Replace a shared parameter by one of its own, on meta."""
    path, _, own = name.rpartition(".")
    module = model.get_submodule(path)
    setattr(module, own, nn.Parameter(torch.empty_like(module.get_parameter(own)), requires_grad=False))
