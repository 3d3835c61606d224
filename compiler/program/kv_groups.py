"""Which KV layers form a group: those of which the same positions are read, and those with a recurrent state."""

from __future__ import annotations

from collections.abc import Mapping

from ...runtime.format.kv import KVGroup, KVLayer, KVLayout
from .builder import Cached
from .context import WITHIN_STEP, LowerOptions

CHECKPOINTS = 2  # states per sequence of a full batch that prefixes are found by


def group_layers(layers: Mapping[int, Cached], options: LowerOptions) -> KVLayout:
    """layers: by number. A window that no sequence is longer than is none."""
    windows: dict[tuple[int, int], dict[int, KVLayer]] = {}
    states: dict[int, KVLayer] = {}
    for number, cached in sorted(layers.items()):
        if cached.layer.state:
            states[number] = cached.layer
            continue
        window, front = cached.window, cached.front
        if options.max_seq_len and window + front >= options.max_seq_len:
            window = front = 0
        windows.setdefault((window, front), {})[number] = cached.layer
    if not windows and not states:
        windows[0, 0] = {}
    groups = [
        KVGroup(options.block_size, options.kv_dtype, found, _policy(window, front), max(window, 0), front)
        for (window, front), found in windows.items()
    ]
    if states:
        groups.append(KVGroup(options.block_size, "f32", states, "state", CHECKPOINTS))
    return KVLayout(tuple(groups))


def _policy(window: int, front: int) -> str:
    """The name of what a group keeps."""
    if front:
        return "streaming"
    return "step" if window == WITHIN_STEP else "window" if window else "all"
