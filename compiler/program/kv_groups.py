"""Divides KV layers into groups: layers of one type that read the same positions, and layers with a recurrent state."""

from __future__ import annotations

from collections.abc import Mapping

from ...runtime.format.kv import KVGroup, KVLayer, KVLayout
from ...runtime.format.kv_numbers import KV_NUMBERS, KVNumbers
from ..kv_formats import find_kv_format
from .builder import Cached
from .context import WITHIN_STEP, LowerOptions

CHECKPOINTS = 2  # saved states, per sequence of a full batch, from which prefixes can resume


def group_layers(layers: Mapping[int, Cached], options: LowerOptions) -> KVLayout:
    """The groups of KV layers. layers: by number. A window as long as the longest sequence counts as no window."""
    kinds: dict[tuple[str, str, int, int], dict[int, KVLayer]] = {}
    states: dict[int, KVLayer] = {}
    for number, cached in sorted(layers.items()):
        if cached.layer.state:
            states[number] = cached.layer
        else:
            kinds.setdefault((cached.dtype, *_kept(cached, options.max_seq_len)), {})[number] = cached.layer
    if not kinds and not states:
        kinds[options.kv_dtype, "all", 0, 0] = {}
    groups = [
        KVGroup(options.block_size, dtype, found, name, size, beside, _told(dtype))
        for (dtype, name, size, beside), found in kinds.items()
    ]
    if states:
        groups.append(KVGroup(options.block_size, options.state_dtype, states, "state", CHECKPOINTS))
    return KVLayout(tuple(groups))


def _told(dtype: str) -> KVNumbers | None:
    """The sizes that an engine records for a format that not every runtime knows; None for the others."""
    return None if dtype in KV_NUMBERS else find_kv_format(dtype).numbers


def _kept(cached: Cached, longest: int) -> tuple[str, int, int]:
    """The policy of a layer's group: its name and its sizes."""
    policy, window = cached.policy, cached.window
    if policy is not None and (policy.chooses or not longest or policy.tokens < longest):
        return policy.kind, policy.size, policy.beside
    if not window or policy is not None or (longest and window >= longest):
        return "all", 0, 0
    return ("step", 0, 0) if window == WITHIN_STEP else ("window", window, 0)
