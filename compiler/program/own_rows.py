"""Which steps each rank runs for its own rows: those between a sum that is left so and where rows are gathered."""

from __future__ import annotations

from collections.abc import Mapping

from ...runtime.format.operands import BufferOperand
from .program import Program
from .steps.attention import CacheStep
from .steps.collective import Collective, GatherRows, ReduceScatter
from .steps.embedding import SelectRows
from .steps.state import StateStep

_MIXED = (CacheStep, StateStep, Collective, SelectRows)


def own_row_steps(program: Program) -> set[int]:
    """The steps, by number, that read a value of which a rank has its own rows alone."""
    own: set[str] = set()
    found: set[int] = set()
    for number, step in enumerate(program.steps):
        read, written = _buffers(step.inputs), _buffers(step.outputs)
        if isinstance(step, GatherRows):
            own -= written
        elif isinstance(step, ReduceScatter):
            own |= written
        elif read & own:
            found.add(number)
            own |= written
        else:
            own -= written
    return found


def own_rows_problem(program: Program, number: int) -> str:
    """Why a step cannot run for some rows alone; "" if it can."""
    step = program.steps[number]
    if isinstance(step, _MIXED) or step.rows != "tokens":
        return "it needs all rows of a value of which a rank has its own"
    return ""


def _buffers(operands: Mapping[str, object]) -> set[str]:
    return {operand.name for operand in operands.values() if isinstance(operand, BufferOperand)}
