"""Turns the rotary scaling in a GGUF file's metadata and tensors into parts of transformers' configuration."""

from __future__ import annotations

from math import isfinite
from typing import Any

import torch

from .....runtime.format.gguf import GgufContainer, GgufTensor
from ....errors import CheckpointError, UnsupportedModel
from ..checkpoint import mapped
from .keys import Facts, key

_SCALINGS = ("none", "linear", "yarn", "longrope")
_YARN = {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow", "yarn_attn_factor": "attention_factor"}


def check_rope(container: GgufContainer, arch: str) -> None:
    """Raise CheckpointError for a frequency or a factor that is not a valid number, UnsupportedModel for an unknown
    scaling."""
    for name in ("freq_base", "freq_base_swa", "scaling.factor", "scaling.attn_factor", "scale_linear"):
        value = container.get(f"{arch}.rope.{name}", (int, float), 1.0)
        if not (isfinite(value) and (value > 0 or (value == 0 and "base" not in name))):
            raise CheckpointError(f"{container.path}: metadata '{arch}.rope.{name}' is {value}, which it cannot be")
    kind = container.get(f"{arch}.rope.scaling.type", str, "none")
    if kind not in _SCALINGS:
        raise UnsupportedModel(f"{container.path} has rotary scaling of the kind {kind!r}", f"icc reads {_SCALINGS}")


def scaling(container: GgufContainer) -> tuple[str, float]:
    """The kind of scaling and its factor, by llama.cpp's rules; ("none", 1.0) if there is none.

    A file with only the factor, which had another name before October 2023, has linear scaling.
    """
    kind = key(container, "rope.scaling.type") or "linear"
    if kind == "longrope":
        return "none", 1.0  # see `long_rope`; `unused.py` refuses a factor beside it
    factor = key(container, "rope.scaling.factor") or key(container, "rope.scale_linear")
    if kind != "yarn":
        key(container, "rope.scaling.original_context_length")  # marks the key as read; nothing else reads it
    return (kind, float(factor)) if factor and kind in ("linear", "yarn") else ("none", 1.0)


def scale_rope(container: GgufContainer, facts: Facts) -> None:
    """Put linear scaling or YaRN into the configuration. A tensor of factors is applied to the frequencies instead."""
    kind, factor = scaling(container)
    if kind == "none":
        return
    rope = {"rope_type": kind, "rope_theta": facts.pop("rope_theta", 10000.0), "factor": factor}
    if kind == "yarn":
        found = {name: key(container, f"rope.scaling.{own}") for own, name in _YARN.items()}
        rope |= {name: float(value) for name, value in found.items() if value is not None}
        if original := key(container, "rope.scaling.original_context_length"):
            rope["original_max_position_embeddings"] = int(original)
    facts["rope_parameters"] = rope


def rope_parameters(facts: Facts) -> dict[str, Any]:
    """The rotary parameters of a configuration that is being made; created from its `rope_theta` if it has none yet.

    `rope_theta` is removed from it. The default base is 10000, as in llama.cpp.
    """
    base = facts.pop("rope_theta", None)
    return facts.setdefault("rope_parameters", {"rope_type": "default", "rope_theta": base or 10000.0})


def partly_turned(container: GgufContainer, facts: Facts) -> None:
    """Put the share of a head that is rotated into the configuration, if the file says that it is not all."""
    head = facts.get("head_dim") or facts["hidden_size"] // facts["num_attention_heads"]
    turned = container.metadata.get(f"{container.metadata['general.architecture']}.rope.dimension_count")
    if turned and turned < head:
        key(container, "rope.dimension_count")
        rope_parameters(facts)["partial_rotary_factor"] = turned / head


def long_rope(container: GgufContainer, facts: Facts) -> None:
    """Put factors of rotary frequencies for short and for long texts into the configuration, if the file has both.
    UnsupportedModel for a file that also scales frequencies."""
    short, long = (factors(container, f"rope_factors_{length}.weight") for length in ("short", "long"))
    if short is None or long is None:
        return
    rope = facts.setdefault("rope_parameters", {"rope_theta": facts.pop("rope_theta", None) or 10000.0})
    if "factor" in rope:
        raise UnsupportedModel(
            f"{container.path} has factors of rotary frequencies and scales these, too: icc does one of them"
        )
    rope |= {"rope_type": "longrope", "short_factor": short, "long_factor": long}
    original = key(container, "rope.scaling.original_context_length") or facts["max_position_embeddings"]
    facts["original_max_position_embeddings"] = rope["original_max_position_embeddings"] = int(original)
    rope["factor"] = facts["max_position_embeddings"] / original
    rope["attention_factor"] = float(key(container, "rope.scaling.attn_factor") or 1.0)


def factors(container: GgufContainer, name: str) -> list[float] | None:
    """The numbers of a small F32 tensor; None if the file does not have it. UnsupportedModel for another type."""
    entry = container.tensors.get(name)
    if entry is None:
        return None
    if entry.kind != "f32":
        raise UnsupportedModel(f"tensor {name!r} of {container.path} is {entry.kind.upper()}", "icc reads F32 there")
    return mapped(entry.path)[entry.start : entry.end].clone().view(torch.float32).tolist()


def rope_factors(container: GgufContainer, config: Facts) -> GgufTensor | None:
    """The tensor of divisors of rotary frequencies, which files of Llama 3.1 and later have. None if there is none, or
    if the configuration has an equivalent."""
    proportional = rope_of(config).get("rope_type") == "proportional"
    return None if proportional else container.tensors.get("rope_freqs.weight")


def turned_dims(config: Facts, kind: str = "full_attention") -> int | None:
    """The number of a head's elements that are rotated; None if the configuration has no rotary embedding."""
    if not config.get("rope_parameters"):
        return None
    if (width := config.get("qk_rope_head_dim")) is not None:
        return width
    own = config.get("global_head_dim") if kind == "full_attention" else None
    head = own or config.get("head_dim") or config["hidden_size"] // (config.get("num_attention_heads") or 1)
    rope = rope_of(config, kind)
    return head if rope.get("rope_type") == "proportional" else round(head * rope.get("partial_rotary_factor", 1.0))


def rope_of(config: Facts, kind: str = "full_attention") -> dict[str, Any]:
    """The rotary parameters of a kind of layers; {} if the configuration has none."""
    rope = config.get("rope_parameters") or {}
    return rope.get(kind, rope)
