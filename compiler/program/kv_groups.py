"""Which KV layers form a group: of one type those whose same positions are read, and those with a recurrent state."""

from __future__ import annotations

from collections.abc import Mapping

from ...runtime.format.kv import KVGroup, KVLayer, KVLayout
from ...runtime.format.kv_numbers import KV_NUMBERS, KVNumbers
from ..kv_formats import find_kv_format
from .builder import Cached
from .context import WITHIN_STEP, LowerOptions

CHECKPOINTS = 2  # states per sequence of a full batch that prefixes are found by


def group_layers(layers: Mapping[int, Cached], options: LowerOptions) -> KVLayout:
    """layers: by number. A window that no sequence is longer than is none."""
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
    """What an engine says of a format that not every runtime knows."""
    return None if dtype in KV_NUMBERS else find_kv_format(dtype).numbers


def _kept(cached: Cached, longest: int) -> tuple[str, int, int]:
    """The name of what a layer's group keeps, and its sizes."""
    policy, window = cached.policy, cached.window
    if policy is not None and (policy.chooses or not longest or policy.tokens < longest):
        return policy.kind, policy.size, policy.beside
    if not window or policy is not None or (longest and window >= longest):
        return "all", 0, 0
    return ("step", 0, 0) if window == WITHIN_STEP else ("window", window, 0)
