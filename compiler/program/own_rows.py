"""Which steps each rank runs only for its own rows: those between a sum that is divided by rows and the gather of
rows."""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd

from ...runtime.format.elements import ITEM_SIZE
from ...runtime.format.operands import BufferOperand
from ...runtime.format.plan import OwnRows
from .program import Program
from .steps.attention import CacheStep
from .steps.collective import Collective, GatherRows, ReduceScatter
from .steps.embedding import SelectRows
from .steps.state import StateStep

_ALIGNED = 16  # bytes: GPU kernels are compiled for pointers that are multiples
_MIXED = (CacheStep, StateStep, Collective, SelectRows)


def own_row_steps(program: Program) -> set[int]:
    """The steps, by number, that read a value of which a rank has only its own rows."""
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


def least_rows(program: Program) -> int:
    """The number of rows from which ranks divide them; 0 if they never do."""
    return next((step.least for step in program.steps if isinstance(step, ReduceScatter)), 0)


def divides(least: int, most: int, decode: bool) -> bool:
    """Whether a launch plan divides steps of at most `most` rows; steps of one token per sequence have too little to
    divide."""
    return not decode and most >= least > 0


def plan_own_rows(program: Program) -> OwnRows | None:
    """How the phases of a launch plan divide rows; None if every rank has all rows of all values."""
    ranks = next((step.ranks for step in program.steps if isinstance(step, ReduceScatter)), 0)
    if not ranks:
        return None
    every = [operand for number in own_row_steps(program) for operand in program.steps[number].operands.values()]
    widths = {operand.stride * ITEM_SIZE[operand.dtype] for operand in every if operand.stride}
    step = max((_ALIGNED // gcd(_ALIGNED, width) for width in widths), default=1)
    return OwnRows(ranks, max(least_rows(program), ranks * step), step)


def own_rows_problem(program: Program, number: int) -> str:
    """Why a step cannot run for only some rows; "" if it can."""
    step = program.steps[number]
    if isinstance(step, _MIXED) or step.rows != "tokens":
        return "it needs all rows of a value of which a rank has its own"
    return ""


def _buffers(operands: Mapping[str, object]) -> set[str]:
    return {operand.name for operand in operands.values() if isinstance(operand, BufferOperand)}
