"""Metadata of a file's own architecture that nothing used: refused, as they may say that the model is another one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ....errors import UnsupportedModel
from .container import Container
from .keys import Facts
from .rope import rope_of, turned_dims

# sizes that the shapes of tensors prove: a model of another size has no place for them
SIZES = (
    "vocab_size", "feed_forward_length", "attention.head_count_kv", "attention.key_length", "attention.value_length",
    "attention.key_length_swa", "attention.value_length_swa", "expert_feed_forward_length", "ssm.inner_size",
    "expert_shared_feed_forward_length", "expert_shared_count", "leading_dense_block_count",
)  # fmt: skip
# of no effect on what a text gives: how the file was made, limits, axes of pictures, positions where none are turned
WORDS = (
    "classifier.pooling_type",
    "context_length", "tensor_data_layout", "rope.scaling.finetuned", "rope.dimension_sections", "pooling_type",
    "rope.dimension_count", "rope.freq_base",
)  # fmt: skip
# what a 0 or a false would change
_TOLD = ("attention.causal", "expert_weights_norm", "attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon")
_SIGMOID = (
    "afmoe", "deepseek_v3", "deepseek_v32", "dots1", "exaone_moe", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "hy_v3",
    "laguna", "lfm2_moe", "minimax_m2", "nemotron_h", "solar_open", "youtu",
)  # fmt: skip
_ENCODERS = ("bert", "modernbert")
_EPSILONS = ("rms_norm_eps", "norm_eps", "layer_norm_eps", "layer_norm_epsilon")
_TURNED = ("granite", "granitemoe", "granitemoeshared", "granite_swa", "bamba")  # or not, by `rope.scaling.finetuned`
# said twice: what the configuration makes of it
_AGAIN: dict[str, Callable[[Facts], Any]] = {
    "rope.dimension_count": turned_dims,
    "rope.freq_base": lambda config: rope_of(config).get("rope_theta"),
    "rope.dimension_count_swa": lambda config: turned_dims(config, "sliding_attention"),
    "rope.freq_base_swa": lambda config: rope_of(config, "sliding_attention").get("rope_theta"),
    "expert_gating_func": lambda config: 2 if config["model_type"] in _SIGMOID else 1,
    "rope.scaling.finetuned": lambda config: True if config["model_type"] in _TURNED else None,
    "attention.causal": lambda config: config["model_type"] not in _ENCODERS,
    "attention.layer_norm_epsilon": lambda config: _epsilon(config),
    "attention.layer_norm_rms_epsilon": lambda config: _epsilon(config),
    "use_parallel_residual": lambda config: config.get("use_parallel_residual"),
    "attention.indexer.types": lambda config: True,
    "expert_weights_norm": lambda config: True if config["model_type"] in ("laguna", "hy_v3") else None,
    "expert_group_count": lambda config: 1,
    "expert_group_used_count": lambda config: 1,
}


def _epsilon(config: Facts) -> float | None:
    """OLMo's is none of its configuration's."""
    return 1e-5 if config["model_type"] == "olmo" else next((config[e] for e in _EPSILONS if e in config), None)


def refuse_unused(container: Container, config: Any) -> None:
    """UnsupportedModel names a key that neither the configuration nor the tensors have, unless it says nothing: 0,
    false, a factor of 1.0."""
    arch, facts = container.metadata["general.architecture"], config.to_dict()
    if facts.get("use_sliding_window") is False:
        container.used.discard(f"{arch}.attention.sliding_window")
    for full, value in container.metadata.items():
        name = full.removeprefix(f"{arch}.")
        if name == full or full in container.used or name in SIZES:
            continue
        expected = _AGAIN[name](facts) if name in _AGAIN else None
        if _equal(value, expected) if expected is not None else name in WORDS or _says_nothing(name, value):
            continue
        raise UnsupportedModel(
            f"{container.path}: metadata {_short(repr(full))} is {_short(value)}, which the model that icc takes it for"
            f" ({config.model_type}) does not have",
            "compile the checkpoint that the file was made of",
        )


def _equal(value: Any, expected: Any) -> bool:
    return not isinstance(value, (str, list)) and bool(np.allclose(value, expected, rtol=1e-5, atol=0))


def _says_nothing(name: str, value: Any) -> bool:
    if name in _TOLD or isinstance(value, (str, list)):
        return not value and name not in _TOLD
    return not np.any(value) or (isinstance(value, float) and value == 1.0)


def _short(value: Any) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= 90 else f"{text[:87]}..."
