"""Registers icc's attention, mask and expert functions in transformers' registries under the name "icc".

While a model is traced these functions run instead of a real implementation, and leave one traced op each in the graph,
whatever the family. Functions of transformers and torch that need values of meta tensors are replaced here, too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from ...errors import UnsupportedModel
from ...ops.attention_spec import ALL_AHEAD, AttentionMask
from ..mask_spec import AllVisible, KeyBias, MaskSpec, MaskUsed, Picked
from .traced_ops import NAME, ops

_BLOCK = 8  # elements of a head that kernels read at once


def icc_mask(*args: Any, mask_function: Callable[..., Any] | None = None, **kwargs: Any) -> MaskSpec:
    """The mask function for transformers: returns a MaskSpec, found by calling `mask_function` with small indices; None
    means causal.

    For a mask of another kind the MaskSpec has `refused` set, and no attention may use it. UnsupportedModel if the
    function cannot be called this way.
    """
    local = int(kwargs.get("local_size") or 0)
    if mask_function is None:
        return MaskSpec()
    candidates = [MaskSpec(), MaskSpec(ahead=ALL_AHEAD)]
    candidates += [MaskSpec(window=local), MaskSpec(chunk=local)] if local else []
    table, q, k = _ask(mask_function, local)
    with _disable_current_modes():
        last = (table & (k > q)).long() * (k - q)
        back, ahead = int((table.long() * (q - k)).max()), int(last.max())
        if ahead and ahead < int(k.max()):  # a window in both directions
            candidates.append(MaskSpec(window=back + 1, ahead=ahead))
        fitting = [spec for spec in candidates if torch.equal(table, _allowed(spec, q, k))]
        blind = not bool(table.any(-1).all())
    if blind:
        return MaskSpec(refused="the attention mask hides all tokens from some: is the sliding window below 1?")
    if fitting:
        return fitting[0]
    # no error yet: a model may have a mask that none of its layers uses
    return MaskSpec(refused="the attention mask is neither causal, bidirectional, sliding-window nor chunked")


def _ask(mask_function: Callable[..., Any], local: int) -> tuple[Tensor, Tensor, Tensor]:
    """(allowed[Q, K], q[Q, 1], k[1, K]) at small indices and around multiples of the local size."""
    bases = (0, local // 2, local, 3 * local // 2, 2 * local, 3 * local)
    near = {d for base in bases for d in range(base - 2, base + 3) if d >= 0}
    places = sorted(near | set(range(24)))
    with _disable_current_modes():  # outside the trace: these are real numbers
        q, k = torch.tensor(places)[:, None], torch.tensor(places)[None, :]
        zero = torch.zeros_like(q)
        try:
            table = mask_function(zero, zero, q, k).expand(len(places), len(places)).to(torch.bool)
        except Exception as error:
            raise UnsupportedModel(f"the attention mask cannot be analysed: {error}") from error
    return table, q, k


def _allowed(spec: MaskSpec, q: Tensor, k: Tensor) -> Tensor:
    with _disable_current_modes():
        return AttentionMask(spec.window, spec.chunk, spec.ahead).allows(q, k)


def icc_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sliding_window: int | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function for transformers: query[1, Hq, T, D], key[1, Hkv, T, D], value[1, Hkv, T, Dv] -> ([1, T,
    Hq, Dv], None).

    Raises MaskUsed for a mask that the model computes itself; UnsupportedModel for attention that icc cannot compile.
    """
    if isinstance(attention_mask, Tensor):
        raise MaskUsed  # the model's own mask: tracing its own attention shows what it hides
    if _tokens(key) != _tokens(query):
        raise UnsupportedModel("attention to keys that are no tokens, such as one for a window of them", op="attention")
    is_causal = kwargs.get("is_causal")
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    if isinstance(attention_mask, KeyBias):
        if softcap or attention_mask.row.shape[1] != key.shape[1]:
            raise MaskUsed()
        spec = attention_mask.mask
    elif isinstance(attention_mask, MaskSpec):
        spec = attention_mask
    else:
        spec = MaskSpec(int(sliding_window or 0), ahead=0 if causal else ALL_AHEAD)
    if spec.refused:
        raise UnsupportedModel(spec.refused)
    picked = kwargs.get("indices")
    if picked is not None and not (isinstance(picked, AllVisible | Picked) and picked.mask == spec):
        raise UnsupportedModel("attention to tokens that an index picks is not supported", op="indices")
    chosen = (picked.scores, picked.count) if isinstance(picked, Picked) else (None, 0)
    if chosen[1] and spec != MaskSpec():
        raise UnsupportedModel("an index picks tokens that attention reads within a window or ahead", op="indices")
    sinks = s_aux if s_aux is not None else kwargs.get("sinks")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    softcap = float(softcap or 0.0)
    if isinstance(attention_mask, KeyBias):
        query, key = _with_key_bias(query, key, attention_mask.row, scale)
    if sinks is not None and sinks.dim() == 4:  # sinks per query: subtracted from the query's scores instead
        if softcap:
            raise UnsupportedModel("sinks of each query beside a soft cap of the scores", op="sinks")
        query, key = _with_query_bias(query, key, -sinks, scale)
        sinks = torch.zeros(query.shape[1], dtype=query.dtype, device=query.device)
    sight = (spec.window, spec.chunk, softcap, spec.ahead)
    out = ops.attention(query, key, value, sinks, scale, *sight, position_bias, *chosen)
    return out, None


def _tokens(x: Tensor) -> Any:
    """The length of x[1, H, T, D] in tokens, without adding a guard on it to the trace."""
    length = x.shape[2]
    return length.node.expr if isinstance(length, torch.SymInt) else length


def _with_key_bias(q: Tensor, k: Tensor, row: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Queries and keys whose products have row[1, Hkv, 1, T] added, a number per key: one more element per head, padded
    to 8."""
    ones, rest = (q.new_full((*q.shape[:-1], width), 1 / scale * (width == 1)) for width in (1, _BLOCK - 1))
    zeros = k.new_zeros((*k.shape[:-1], _BLOCK - 1))
    return torch.cat([q, ones, rest], -1), torch.cat([k, row.transpose(2, 3), zeros], -1)


def _with_query_bias(q: Tensor, k: Tensor, column: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Queries and keys whose products have column[1, Hq, T, 1] added, a number per query; as `_with_key_bias`."""
    ones, rest = (k.new_full((*k.shape[:-1], width), float(width == 1)) for width in (1, _BLOCK - 1))
    zeros = q.new_zeros((*q.shape[:-1], _BLOCK - 1))
    return torch.cat([q, column / scale, zeros], -1), torch.cat([k, ones, rest], -1)


def icc_experts(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The expert function for transformers: hidden_states[T, H], top_k_index and top_k_weights[T, S] -> [T, H]."""
    name = "gate_up_proj" if self.has_gate else "up_proj"

    def weight(which: str) -> Tensor:
        value = getattr(self, which)
        return value.transpose(1, 2) if self.is_transposed else value

    def bias(which: str) -> Tensor | None:
        return getattr(self, f"{which}_bias") if self.has_bias else None

    up = ops.expert_linear(hidden_states, weight(name), bias(name), top_k_index)
    hidden = self._apply_gate(up) if self.has_gate else self.act_fn(up)
    out = ops.expert_linear(hidden, weight("down_proj"), bias("down_proj"), top_k_index)
    if getattr(self, "has_post_expert_norm", False):  # transformers 5.17 has no such attribute
        out = self.post_expert_norm(out)
    return (out * top_k_weights.unsqueeze(-1)).sum(dim=1)


def _tensor_with_its_value(data: Any, *args: Any, **kwargs: Any) -> Tensor:
    """torch.tensor of Python numbers, by ops that keep the values: on meta, torch.tensor itself would lose them."""
    if isinstance(data, (int, float, bool)) and not args:
        dtype = kwargs.get("dtype") or (
            torch.bool if isinstance(data, bool) else torch.int64 if isinstance(data, int) else torch.float32
        )
        return torch.full((), data, dtype=dtype, device=kwargs.get("device"))
    if isinstance(data, (list, tuple)) and data and all(isinstance(d, (int, float, bool)) for d in data) and not args:
        return torch.stack([_tensor_with_its_value(d, **kwargs) for d in data])
    return _torch_tensor(data, *args, **kwargs)


def _index_without_lists(self: Tensor, index: Any) -> Tensor:
    """x[.., [2, 3]] as a slice: on meta, torch would turn the list into a tensor without values."""
    parts = index if isinstance(index, tuple) else (index,)
    return _getitem(self, tuple(_as_slice(p) for p in parts) if any(isinstance(p, list) for p in parts) else index)


def _as_slice(part: Any) -> Any:
    if not isinstance(part, list) or not part or not all(type(p) is int for p in part):
        return part
    if part != list(range(part[0], part[0] + len(part))):
        return part
    return slice(part[0], part[-1] + 1 or None)


_torch_tensor = torch.tensor
_getitem = Tensor.__getitem__


def _chunked_overlay(chunk_size: int, left_padding: Any) -> Callable[..., Any]:
    """transformers' chunked overlay without left padding, so that it can be called with plain integers."""
    return lambda batch, head, q, k: k // chunk_size == q // chunk_size


def _no_blocks(block_sequence_ids: Any) -> Callable[..., Any]:
    """Replaces transformers' overlay by which the tokens of an image see each other; a text has no images."""
    return lambda batch, head, q, k: q != q


def register_interfaces() -> None:
    """Make attention, masks and experts known to transformers under the name "icc"."""
    from transformers import masking_utils
    from transformers.integrations import moe
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(NAME, icc_attention)
    masking_utils.ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, icc_mask)
    moe.ALL_EXPERTS_FUNCTIONS.register(NAME, icc_experts)


@contextlib.contextmanager
def tracing_interfaces() -> Iterator[None]:
    """A context that replaces functions by which transformers reads values of tensors, and keeps values of constants
    that torch would lose on meta."""
    from transformers import masking_utils

    with (
        mock.patch.object(masking_utils, "find_packed_sequence_indices", lambda position_ids: None),
        mock.patch.object(masking_utils, "chunked_overlay", _chunked_overlay),
        mock.patch.object(masking_utils, "blockwise_overlay", _no_blocks),
        mock.patch.object(torch, "tensor", _tensor_with_its_value),
        mock.patch.object(Tensor, "__getitem__", _index_without_lists),
        mock.patch.object(torch.distributions.Distribution, "_validate_args", False),
    ):
        yield
