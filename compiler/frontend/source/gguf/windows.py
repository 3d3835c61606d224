"""Finds the layers of a GGUF model with a sliding window, and the rotary parameters of both kinds of layers."""

from __future__ import annotations

from .....runtime.format.gguf import GgufContainer
from ....errors import CheckpointError
from .architectures import Architecture
from .keys import Facts, key, layer_count
from .rope import partly_turned


def place_windows(container: GgufContainer, own: Architecture, facts: Facts) -> None:
    """Put the kinds of layers, with a sliding window or full attention, into the configuration by llama.cpp's rules;
    for configurations that list them.

    CheckpointError if the file's own list does not have one entry per layer.
    """
    layers = layer_count(container)
    window = key(container, "attention.sliding_window")
    window = own.table["attention.sliding_window"].default or 0 if window is None else window
    found = key(container, "attention.sliding_window_pattern")
    if found is None and own.period is None:
        return
    if not window and own.period is not None:
        facts["layer_types"] = ["full_attention"] * layers
        return
    period, first = own.period or (0, False)
    if found is None or (isinstance(found, int) and not isinstance(found, bool)):
        period = period if found is None else found
        seen = 0 if first else period - 1  # the layer of a period with full attention
        found = [period == 0 or layer % period != seen for layer in range(layers)]
    if isinstance(found, bool) or len(found) < layers:
        raise CheckpointError(f"{container.path}: attention.sliding_window_pattern is not of {layers} layers")
    facts["layer_types"] = ["sliding_attention" if near else "full_attention" for near in found[:layers]]
    if window and "local_attention" not in facts:
        facts["sliding_window"] = window


def turn_by_kind(container: GgufContainer, facts: Facts) -> None:
    """Put separate rotary parameters for layers with windows and for the other layers, which may be scaled, into the
    configuration."""
    partly_turned(container, facts)
    base = facts.pop("rope_theta", 10000.0)
    far = facts.pop("rope_parameters", None) or {"rope_type": "default", "rope_theta": base}
    far.setdefault("partial_rotary_factor", 1.0)
    near = {"rope_type": "default", "rope_theta": key(container, "rope.freq_base_swa") or far["rope_theta"]}
    turned = key(container, "rope.dimension_count_swa")
    head = facts.get("head_dim") or facts["hidden_size"] // facts["num_attention_heads"]
    near["partial_rotary_factor"] = turned / head if turned else far["partial_rotary_factor"]
    facts["rope_parameters"] = {"full_attention": far, "sliding_attention": near}
