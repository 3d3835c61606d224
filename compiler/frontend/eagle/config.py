"""Reads config.json of an EAGLE-3 drafter, in the two layouts that are published.

SpecForge's (and SafeAILab's) is the configuration of the draft layer plus a few fields. speculators' has the
configuration of the layers in `transformer_layer_config`. A field that neither this file nor the layers' configuration
class knows is refused, unless it is known to change nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import CheckpointError
from ..drafter_files import HARMLESS, count, expect, layers_config, refuse_unknown
from ..source.identify import CONFIG, read_object

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")  # SpecForge's layout
READ = "icc reads EAGLE-3 drafters as SpecForge and speculators write them"
_LAYER, _IDS = "transformer_layer_config", "eagle_aux_hidden_state_layer_ids"

_OWN = {
    "draft_vocab_size", "target_hidden_size", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", _IDS,
}  # fmt: skip


@dataclass(frozen=True)
class EagleConfig:
    """The configuration of a drafter.

    text: transformers' configuration of its layers. taps: the hidden states that it reads, each given as the number of
    model layers before it. draft_vocab: number of tokens that it can guess. target_hidden: the model's hidden size.
    norm_before_residual: the first layer adds to the normed hidden state. norm_before_fc: the concatenated taps are
    normed; fc_norm: each tap is. norm_output: the next guess starts from the normed hidden state (EAGLE-3.1).
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
    """Read DIRECTORY/config.json, for a model of `num_layers` layers. CheckpointError if it is not an EAGLE-3 drafter's
    or its values are invalid, UnsupportedModel for an unknown field."""
    path = directory / CONFIG
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist", "give the directory of an EAGLE-3 drafter")
    found = read_object(path)
    if _LAYER in found or "speculators_model_type" in found:
        expect(path, found, "speculators_model_type", ("eagle3",))
        layer = found.get(_LAYER)
        if not isinstance(layer, dict):
            raise CheckpointError(f"{path}: field {_LAYER!r} is no object")
        own = {name: value for name, value in found.items() if name != _LAYER}
        refuse_unknown(path, own, _OWN | HARMLESS, READ)
        text = layers_config(path, {"model_type": "qwen3", **layer}, READ)
    else:
        names = found.get("architectures")
        if not isinstance(names, list) or not {*names} & {*ARCHITECTURES}:
            hint = f"icc reads those of architecture {ARCHITECTURES[0]}, and those that speculators wrote"
            raise CheckpointError(f"{path}: field 'architectures' is {names!r}: not an EAGLE-3 drafter", hint)
        own = found
        fields = {n: v for n, v in found.items() if n not in _OWN | {"eagle_config", "target_model_type"}}
        text = layers_config(path, fields, READ)
    return _drafter(path, own, text, num_layers)


def _drafter(path: Path, own: Mapping[str, Any], text: Any, num_layers: int) -> EagleConfig:
    expect(path, own, "tie_word_embeddings", (False, None))
    flags = {n: own.get(n, False) for n in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")}
    for name in flags:
        expect(path, own, name, (True, False, None))
    if flags["norm_before_fc"] and flags["fc_norm"]:
        raise CheckpointError(f"{path}: fields 'norm_before_fc' and 'fc_norm' are both true, they exclude each other")
    draft_vocab = count(path, own, "draft_vocab_size", text.vocab_size)
    if draft_vocab > text.vocab_size:
        raise CheckpointError(f"{path}: field 'draft_vocab_size' is {draft_vocab}, beyond vocab_size {text.vocab_size}")
    target = count(path, own, "target_hidden_size", text.hidden_size)
    bools = {name: bool(value) for name, value in flags.items()}
    return EagleConfig(text, _taps(path, own, num_layers), draft_vocab, target, **bools)


def _taps(path: Path, own: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """The number of layers before each hidden state that is read. In `eagle_config` the field names layers, counted
    from 0; outside it, as vLLM reads it, it holds the number of layers before. Default: that of SpecForge and
    speculators."""
    nested = own.get("eagle_config") or {}
    if not isinstance(nested, dict):
        raise CheckpointError(f"{path}: field 'eagle_config' is no object")
    refuse_unknown(path, nested, {_IDS, "use_aux_hidden_state"}, READ, "eagle_config.")
    expect(path, nested, "use_aux_hidden_state", (True, None))
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
