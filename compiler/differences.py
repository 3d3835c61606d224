"""The differences of two engines: options, facts, program, kernels, tensors, and the answers to canary prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from ..runtime.format.canaries import Canaries
from ..runtime.format.load import Engine
from ..runtime.format.operands import WeightOperand
from .backends.registry import backend_for
from .engine.earlier import EarlierEngine, first_difference, open_earlier
from .program.layout import Layout, Stored
from .recorded import REPORT_FILE, recorded_in
from .targets import find_target
from .weights.formats.dense import F32, I32

Progress = Callable[[str, int, int], None]
_TOLD = {"files", "digest", "programs", "canaries_file", "base"}  # fields of the manifest that are compared elsewhere


@dataclass(frozen=True)
class TensorDifference:
    """Two values of one weight. norm: the norm of their difference over that of the first (Frobenius). largest: the
    largest difference of an element. Both are None if the shapes differ or one engine lacks the weight. formats: how
    either engine stores the weight."""

    name: str
    norm: float | None
    largest: float | None
    formats: tuple[str, str]


@dataclass(frozen=True)
class AnswerDifference:
    """The recorded logits of two engines for the same canary prompts. deviation: how far the second's are from the
    first's, in the measure of `Canaries.allowed`, the largest of all prompts; None if the recorded ids of a prompt,
    those with the largest logits, are others in each engine. same_best: at how many positions the best token is the
    same."""

    prompts: int
    deviation: float | None
    same_best: int
    positions: int


@dataclass(frozen=True)
class EngineDifferences:
    """The differences of two engines. options, facts: both values, by name. program: the first difference in words, ""
    for none. tensors: weights whose stored data differ, the largest norm first; equal_tensors: how many are equal.
    answers: None if the canary prompts differ. files: other files that differ, or that only one engine has."""

    options: dict[str, tuple[Any, Any]]
    facts: dict[str, tuple[Any, Any]]
    program: str
    kernels: list[str]
    tensors: list[TensorDifference]
    equal_tensors: int
    answers: AnswerDifference | None
    files: list[str]

    @property
    def equal(self) -> bool:
        """Whether nothing differs."""
        return not (self.options or self.facts or self.program or self.kernels or self.tensors or self.files)

    def as_json(self) -> dict[str, Any]:
        """All differences as plain values."""
        return {"equal": self.equal, **asdict(self)}


def compare_engines(first: Path, second: Path, progress: Progress) -> EngineDifferences:
    """Open, verify and compare two engines. Raises the errors of `open_engine`."""
    with closing(open_earlier(first)) as one, closing(open_earlier(second)) as other:
        return _compared(one, other, progress)


def _compared(one: EarlierEngine, other: EarlierEngine, progress: Progress) -> EngineDifferences:
    engines = one.engine, other.engine
    tensors = sorted(_tensors(one, other, progress), key=lambda found: (found.norm is not None, -(found.norm or 0)))
    changed = _changed(*engines)
    return EngineDifferences(
        options=_pairs(*(recorded_in(engine) or {} for engine in engines)),
        facts=_pairs(*(_facts(engine) for engine in engines)),
        program=first_difference(*(msgspec.structs.replace(own.program, plan=None) for own in (one, other))),
        kernels=[name for name in changed if name.startswith("kernels/")],
        tensors=tensors,
        equal_tensors=len({*one.program.stored, *other.program.stored}) - len(tensors),
        answers=compare_answers(*(engine.canaries() for engine in engines)),
        files=[name for name in changed if not name.startswith("kernels/")],
    )


def _pairs(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The values that differ, by name; None for a missing value."""
    names = dict.fromkeys((*first, *second))
    return {name: (first.get(name), second.get(name)) for name in names if first.get(name) != second.get(name)}


def _facts(engine: Engine) -> dict[str, Any]:
    """The manifest, field by field."""
    found: dict[str, Any] = {}
    for name, value in msgspec.to_builtins(engine.manifest).items():
        if name not in _TOLD:
            found |= {f"{name}.{key}": own for key, own in value.items()} if isinstance(value, dict) else {name: value}
    return found


def _changed(first: Engine, second: Engine) -> list[str]:
    """The files that differ, except those whose contents are compared elsewhere, and the runtime's."""
    own, other = first.manifest.files, second.manifest.files
    held = {REPORT_FILE}
    for manifest in (first.manifest, second.manifest):
        held |= {*manifest.weight_files(), manifest.main.program, manifest.canaries_file or ""}
    names = {name for name in {*own, *other} - held if not name.startswith(("runtime/", "click/", "__main__.py"))}
    return sorted(name for name in names if own.get(name) != other.get(name))


def _tensors(first: EarlierEngine, second: EarlierEngine, progress: Progress) -> Iterator[TensorDifference]:
    names = list(dict.fromkeys((*first.program.stored, *second.program.stored)))
    for number, name in enumerate(names):
        progress(name, number, len(names))
        entries = first.program.stored.get(name), second.program.stored.get(name)
        formats = tuple("none" if entry is None else f"{entry.format}{entry.shape}" for entry in entries)
        if None in entries or entries[0].shape != entries[1].shape:  # type: ignore[union-attr]
            yield TensorDifference(name, None, None, formats)  # type: ignore[arg-type]
            continue
        raw = [own.engine.weights.view(name) for own in (first, second)]
        if formats[0] == formats[1] and np.array_equal(raw[0], raw[1]):
            continue
        values = [_values(own, name) for own in (first, second)]
        off = values[1] - values[0]
        norm = float(torch.linalg.vector_norm(off) / torch.linalg.vector_norm(values[0]).clamp(min=1e-30))
        yield TensorDifference(name, norm, float(off.abs().max()), formats)  # type: ignore[arg-type]


def _values(own: EarlierEngine, name: str) -> torch.Tensor:
    """A weight as float32, decoded from its stored form."""
    entry, layout = own.program.stored[name], _layout(own, name)
    parts = layout.unpack(own.engine.weights.view(name), entry.shape)
    return layout.format.decode({key: torch.from_numpy(np.array(part)) for key, part in parts.items()}).float()


def _layout(own: EarlierEngine, name: str) -> Layout:
    profile = backend_for(find_target(own.engine.manifest.target), "f32").profile
    for step in own.program.steps:
        stored = getattr(step, "stored", None)
        if not isinstance(stored, Stored):
            continue
        read = (getattr(step, field) for field in step.__struct_fields__)
        if any(isinstance(operand, WeightOperand) and operand.name == name for operand in read):
            found = profile.layout(stored.storage, stored.role)
            if found.name == own.program.stored[name].format:
                return found
    return profile.layout(I32 if own.program.stored[name].format == "i32" else F32, "plain")


def compare_answers(first: Canaries | None, second: Canaries | None) -> AnswerDifference | None:
    """Compare recorded answers; None if either engine has none, or they are to other prompts."""
    if first is None or second is None:
        return None
    if [one.tokens for one in first.prompts] != [one.tokens for one in second.prompts]:
        return None
    deviations: list[float] = []
    same, positions = 0, 0
    for one, other in zip(first.prompts, second.prompts, strict=True):
        off: list[float] = []
        for ids, logits, own_ids, own in zip(one.ids, one.logits, other.ids, other.logits, strict=True):
            known = dict(zip(own_ids, own, strict=True))
            pairs = np.array([(value, known[i]) for i, value in zip(ids, logits, strict=True) if i in known])
            same += ids[int(np.argmax(logits))] == own_ids[int(np.argmax(own))]
            positions += 1
            if len(pairs) > 1:
                spread = float(np.std(pairs[:, 0]))
                off.append(float(np.sqrt(np.mean((pairs[:, 1] - pairs[:, 0]) ** 2))) / max(spread, 1e-6))
        deviations += [float(np.median(off))] if off else []
    worst = max(deviations, default=0.0) if len(deviations) == len(first.prompts) else None
    return AnswerDifference(len(first.prompts), worst, same, positions)
