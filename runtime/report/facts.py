"""The sources of a report: the manifest, the program and report.json of an engine."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from ..errors import EngineFormatError
from ..format.files import EngineFiles
from ..format.load import read_manifest
from ..format.manifest import Manifest
from ..format.open_container import open_container
from ..format.program import Program
from ..format.programs import read_program

REPORT_FILE = "report.json"
OUTSIDE = -1  # the layer number of steps and weights outside the layers: embedding, last norm, head
_NUMBER = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")


@dataclass(frozen=True)
class StepFacts:
    """One step of the program. buffers, weights: the names of its operands. layer: OUTSIDE if it belongs to none.
    facts: its other fields."""

    number: int
    op: str
    kernel: str
    layer: int
    buffers: tuple[str, ...]
    weights: tuple[str, ...]
    facts: Mapping[str, Any]


@dataclass(frozen=True)
class EngineFacts:
    """An engine's files. report: report.json; empty if there is none."""

    name: str
    manifest: Manifest
    program: Program
    steps: tuple[StepFacts, ...]
    report: Mapping[str, Any]

    @property
    def num_layers(self) -> int:
        """The number of layers: one more than the highest layer of a step; 0 if no step has a layer."""
        return max((step.layer for step in self.steps), default=OUTSIDE) + 1


def decode_rows(facts: EngineFacts) -> Sequence[Mapping[str, Any]]:
    """The compiler's counts for a decode step of one sequence, by op; () if the report has none."""
    return facts.report.get("roofline", {}).get("decode", ())


def decode_bytes(facts: EngineFacts) -> int:
    """How many bytes a decode step of one sequence moves; 0 if the report does not say."""
    return int(sum(row["bytes"] for row in decode_rows(facts)))


def read_facts(path: str | os.PathLike[str]) -> EngineFacts:
    """Read the files that a report needs; other files are not verified. Raises what `read_manifest` raises, and
    EngineFormatError for a damaged report.json."""
    root = Path(path)
    manifest = read_manifest(root)
    files = EngineFiles(open_container(root), manifest.files, verify=True, base=manifest.base)
    program, file = read_program(manifest, files), manifest.main.program
    report = _object(files.read(REPORT_FILE), REPORT_FILE) if REPORT_FILE in manifest.files else {}
    steps = _object(files.read(file), file)["steps"]
    return EngineFacts(root.resolve().name, manifest, program, tuple(_steps(steps)), report)


def _object(raw: bytes, name: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(raw, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise EngineFormatError(f"{name}: {error}", "compile the model again") from error


def _steps(raw: list[dict[str, Any]]) -> Iterator[StepFacts]:
    """The steps of a program. A step without a weight or a KV layer gets the layer of the next step that has one."""
    operands = [list(_operands(step)) for step in raw]
    layers = [_layer(step, found) for step, found in zip(raw, operands, strict=True)]
    following: int | None = None
    for number in reversed(range(len(layers))):
        if layers[number] is None:
            layers[number] = following
        following = layers[number]
    before = OUTSIDE
    for number, (step, found) in enumerate(zip(raw, operands, strict=True)):
        known = layers[number]
        before = before if known is None else known
        names = {space: tuple(dict.fromkeys(o["name"] for o in found if o["space"] == space)) for space in _SPACES}
        facts = {key: value for key, value in step.items() if not _is_operand(value)}
        op, kernel = str(step.get("op", step.get("kernel", ""))), str(step.get("kernel", ""))
        yield StepFacts(number, op, kernel, before, names["buffer"], names["weight"], facts)


_SPACES = ("buffer", "weight")


def _operands(value: Any) -> Iterator[dict[str, Any]]:
    """Every operand in a step, at any nesting depth."""
    if isinstance(value, dict):
        if value.get("space") in (*_SPACES, "input", "output"):
            yield value
            return
        value = list(value.values())
    if isinstance(value, list):
        for part in value:
            yield from _operands(part)


def _is_operand(value: Any) -> bool:
    return next(_operands(value), None) is not None


def _layer(step: Mapping[str, Any], operands: list[dict[str, Any]]) -> int | None:
    """The layer of a step, OUTSIDE if its weights are in no layer, None if it has no weights and no KV layer."""
    if "layer" in step:
        return int(step["layer"])
    names = [operand["name"] for operand in operands if operand["space"] == "weight"]
    found = [layer for name in names if (layer := layer_of(name)) != OUTSIDE]
    return found[0] if found else OUTSIDE if names else None


def layer_of(name: str) -> int:
    """The layer in a weight's or a module's name: the first part that is a number; OUTSIDE if there is none."""
    found = _NUMBER.search(name.split("+")[0])
    return int(found[1]) if found else OUTSIDE
