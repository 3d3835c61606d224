"""Reads drafters that have their own directory: fields of config.json, and tensors by name. An unknown field or tensor
is refused unless it is known to change nothing."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from ..errors import CheckpointError, TensorError, UnsupportedModel, UsageError
from ..weights.handles import Weight, derive
from .source.checkpoint import open_checkpoint
from .source.source import ModelSource

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
KINDS = ("llama", "qwen3")  # kinds of layers that can be read
# Fields about training and saving, and about the drafter's model.
HARMLESS = {
    "architectures", "auto_map", "embed_requires_grad", "has_no_defaults_at_init", "speculators_config",
    "speculators_model_type", "speculators_version", "target_model_type", "torch_dtype", "dtype",
    "transformers_version", "tie_word_embeddings",
}  # fmt: skip
# Fields copied from the target model's configuration, which full-attention layers do not read.
_UNREAD = {"decoder_sparse_step", "max_window_layers", "sliding_window", "use_sliding_window", "layer_types"}
_COUNTS = {
    "hidden_size", "vocab_size", "num_hidden_layers", "intermediate_size", "num_attention_heads", "num_key_value_heads",
    "head_dim",
}  # fmt: skip
_OLD_ROPE = {"rope_theta", "rope_scaling"}  # transformers still accepts them
# Needed for training only; or the model has the tensor, or a rotary module computes it.
_UNREAD_TENSORS = re.compile(r"verifier_norm\.weight|verifier_lm_head\.weight|(.*\.)?rotary_emb\.inv_freq")


def layers_config(path: Path, fields: dict[str, Any], read: str, windows: bool = False) -> Any:
    """transformers' configuration of the draft layers, from the fields of `path`. read: a hint that says which drafters
    icc reads. windows: whether layers may have windows. UnsupportedModel for an unknown field, CheckpointError for an
    invalid value."""
    from transformers import AutoConfig

    expect(path, fields, "model_type", KINDS)
    own = set(AutoConfig.for_model(fields["model_type"]).to_dict())
    refuse_unknown(path, fields, own | HARMLESS | _UNREAD | _OLD_ROPE, read)
    if not windows:
        expect(path, fields, "use_sliding_window", (False, None))
    kinds = fields.get("layer_types") or []
    if {*kinds} - {"full_attention", *(["sliding_attention"] if windows else [])}:
        raise UnsupportedModel(f"{path}: field 'layer_types' is {kinds!r}: icc reads drafters with full attention")
    for name in _COUNTS & fields.keys():
        count(path, fields, name, 1)
    given = {name: value for name, value in fields.items() if name not in HARMLESS | (_UNREAD - own)}
    scaling = given.get("rope_scaling") or {}
    if isinstance(scaling, dict) and scaling.get("rope_type", scaling.get("type")) == "mrope":
        del given["rope_scaling"]  # for text, the three positions are equal
    try:
        text: Any = AutoConfig.for_model(**given, tie_word_embeddings=False)
    except MemoryError:
        raise
    except Exception as error:  # any error of transformers about a value
        raise CheckpointError(f"{path}: {' '.join(str(error).split())[:200]}") from error
    heads, groups = text.num_attention_heads, text.num_key_value_heads
    if heads % groups:
        raise CheckpointError(f"{path}: field 'num_key_value_heads' is {groups}, which does not divide {heads} heads")
    return text


def refuse_unknown(path: Path, fields: Mapping[str, Any], known: set[str], read: str, inside: str = "") -> None:
    """Raise UnsupportedModel if a field is not in `known`. inside: prefix of the object that holds the fields, for the
    message."""
    if unknown := sorted(fields.keys() - known):
        message = f"{path}: field {inside + unknown[0]!r} is not known, and may change the drafter"
        raise UnsupportedModel(message, read)


def expect(path: Path, fields: Mapping[str, Any], name: str, values: tuple[Any, ...]) -> None:
    """Raise UnsupportedModel if a field's value is not one of `values`; a missing field counts as None."""
    value = fields.get(name)
    if not any(type(value) is type(one) and value == one for one in values):
        raise UnsupportedModel(f"{path}: field {name!r} is {value!r}, icc reads {' or '.join(map(repr, values))}")


def count(path: Path, fields: Mapping[str, Any], name: str, unset: int) -> int:
    """The value of a field, `unset` if it is missing. CheckpointError if it is not an integer of 1 or more."""
    value = unset if fields.get(name) is None else fields[name]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise CheckpointError(f"{path}: field {name!r} is {value!r}, not a count")
    return value


class DrafterTensors:
    """The tensors of a directory. named: maps a stored name to the name by which it is asked for. read: a hint that
    says which drafters icc reads."""

    def __init__(self, directory: Path, read: str, named: Callable[[str], str]) -> None:
        self._directory, self._read = directory, read
        self._stored = {named(stored): (stored, weight) for stored, weight in open_checkpoint(directory).items()}
        self._wanted: set[str] = set()

    def find(self, name: str, shape: Sequence[int]) -> Weight | None:
        """The tensor of that name; None if there is none. TensorError if it has another shape."""
        self._wanted.add(name)
        if name not in self._stored:
            return None
        stored, weight = self._stored[name]
        if tuple(weight.shape) != tuple(shape):
            raise TensorError(
                stored,
                f"has shape {list(weight.shape)}, config.json says {list(shape)}",
                f"{self._directory} does not match its configuration",
            )
        return weight

    def get(self, name: str, shape: Sequence[int]) -> Weight:
        """The tensor of that name. TensorError if it is missing, has another shape, or has no float dtype."""
        weight = self.find(name, shape)
        if weight is None:
            raise TensorError(name, f"is missing from {self._directory}", "config.json asks for it")
        if not weight.dtype.is_floating_point:
            raise TensorError(
                self._stored[name][0], f"has dtype {str(weight.dtype).removeprefix('torch.')}, not floats"
            )
        return weight

    def check_read(self) -> None:
        """Raise UnsupportedModel for a tensor that was never asked for, unless it is known to change nothing, and
        TensorError for a tensor with NaN or Inf."""
        for name, (stored, _) in sorted(self._stored.items()):
            if name not in self._wanted and not _UNREAD_TENSORS.fullmatch(name):
                message = f"{self._directory}: tensor {stored!r} is not known, and may change the drafter"
                raise UnsupportedModel(message, self._read)
        check_numbers(weight for name, (_, weight) in self._stored.items() if name in self._wanted)

    def checked(self, shapes: Mapping[str, Sequence[int]]) -> dict[str, Weight]:
        """The tensors of these names, checked as in `get`. TensorError as `get`."""
        return {name: self.get(name, shape) for name, shape in shapes.items()}


def check_numbers(weights: Iterable[Weight]) -> None:
    """Read a drafter's weights once before the model is quantized, which may take hours, so that errors appear early.
    TensorError if a tensor holds NaN or Inf."""
    for weight in weights:
        weight.load()


def shared(name: str, source: ModelSource, hidden: int, vocabulary: Tensor | None = None) -> Weight:
    """The model's own EMBEDDING or HEAD, [tokens, hidden], for a drafter without one. vocabulary: [tokens], the rows of
    the head that the drafter uses; None: all. UsageError if the weight does not have `hidden` columns."""
    whole: Any = source.build(False, "generate")
    part = whole.get_input_embeddings() if name == EMBEDDING else whole.get_output_embeddings()
    path = next((path for path, module in whole.named_modules() if module is part), None)
    theirs: Mapping[str, Weight] = source.weights(whole)
    weight = theirs.get(f"{path}.weight")
    if weight is None or weight.shape[-1] != hidden:
        raise UsageError(f"--spec: the drafter has no tensor {name!r}, and the model's does not fit it")
    if name == HEAD and vocabulary is not None:
        return derive(lambda rows: rows[vocabulary.to(rows.device)], weight)
    return weight
