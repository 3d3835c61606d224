"""Reads config.json of a DFlash drafter (Chen et al. 2026): the configuration of its layers, the length of its blocks
and the model's layers that it reads; some fields are in `dflash_config`.

Two forms are known: z-lab's (`DFlashDraftModel`) and transformers' (`MuseGlimmerAssistantModel`). An unknown field is
refused. Fields that do not change the order of logits are ignored.
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
_ORDERLY = {"output_multiplier", "final_logit_softcapping"}  # fields about logits that keep their order
_EITHER = {"block_size", "mask_token_id", _IDS, "num_target_layers", "input_embedding_scale", *_ORDERLY}
_NAMED = {"mask_token", "projector_type", "attention_mode", "causal"}  # only in dflash_config
_OF_LAYERS = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "rms_norm_eps", "rope_parameters", "max_position_embeddings", "sliding_window", "layer_types", "hidden_act",
    "attention_dropout",
)  # fmt: skip


@dataclass(frozen=True)
class BlockConfig:
    """The configuration of a drafter.

    text: transformers' configuration of its layers. taps: the hidden states that it reads, each given as the number of
    model layers before it. block: tokens of a block, including the known token before the guesses. mask_token: the id
    of the tokens to guess. masks: one per layer. scale: factor of the embeddings.
    """

    text: Any
    taps: tuple[int, ...]
    block: int
    mask_token: int
    masks: tuple[AttentionMask, ...]
    scale: float = 1.0


def read_config(directory: Path, num_layers: int, vocab_size: int) -> BlockConfig:
    """Read DIRECTORY/config.json, for a model of `num_layers` layers and `vocab_size` tokens. CheckpointError if it is
    not a DFlash drafter's or its values are invalid, UnsupportedModel for an unknown field, UsageError if it is for
    another model."""
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
    """The configuration of the layers of transformers' own class, which are Qwen3's."""
    from transformers import AutoConfig

    try:
        known = {*AutoConfig.for_model(fields["model_type"]).to_dict()}
        config: Any = AutoConfig.for_model(**fields)
    except MemoryError:
        raise
    except Exception as error:  # any error of transformers about a value or the model type
        raise CheckpointError(f"{path}: {' '.join(str(error).split())[:200]}") from error
    refuse_unknown(path, fields, known | HARMLESS, READ)
    own = config.to_dict()
    text = {name: own[name] for name in _OF_LAYERS} | {"vocab_size": vocab_size, "use_sliding_window": True}
    return layers_config(path, {"model_type": "qwen3", **text}, READ, windows=True)


def _taps(path: Path, own: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """The number of layers before each hidden state that is read. The field names layers, counted from 0. The last
    layer is refused: for it, published code reads the hidden state after the model's last norm."""
    named = own[_IDS]
    whole = isinstance(named, list) and named and all(type(i) is int for i in named)
    if not whole or not all(0 <= i < num_layers - 1 for i in named):
        message = f"{path}: field {_IDS!r} is {named!r}, the model has {num_layers} layers"
        raise CheckpointError(message, f"it names layers before the last, 0 to {num_layers - 2}")
    return tuple(i + 1 for i in named)


def _masks(path: Path, text: Any, causal: bool | None, block: int) -> tuple[AttentionMask, ...]:
    """One mask per layer. causal: whether layers see no later token of a block; None: sliding-window layers see none,
    others do."""
    found: list[AttentionMask] = []
    for kind in text.layer_types:
        window = (text.sliding_window or 0) if kind == "sliding_attention" else 0
        only_before = kind == "sliding_attention" if causal is None else causal
        ahead = 0 if only_before else ALL_AHEAD if not window or window >= block else window - 1
        found.append(AttentionMask(window=window, ahead=ahead))
    return tuple(found)


def _both_ways(path: Path, text: Any, causal: bool | None, block: int) -> tuple[AttentionMask, ...]:
    """One mask per layer, as in transformers' class: a window has equally many tokens in both directions, plus the
    token itself."""
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
