"""Shared by the rules of all architectures: reading a key of the file's own architecture, and names of parameters."""

from __future__ import annotations

from typing import Any

from .....runtime.format.gguf import GgufContainer

Facts = dict[str, Any]

# suffixes of transformers' names of a layer's parameters that the gguf package's tables lack, and the file's names
NAMES = {
    "e_score_correction_bias": "exp_probs_b.bias", "expert_bias": "exp_probs_b.bias", "dt_bias": "ssm_dt.bias",
    "A_log": "ssm_a", "mixer.D": "ssm_d", "mamba.D": "ssm_d", "self_attn.sinks": "attn_sinks.weight",
}  # fmt: skip
# parameters with one number per layer that a file holds in its metadata
NUMBERS = {f"act_fn.{name}": f"xielu.{name}" for name in ("alpha_p", "alpha_n", "beta", "eps")}


def key(container: GgufContainer, name: str) -> Any:
    """The value of a key of the file's own architecture; None if the file does not have it. The key counts as read."""
    full = f"{container.metadata['general.architecture']}.{name}"
    container.used.add(full)
    return container.metadata.get(full)


def layer_count(container: GgufContainer) -> int:
    """The number of the model's layers, without the last ones for multi-token prediction, which `weights_of` leaves
    out."""
    return key(container, "block_count") - (key(container, "nextn_predict_layers") or 0)
