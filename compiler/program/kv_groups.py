"""Which KV layers form a group: those of which the same positions are read, and those with a recurrent state."""

from __future__ import annotations

from collections.abc import Mapping

from ...runtime.format.kv import KVGroup, KVLayer, KVLayout
from .context import WITHIN_STEP, LowerOptions

CHECKPOINTS = 2  # states per sequence of a full batch that prefixes are found by


def group_layers(layers: Mapping[int, tuple[KVLayer, int]], options: LowerOptions) -> KVLayout:
    """layers: by number, each with its window, 0 for none, or WITHIN_STEP. A window that no sequence is longer than is
    none."""
    windows: dict[int, dict[int, KVLayer]] = {}
    states: dict[int, KVLayer] = {}
    for number, (layer, window) in sorted(layers.items()):
        if layer.state:
            states[number] = layer
            continue
        if options.max_seq_len and window >= options.max_seq_len:
            window = 0
        windows.setdefault(window, {})[number] = layer
    if not windows and not states:
        windows[0] = {}
    groups = [
        KVGroup(options.block_size, options.kv_dtype, found, _policy(window), max(window, 0))
        for window, found in windows.items()
    ]
    if states:
        groups.append(KVGroup(options.block_size, "f32", states, "state", CHECKPOINTS))
    return KVLayout(tuple(groups))


def _policy(window: int) -> str:
    """The name of what a group keeps."""
    return "step" if window == WITHIN_STEP else "window" if window else "all"
