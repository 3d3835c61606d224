"""Reads transformers' tables of model types from its source files, because importing it takes seconds and a refusal
should not."""

from __future__ import annotations

import ast
import functools
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Families:
    """The model types of the installed transformers, by the kinds of classes that exist for them.

    known: types with any class.
    causal: types that generate text, each with the name of its class.
    masked: types that fill in masked tokens.
    seq2seq: encoder-decoder types, unless the class is also the one in `causal`.
    sorting: types that classify texts.
    plain: types with a class whose output is hidden states.
    reading: types whose encoder can be built alone.
    seeing: types that read images besides text.
    """

    known: frozenset[str]
    causal: dict[str, str]
    masked: frozenset[str]
    seq2seq: frozenset[str]
    sorting: frozenset[str]
    plain: frozenset[str]
    reading: frozenset[str]
    seeing: frozenset[str]


@functools.cache
def families() -> Families | None:
    """Read the tables of the installed transformers. None if it is not installed, or if its tables have another form
    than version 5's."""
    spec = find_spec("transformers")
    if spec is None or not spec.submodule_search_locations:
        return None
    folder = Path(spec.submodule_search_locations[0]) / "models" / "auto"
    try:
        classes, configs = (_tables(folder / name) for name in ("modeling_auto.py", "auto_mappings.py"))
        causal = classes["MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"]
        known = {*configs["CONFIG_MAPPING_NAMES"], *causal, *classes["MODEL_MAPPING_NAMES"]}
        kinds = ("MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM", "SEQUENCE_CLASSIFICATION", "TEXT_ENCODING")
        seeing = classes["MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES"]
        masked, seq2seq, sorting, reading = (classes[f"MODEL_FOR_{kind}_MAPPING_NAMES"] for kind in kinds)
        rewriting = frozenset(kind for kind, name in seq2seq.items() if name != causal.get(kind))
    except (OSError, SyntaxError, KeyError):
        return None
    plain = classes["MODEL_MAPPING_NAMES"]
    return Families(frozenset(known), causal, *map(frozenset, (masked, rewriting, sorting, plain, reading, seeing)))


def _tables(file: Path) -> dict[str, dict[str, Any]]:
    """The tables `NAME = OrderedDict([(key, value), ...])` of a module whose keys and values are literals."""
    found: dict[str, dict[str, Any]] = {}
    for statement in ast.parse(file.read_text(encoding="utf-8")).body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call(args=[table])) if name.endswith("_NAMES"):
                try:
                    found[name] = dict(ast.literal_eval(table))
                except ValueError:
                    continue
    return found
