"""The compiler's form of the program, with typed steps. program.json is a tagged union of them."""

from __future__ import annotations

from typing import Any, Union

import msgspec

from ...runtime.errors import EngineFieldError
from ...runtime.format import program as format
from ...runtime.format.load import Engine
from ...runtime.format.manifest import FORMAT_VERSION
from ...runtime.format.programs import decode_program as decode_untyped
from .steps import attention, embedding, linear, norm, pointwise, rowwise, state
from .steps.base import STEPS, Step

FAMILIES = (attention, embedding, linear, norm, pointwise, rowwise, state)  # importing them registers their steps


class Program(format.Program, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A lowered model. `kernels` holds the op of every kernel in the order of their first steps."""

    steps: tuple[Step, ...]

    @property
    def kernel_steps(self) -> dict[str, Step]:
        """One step of each kernel: a kernel's steps differ only in where their operands lie."""
        found: dict[str, Step] = {}
        for step in self.steps:
            found.setdefault(step.kernel, step)
        return found


class _RawSteps(msgspec.Struct):
    steps: list[msgspec.Raw]


def decode_program(raw: bytes, name: str, version: int = FORMAT_VERSION) -> Program:
    """Read program.json with its steps; EngineFormatError, or EngineFieldError for a step of an unknown op."""
    untyped = decode_untyped(raw, name, version)
    decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(Union[tuple(STEPS.values())])  # noqa: UP007 of a list
    try:
        steps = tuple(map(decoder.decode, msgspec.json.decode(raw, type=_RawSteps).steps))
    except msgspec.ValidationError as error:
        raise EngineFieldError(f"{name}: {error}", "tune it with the icc, and the packages, that wrote it") from error
    fields: dict[str, Any] = {field: getattr(untyped, field) for field in untyped.__struct_fields__}
    fields["steps"] = steps
    return Program(**fields)


def program_of(engine: Engine) -> Program:
    """An engine's program with its steps, which the runtime does not read."""
    file = engine.manifest.program(engine.name).program
    return decode_program(engine.files.read(file), file, engine.manifest.format_version)
