"""Which layers of a GGUF model see only the tokens of a window before them, and how these and the others are turned."""

from __future__ import annotations

from ....errors import CheckpointError
from .container import Container
from .keys import Facts, key, layer_count
from .rope import partly_turned

# where a file does not say layer by layer: of how many layers one sees all, and whether it is the first of them
_PERIODS = {
    "afmoe": (4, False), "cohere2": (4, False), "cohere2moe": (4, True), "exaone-moe": (4, False),
    "exaone4": (4, False), "gemma2": (2, False), "gemma3": (6, False), "gpt-oss": (2, False), "laguna": (4, True),
    "mellum": (4, False), "modern-bert": (3, True), "olmo2": (4, False),
}  # fmt: skip
_DEFAULTS = {"gemma2": 4096}


def place_windows(container: Container, arch: str, facts: Facts) -> None:
    """Windows of layers as llama.cpp finds them; for configurations that tell layers by kinds."""
    layers = layer_count(container)
    window = key(container, "attention.sliding_window")
    window = _DEFAULTS.get(arch, 0) if window is None else window
    found = key(container, "attention.sliding_window_pattern")
    if found is None and (arch not in _PERIODS):
        return
    if not window and arch in _PERIODS:
        facts |= {"layer_types": ["full_attention"] * layers} | ({"sliding_window": None} if arch == "exaone4" else {})
        return
    period, first = _PERIODS.get(arch, (0, False))
    if found is None or (isinstance(found, int) and not isinstance(found, bool)):
        period = period if found is None else found
        seen = 0 if first else period - 1  # the one of a period that sees all
        found = [period == 0 or layer % period != seen for layer in range(layers)]
    if isinstance(found, bool) or len(found) < layers:
        raise CheckpointError(f"{container.path}: attention.sliding_window_pattern is not of {layers} layers")
    facts["layer_types"] = ["sliding_attention" if near else "full_attention" for near in found[:layers]]
    if window and "local_attention" not in facts:
        facts["sliding_window"] = window


def turn_by_kind(container: Container, facts: Facts) -> None:
    """Rotary embedding of layers with windows beside that of the others, which may be scaled."""
    partly_turned(container, facts)
    base = facts.pop("rope_theta", 10000.0)
    far = facts.pop("rope_parameters", None) or {"rope_type": "default", "rope_theta": base}
    far.setdefault("partial_rotary_factor", 1.0)
    near = {"rope_type": "default", "rope_theta": key(container, "rope.freq_base_swa") or far["rope_theta"]}
    turned = key(container, "rope.dimension_count_swa")
    head = facts.get("head_dim") or facts["hidden_size"] // facts["num_attention_heads"]
    near["partial_rotary_factor"] = turned / head if turned else far["partial_rotary_factor"]
    facts["rope_parameters"] = {"full_attention": far, "sliding_attention": near}
