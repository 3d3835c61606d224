"""An engine that was compiled before: its program and kernels serve other weights of the same shapes."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ...runtime.format.load import Engine, open_engine
from ...runtime.format.manifest import Limits
from ...runtime.format.program import WeightEntry
from ..backends.base import Built
from ..errors import MismatchError
from ..program.program import Program, program_of

if TYPE_CHECKING:  # imports torch
    from ..graph.graph import ModelInfo

_AGAIN = "compile the checkpoint by itself"
_SHAPES = ("hidden_size", "num_layers", "num_parameters")


@dataclass(frozen=True)
class EarlierEngine:
    """An opened engine, and its program with the steps that the runtime does not read."""

    engine: Engine
    program: Program

    def check_model(self, info: ModelInfo) -> None:
        """MismatchError where a model has other sizes; told before anything is quantized."""
        for name in _SHAPES:
            have, given = getattr(self.engine.manifest.model, name), getattr(info, name)
            if have != given:
                words = "parameters (are other weights tied?)" if name == "num_parameters" else name
                said = f"{words}: the engine has {have}, the checkpoint {given}"
                raise MismatchError(f"{self.engine.path}: {said}", _AGAIN)

    def built(self, lowered: Program, limits: Limits) -> Built:
        """The kernels, for a program and limits that are the engine's own. MismatchError names what differs."""
        if limits != self.engine.manifest.limits:
            said = f"the engine was compiled for {_words(self.engine.manifest.limits)}, the checkpoint is for"
            raise MismatchError(f"{self.engine.path}: {said} {_words(limits)}", _AGAIN)
        own = msgspec.structs.replace(self.program, plan=None, speculation=None)
        if difference := first_difference(own, lowered):
            raise MismatchError(f"{self.engine.path}: {difference}", _AGAIN)
        manifest = self.engine.manifest
        return Built(self.program, tuple(manifest.main.libraries), manifest.gpu)

    def copy_kernels(self, stage: Path) -> None:
        """The files of the kernels, into an engine directory."""
        shutil.copytree(self.engine.path / "kernels", stage / "kernels", copy_function=shutil.copyfile)

    def copy_tokenizer(self, stage: Path) -> str | None:
        """The files of the tokenizer, likewise, for a checkpoint that has none; None for an engine without."""
        own = self.engine.manifest.tokenizer_dir
        if own is not None:
            shutil.copytree(self.engine.path / own, stage / own, copy_function=shutil.copyfile)
        return own


def open_earlier(path: Path) -> EarlierEngine:
    """An engine directory, all files verified. EngineFormatError and its kinds, as for `open_engine`."""
    engine = open_engine(path)
    return EarlierEngine(engine, program_of(engine))


def first_difference(own: Program, other: Program) -> str:
    """The first thing in which an engine's program differs from another, in words, weights first; "" for none."""
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
            return f"step {number} is {_step(have)}, of the other {_step(given)}"
    fields = (name for name in own.__struct_fields__ if getattr(own, name) != getattr(other, name))
    return f"the programs have other {next(fields)}"


def _words(limits: Limits) -> str:
    return ", ".join(f"{name} {value}" for name, value in msgspec.structs.asdict(limits).items())


def _shown(weight: WeightEntry | None) -> str:
    return "none" if weight is None else f"{weight.format}{weight.shape}"


def _step(step: Any) -> str:
    if step is None:
        return "missing"
    facts = msgspec.to_builtins(step)
    return f"{facts.pop('op', type(step).__name__)} {msgspec.json.encode(facts).decode()[:200]}"
