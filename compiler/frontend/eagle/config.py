"""What config.json says of an EAGLE-3 drafter, in the two layouts that are published.

SpecForge's (and SafeAILab's) is the configuration of the draft layer with a few fields more. speculators' has the
configuration of the layers in `transformer_layer_config`. A field that neither this file nor the layers' configuration
class knows is refused, unless it is known to change nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import CheckpointError, UnsupportedModel
from ..source.identify import CONFIG, read_object

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")  # SpecForge's layout
KINDS = ("llama", "qwen3")  # the layers that speculators has
_LAYER, _IDS = "transformer_layer_config", "eagle_aux_hidden_state_layer_ids"

_OWN = {
    "draft_vocab_size", "target_hidden_size", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", _IDS,
}  # fmt: skip
# How it was trained and saved, and for which model.
_HARMLESS = {
    "architectures", "auto_map", "embed_requires_grad", "has_no_defaults_at_init", "speculators_config",
    "speculators_model_type", "speculators_version", "target_model_type", "torch_dtype", "dtype",
    "transformers_version", "tie_word_embeddings",
}  # fmt: skip
# What SpecForge's configurations take over from their target's, and its layer does not read.
_UNREAD = {"decoder_sparse_step", "max_window_layers", "sliding_window", "use_sliding_window", "layer_types"}
_OLD_ROPE = {"rope_theta", "rope_scaling"}  # which transformers still takes


@dataclass(frozen=True)
class EagleConfig:
    """What a drafter is.

    text: transformers' configuration of its layers. taps: behind how many of the model's layers hidden states are
    taken. draft_vocab: tokens that it can guess. target_hidden: the model's hidden size. norm_before_residual: the
    first layer adds to the normed hidden state. norm_before_fc: the joined taps are normed, fc_norm: each of them is.
    norm_output: it goes on from the normed hidden state (EAGLE-3.1).
    """

    text: Any
    taps: tuple[int, ...]
    draft_vocab: int
    target_hidden: int
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False


def read_config(directory: Path, num_layers: int) -> EagleConfig:
    """What DIRECTORY/config.json says, for a model of `num_layers` layers. CheckpointError where it is no EAGLE-3
    drafter's or makes no sense, UnsupportedModel for a field that is not known."""
    path = directory / CONFIG
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist", "give the directory of an EAGLE-3 drafter")
    found = read_object(path)
    if _LAYER in found or "speculators_model_type" in found:
        _expect(path, found, "speculators_model_type", ("eagle3",))
        layer = found.get(_LAYER)
        if not isinstance(layer, dict):
            raise CheckpointError(f"{path}: field {_LAYER!r} is no object")
        own = {name: value for name, value in found.items() if name != _LAYER}
        _refuse_unknown(path, own, _OWN | _HARMLESS)
        text = _layers(path, {"model_type": "qwen3", **layer})
    else:
        names = found.get("architectures")
        if not isinstance(names, list) or not {*names} & {*ARCHITECTURES}:
            hint = f"icc reads those of architecture {ARCHITECTURES[0]}, and those that speculators wrote"
            raise CheckpointError(f"{path}: field 'architectures' is {names!r}: not an EAGLE-3 drafter", hint)
        own = found
        text = _layers(path, {n: v for n, v in found.items() if n not in _OWN | {"eagle_config", "target_model_type"}})
    return _drafter(path, own, text, num_layers)


def _drafter(path: Path, own: Mapping[str, Any], text: Any, num_layers: int) -> EagleConfig:
    _expect(path, own, "tie_word_embeddings", (False, None))
    flags = {n: own.get(n, False) for n in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")}
    for name in flags:
        _expect(path, own, name, (True, False, None))
    if flags["norm_before_fc"] and flags["fc_norm"]:
        raise CheckpointError(f"{path}: fields 'norm_before_fc' and 'fc_norm' are both true, they exclude each other")
    draft_vocab = _count(path, own, "draft_vocab_size", text.vocab_size)
    if draft_vocab > text.vocab_size:
        raise CheckpointError(f"{path}: field 'draft_vocab_size' is {draft_vocab}, beyond vocab_size {text.vocab_size}")
    target = _count(path, own, "target_hidden_size", text.hidden_size)
    bools = {name: bool(value) for name, value in flags.items()}
    return EagleConfig(text, _taps(path, own, num_layers), draft_vocab, target, **bools)


def _taps(path: Path, own: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Behind how many layers: `eagle_config` names the layers, counted from 0, and the field of that name outside it,
    as vLLM reads it, how many come before. SpecForge's and speculators' own choice is one."""
    nested = own.get("eagle_config") or {}
    if not isinstance(nested, dict):
        raise CheckpointError(f"{path}: field 'eagle_config' is no object")
    _refuse_unknown(path, nested, {_IDS, "use_aux_hidden_state"}, "eagle_config.")
    _expect(path, nested, "use_aux_hidden_state", (True, None))
    if (named := nested.get(_IDS)) is not None:
        field, shift = f"eagle_config.{_IDS}", 1
    else:
        field, shift, named = _IDS, 0, own.get(_IDS)
    if named is None:
        if num_layers < 4:
            raise CheckpointError(f"{path}: there is no field {_IDS!r}, and the model has only {num_layers} layers")
        return 2, num_layers // 2, num_layers - 3
    whole = isinstance(named, list) and named and all(isinstance(i, int) and not isinstance(i, bool) for i in named)
    if not whole or not all(0 < i + shift <= num_layers for i in named):
        raise CheckpointError(f"{path}: field {field!r} is {named!r}, and the model has {num_layers} layers")
    return tuple(i + shift for i in named)


def _layers(path: Path, fields: dict[str, Any]) -> Any:
    """transformers' configuration of the draft layers."""
    from transformers import AutoConfig

    _expect(path, fields, "model_type", KINDS)
    own = set(AutoConfig.for_model(fields["model_type"]).to_dict())
    _refuse_unknown(path, fields, own | _HARMLESS | _UNREAD | _OLD_ROPE)
    _expect(path, fields, "use_sliding_window", (False, None))
    kinds = fields.get("layer_types") or []
    if {*kinds} - {"full_attention"}:
        raise UnsupportedModel(f"{path}: field 'layer_types' is {kinds!r}: icc reads drafters with full attention")
    given = {name: value for name, value in fields.items() if name not in _HARMLESS | (_UNREAD - own)}
    scaling = given.get("rope_scaling") or {}
    if isinstance(scaling, dict) and scaling.get("rope_type", scaling.get("type")) == "mrope":
        del given["rope_scaling"]  # of text, the three positions are one
    try:
        text: Any = AutoConfig.for_model(**given, tie_word_embeddings=False)
    except MemoryError:
        raise
    except Exception as error:  # whatever transformers finds wrong with a value
        raise CheckpointError(f"{path}: {' '.join(str(error).split())[:200]}") from error
    for name in ("hidden_size", "vocab_size", "num_hidden_layers", "intermediate_size", "num_attention_heads"):
        _count(path, fields, name, getattr(text, name))
    return text


def _refuse_unknown(path: Path, fields: Mapping[str, Any], known: set[str], inside: str = "") -> None:
    if unknown := sorted(fields.keys() - known):
        hint = "icc reads EAGLE-3 drafters as SpecForge and speculators write them"
        raise UnsupportedModel(f"{path}: field {inside + unknown[0]!r} is not known, and may change the drafter", hint)


def _expect(path: Path, fields: Mapping[str, Any], name: str, values: tuple[Any, ...]) -> None:
    value = fields.get(name)
    if not any(type(value) is type(one) and value == one for one in values):
        raise UnsupportedModel(f"{path}: field {name!r} is {value!r}, icc reads {' or '.join(map(repr, values))}")


def _count(path: Path, fields: Mapping[str, Any], name: str, unset: int) -> int:
    value = unset if fields.get(name) is None else fields[name]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(f"{path}: field {name!r} is {value!r}, not a count")
    return value
