"""An earlier engine whose program and kernels are used for other weights of the same shapes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from ...runtime.format.decoding import decode
from ...runtime.format.forms import CompiledForm, read_forms
from ...runtime.format.load import Engine, open_engine
from ...runtime.format.manifest import BaseEngine, Limits, delta_file, weights_file
from ...runtime.format.program import WeightEntry
from ...runtime.format.prompts import PROMPTS_FILE, CompiledPrompt, CompiledPrompts
from ...runtime.format.weights import MappedWeights
from ..backends.base import Built
from ..errors import MismatchError, UsageError
from ..program.program import Program, program_of

if TYPE_CHECKING:  # imports torch
    from ..graph.graph import ModelInfo

_AGAIN = "compile the checkpoint by itself"
_SHAPES = ("hidden_size", "num_layers", "num_parameters")


@dataclass(frozen=True)
class EarlierEngine:
    """An opened engine, and its program with the steps that the runtime does not read. as_base: the new engine is a
    delta, which holds the weights that differ and takes everything else from this one."""

    engine: Engine
    program: Program
    as_base: bool = False

    def close(self) -> None:
        """Unmap its weights."""
        for weights in self.__dict__.get("_weights", [])[1:]:
            weights.close()
        self.engine.close()

    def check_model(self, info: ModelInfo) -> None:
        """Raise MismatchError if a model has other sizes. To be called before anything is quantized."""
        for name in _SHAPES:
            have, given = getattr(self.engine.manifest.model, name), getattr(info, name)
            if have != given:
                words = "parameters (are other weights tied?)" if name == "num_parameters" else name
                said = f"{words}: the engine has {have}, the checkpoint {given}"
                raise MismatchError(f"{self.engine.path}: {said}", _AGAIN)

    def built(self, lowered: Program, limits: Limits) -> Built:
        """The engine's kernels. MismatchError names what differs if the program or the limits are not the engine's
        own."""
        if limits != self.engine.manifest.limits:
            said = f"the engine was compiled for {_words(self.engine.manifest.limits)}, the checkpoint is for"
            raise MismatchError(f"{self.engine.path}: {said} {_words(limits)}", _AGAIN)
        own = msgspec.structs.replace(self.program, plan=None, speculation=None)
        if difference := first_difference(own, lowered):
            raise MismatchError(f"{self.engine.path}: {difference}", _AGAIN)
        manifest = self.engine.manifest
        return Built(self.program, tuple(manifest.main.libraries), manifest.gpu)

    def prompts(self) -> list[CompiledPrompt]:
        """The engine's compiled prompts without their KV, which is different with other weights."""
        if PROMPTS_FILE not in self.engine.manifest.files:
            return []
        found = decode(self.engine.files.read(PROMPTS_FILE), PROMPTS_FILE, CompiledPrompts)
        return [msgspec.structs.replace(one, file="", numbers=[]) for one in found.prompts]

    def forms_and(self, own: Sequence[CompiledForm]) -> list[CompiledForm]:
        """The engine's compiled grammars, and others. Empty for a delta without others: it finds them in its base."""
        if self.as_base and not own:
            return []
        known = read_forms(self.engine.files, self.engine.manifest)
        return [*known, *(form for form in own if form not in known)]

    def copy(self, folder: str, stage: Path) -> None:
        """Copy the files of a folder into an engine directory; nothing is copied for a delta."""
        for name in () if self.as_base else self.engine.manifest.files:
            if name.startswith(f"{folder}/"):
                (stage / name).parent.mkdir(parents=True, exist_ok=True)
                (stage / name).write_bytes(self.engine.files.read(name))

    def has(self, name: str, packed: np.ndarray, rank: int = 0) -> bool:
        """Whether a weight has these bytes, uint8 [nbytes], on a rank."""
        return np.array_equal(self._weights[rank].view(name), packed)

    @cached_property
    def _weights(self) -> list[MappedWeights]:
        """The weights of each rank."""
        files = (weights_file(rank) for rank in range(1, self.engine.manifest.ranks))
        return [self.engine.weights, *(MappedWeights(self.engine.files.map(file), file) for file in files)]

    def base_of(self, delta: Path) -> BaseEngine:
        """How the manifest of a delta at `delta` refers to this engine."""
        path = os.path.relpath(self.engine.path.resolve(), delta.resolve())
        return BaseEngine(self.engine.manifest.digest, path, delta_file())


def open_earlier(path: Path, as_base: bool = False) -> EarlierEngine:
    """Open an engine directory and verify all files. EngineFormatError and its subclasses as for `open_engine`;
    UsageError if `as_base` and the engine is itself a delta."""
    engine = open_engine(path)
    if as_base and engine.manifest.base is not None:
        raise UsageError(f"--like {path}: that is a delta itself", f"give its base: {engine.manifest.base.path}")
    return EarlierEngine(engine, program_of(engine), as_base)


def first_difference(own: Program, other: Program) -> str:
    """The first difference between an engine's program and another, in words, weights first; "" if they are equal."""
    if own == other:
        return ""
    for name in [*own.weights, *other.weights]:
        have, given = own.weights.get(name), other.weights.get(name)
        if have != given:
            return f"{name}: the engine has {_shown(have)}, the other {_shown(given)}"
    if own.kv != other.kv:
        return "the KV cache has another layout"
    for number, (have, given) in enumerate(zip_longest(own.steps, other.steps)):
        if have != given:
            return f"step {number} {_step_difference(have, given)}"
    fields = (name for name in own.__struct_fields__ if getattr(own, name) != getattr(other, name))
    return f"the programs have other {next(fields)}"


def _words(limits: Limits) -> str:
    return ", ".join(f"{name} {value}" for name, value in msgspec.structs.asdict(limits).items())


def _shown(weight: WeightEntry | None) -> str:
    return "none" if weight is None else f"{weight.format}{weight.shape}"


def _step_difference(have: Any, given: Any) -> str:
    """How a step of the engine differs from the other program's: the ops, or the first field if the ops are equal."""
    own, other = ({} if step is None else msgspec.to_builtins(step) for step in (have, given))
    if own.get("op") != other.get("op"):
        return f"is {own.get('op', 'missing')}, of the other {other.get('op', 'missing')}"
    name = next(name for name in {**own, **other} if own.get(name) != other.get(name))
    return f"is {own['op']} with {name} {_value(own.get(name))}, of the other {_value(other.get(name))}"


def _value(value: Any) -> str:
    return msgspec.json.encode(value).decode()[:100]
