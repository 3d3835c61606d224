"""What config.json says of a DFlash drafter (Chen et al. 2026): the configuration of its layers, and besides, some of
it in `dflash_config`, how long its blocks are and which of the model's layers it reads.

As z-lab publishes them (`DFlashDraftModel`), and as transformers has one (`MuseGlimmerAssistantModel`). A field that
nobody knows is refused, unless it is known to change nothing; what changes no order of logits is read by nobody.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from ...errors import CheckpointError, UnsupportedModel, UsageError
from ...ops.attention_spec import ALL_AHEAD, AttentionMask
from ..drafter_files import HARMLESS, count, expect, layers_config, refuse_unknown
from ..source.identify import CONFIG, read_object

ARCHITECTURES = ("DFlashDraftModel", "MuseGlimmerAssistantModel")
READ = "icc reads DFlash drafters as z-lab publishes them, and transformers' MuseGlimmerAssistantModel"
_NESTED, _IDS, _CAUSAL = "dflash_config", "target_layer_ids", "is_causal"
_ORDERLY = {"output_multiplier", "final_logit_softcapping"}  # of logits, whose order they keep
_EITHER = {"block_size", "mask_token_id", _IDS, "num_target_layers", "input_embedding_scale", *_ORDERLY}
_NAMED = {"mask_token", "projector_type", "attention_mode", "causal"}  # in dflash_config alone
_OF_LAYERS = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "rms_norm_eps", "rope_parameters", "max_position_embeddings", "sliding_window", "layer_types", "hidden_act",
    "attention_dropout",
)  # fmt: skip


@dataclass(frozen=True)
class BlockConfig:
    """What a drafter is.

    text: transformers' configuration of its layers. taps: behind how many of the model's layers hidden states are
    taken. block: tokens of a block, the known one before the guesses among them. mask_token: stands for the others.
    masks: what each layer sees. scale: of the embeddings.
    """

    text: Any
    taps: tuple[int, ...]
    block: int
    mask_token: int
    masks: tuple[AttentionMask, ...]
    scale: float = 1.0


def read_config(directory: Path, num_layers: int, vocab_size: int) -> BlockConfig:
    """What DIRECTORY/config.json says, for a model of so many layers and tokens. CheckpointError where it is no DFlash
    drafter's or makes no sense, UnsupportedModel for a field that is not known, UsageError where it is for another
    model."""
    path = directory / CONFIG
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist", "give the directory of a DFlash drafter")
    found = read_object(path)
    names = found.get("architectures")
    known = [name for name in ARCHITECTURES if isinstance(names, list) and name in names]
    if not known:
        raise CheckpointError(f"{path}: field 'architectures' is {names!r}: not a DFlash drafter", READ)
    nested = found.get(_NESTED) or {}
    if not isinstance(nested, dict):
        raise CheckpointError(f"{path}: field {_NESTED!r} is no object")
    refuse_unknown(path, nested, _EITHER | _NAMED, READ, f"{_NESTED}.")
    expect(path, nested, "projector_type", ("dflash", None))
    expect(path, nested, "attention_mode", ("gqa", "mha", None))
    fields = {name: value for name, value in found.items() if name not in _EITHER | {_NESTED, _CAUSAL}}
    if known[0] == ARCHITECTURES[0]:
        text, masks = layers_config(path, {"model_type": "qwen3", **fields}, READ, windows=True), _masks
    else:
        text, masks = _as_transformers_has_it(path, fields, vocab_size), _both_ways
    if "sliding_attention" in text.layer_types:
        count(path, {}, "sliding_window", text.sliding_window or 0)
    own = {name: nested.get(name, found.get(name)) for name in _EITHER} | {
        _CAUSAL: nested.get("causal") if found.get(_CAUSAL) is None else found[_CAUSAL]
    }
    expect(path, own, _CAUSAL, (True, False, None))
    if own["num_target_layers"] not in (None, num_layers):
        message = f"num_target_layers is {own['num_target_layers']}, the model's layers are {num_layers}"
        raise UsageError(f"--spec dflash:{directory}: {message}")
    block = count(path, own, "block_size", 16)
    if not 2 <= block <= 64:
        raise UnsupportedModel(f"{path}: field 'block_size' is {block}, icc reads blocks of 2 to 64 tokens")
    mask_token = own["mask_token_id"]
    if type(mask_token) is not int or not 0 <= mask_token < vocab_size:
        raise CheckpointError(f"{path}: field 'mask_token_id' is {mask_token!r}, the model has {vocab_size} tokens")
    return BlockConfig(
        text, _taps(path, own, num_layers), block, mask_token, masks(path, text, own[_CAUSAL], block), _scale(path, own)
    )


def _as_transformers_has_it(path: Path, fields: dict[str, Any], vocab_size: int) -> Any:
    """The layers of transformers' own class, which are Qwen3's."""
    from transformers import AutoConfig

    try:
        known = {*AutoConfig.for_model(fields["model_type"]).to_dict()}
        config: Any = AutoConfig.for_model(**fields)
    except MemoryError:
        raise
    except Exception as error:  # whatever transformers finds wrong with a value, or with the model type
        raise CheckpointError(f"{path}: {' '.join(str(error).split())[:200]}") from error
    refuse_unknown(path, fields, known | HARMLESS, READ)
    own = config.to_dict()
    text = {name: own[name] for name in _OF_LAYERS} | {"vocab_size": vocab_size, "use_sliding_window": True}
    return layers_config(path, {"model_type": "qwen3", **text}, READ, windows=True)


def _taps(path: Path, own: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Behind how many layers: the field names these, counted from 0. Of the last one, published code reads what comes
    behind the model's last norm."""
    named = own[_IDS]
    whole = isinstance(named, list) and named and all(type(i) is int for i in named)
    if not whole or not all(0 <= i < num_layers - 1 for i in named):
        message = f"{path}: field {_IDS!r} is {named!r}, the model has {num_layers} layers"
        raise CheckpointError(message, f"it names layers before the last, 0 to {num_layers - 2}")
    return tuple(i + 1 for i in named)


def _masks(path: Path, text: Any, causal: bool | None, block: int) -> tuple[AttentionMask, ...]:
    """Layers with windows see no later token of a block unless `is_causal` says so, others do."""
    found: list[AttentionMask] = []
    for kind in text.layer_types:
        window = (text.sliding_window or 0) if kind == "sliding_attention" else 0
        only_before = kind == "sliding_attention" if causal is None else causal
        ahead = 0 if only_before else ALL_AHEAD if not window or window >= block else window - 1
        found.append(AttentionMask(window=window, ahead=ahead))
    return tuple(found)


def _both_ways(path: Path, text: Any, causal: bool | None, block: int) -> tuple[AttentionMask, ...]:
    """Windows of transformers' class: as many tokens in both directions, and the own one."""
    window = (text.sliding_window or 0) + 1
    ahead = ALL_AHEAD if window >= block else window - 1
    return tuple(
        AttentionMask(window=window, ahead=ahead) if kind == "sliding_attention" else AttentionMask(ahead=ALL_AHEAD)
        for kind in text.layer_types
    )


def _scale(path: Path, own: Mapping[str, Any]) -> float:
    scale = 1.0 if own["input_embedding_scale"] is None else own["input_embedding_scale"]
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not 0 < scale < inf:
        raise CheckpointError(f"{path}: field 'input_embedding_scale' is {scale!r}, not a number above 0")
    multiplier = own["output_multiplier"]
    if multiplier is not None and (not isinstance(multiplier, int | float) or not multiplier > 0):
        raise CheckpointError(f"{path}: field 'output_multiplier' is {multiplier!r}, not a number above 0")
    return float(scale)
