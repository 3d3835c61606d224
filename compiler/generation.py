"""Reads a checkpoint's generation_config.json: how to sample, and which tokens begin and end a text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from ..runtime.errors import bounds
from ..runtime.format.manifest import SAMPLING_BOUNDS, SamplingDefaults
from .errors import CheckpointError
from .frontend.source.identify import read_object

GENERATION_CONFIG = "generation_config.json"
# other settings of transformers' generate that change the tokens, each with the value that turns it off
_UNUSED: dict[str, float | None] = {
    "num_beams": 1, "num_beam_groups": 1, "penalty_alpha": 0, "typical_p": 1, "epsilon_cutoff": 0, "eta_cutoff": 0,
    "top_h": None, "no_repeat_ngram_size": 0, "encoder_repetition_penalty": 1, "bad_words_ids": None,
    "sequence_bias": None, "suppress_tokens": None, "begin_suppress_tokens": None, "forced_bos_token_id": None,
    "forced_eos_token_id": None, "exponential_decay_length_penalty": None, "guidance_scale": 1, "min_length": 0,
    "min_new_tokens": 0, "stop_strings": None,
}  # fmt: skip
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


def read_generation(folder: Path) -> dict[str, Any]:
    """The facts of generation_config.json; {} if there is no such file.

    CheckpointError if the file is damaged or no JSON object, or if a field that an engine reads has a value of a wrong
    type or one that no request could ask for.
    """
    path = folder / GENERATION_CONFIG
    if not path.is_file():
        return {}
    found = read_object(path)
    for name in (*SAMPLING_BOUNDS, *_TOKENS, "do_sample"):
        value = found.get(name)
        if value is not None and (wanted := _wanted(name, value)):
            raise CheckpointError(f"{path}: {name} is {str(value)[:60]!r}, not {wanted}", f"mend or remove {name}")
    for name, value in msgspec.structs.asdict(sampling_defaults(found)).items():
        low, high = SAMPLING_BOUNDS[name]
        if value is not None and not low <= value <= high:  # false for NaN too
            raise CheckpointError(
                f"{path}: {name} is {value!r}, not from {bounds(low, high)}", f"mend or remove {name}"
            )
    return found


def sampling_defaults(generation: dict[str, Any]) -> SamplingDefaults:
    """The sampling defaults, which count only if do_sample is true. If it is false, the temperature is 0; if it is
    missing, the temperature is None, see SamplingDefaults."""
    penalty = generation.get("repetition_penalty")
    if not generation.get("do_sample"):
        return SamplingDefaults(0.0 if generation.get("do_sample") is False else None, repetition_penalty=penalty)
    return SamplingDefaults(
        temperature=generation.get("temperature", 1.0),
        top_p=generation.get("top_p"),
        top_k=generation.get("top_k"),
        min_p=generation.get("min_p"),
        repetition_penalty=penalty,
    )


def unused_settings(generation: dict[str, Any]) -> list[str]:
    """The names of settings that generation_config.json asks for and an engine ignores."""
    return [name for name, nothing in _UNUSED.items() if generation.get(name) not in (None, nothing, [], {}, False)]


def _wanted(name: str, value: object) -> str:
    """What a field's value should be, in words; "" if the value is valid."""
    if name == "do_sample":
        return "" if isinstance(value, bool) else "true or false"
    if name in _TOKENS:
        ids = value if isinstance(value, list) and name == "eos_token_id" else [value]
        good = all(isinstance(one, int) and not isinstance(one, bool) for one in ids)
        return "" if good else "a token id"
    return "" if isinstance(value, int | float) and not isinstance(value, bool) else "a number"
