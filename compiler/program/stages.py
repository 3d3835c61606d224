"""Which ranks of a pipeline run each step: a rank runs what it needs for what it gives, back to what it is given."""

from __future__ import annotations

from collections import defaultdict

from ...runtime.format.operands import BufferOperand, OutputOperand, WeightOperand
from .program import Program
from .steps.base import Step
from .steps.collective import Transfer


def stages_of(program: Program) -> list[frozenset[int]]:
    """For every step of the program the ranks that run it; empty sets where it is no pipeline. What no KV layer is
    read for may run on several ranks: each then has the weights for it."""
    count = 1 + max((step.stage for step in program.steps if isinstance(step, Transfer)), default=0)
    found: list[set[int]] = [set() for _ in program.steps]
    if count > 1:
        makers = _makers(program.steps)
        for stage in range(count):
            for number in _needed(program.steps, makers, stage, count):
                found[number].add(stage)
    return [frozenset(stages) for stages in found]


def weights_of(program: Program, stage: int) -> set[str]:
    """The names of the weights that a rank of a pipeline reads."""
    own = (step for step, stages in zip(program.steps, stages_of(program), strict=True) if stage in stages)
    return {o.name for step in own for o in step.operands.values() if isinstance(o, WeightOperand)}


def _makers(steps: tuple[Step, ...]) -> list[set[int]]:
    """For each step the earlier steps that leave what it reads, writes to in part, or finds in its layer's cache."""
    writers: dict[str | int, set[int]] = defaultdict(set)
    found: list[set[int]] = []
    for number, step in enumerate(steps):
        touched: list[str | int] = [o.name for o in step.operands.values() if isinstance(o, BufferOperand)]
        found.append({maker for name in (*touched, step.layer) if name != -1 for maker in writers[name]})
        for operand in step.outputs.values():
            if isinstance(operand, BufferOperand):
                writers[operand.name].add(number)
        if step.layer >= 0:
            writers[step.layer].add(number)
    return found


def _needed(steps: tuple[Step, ...], makers: list[set[int]], stage: int, count: int) -> set[int]:
    """The steps of a stage, by number."""
    last = stage == count - 1
    pending = [
        number
        for number, step in enumerate(steps)
        if (isinstance(step, Transfer) and step.stage == stage + 1)
        or (last and any(isinstance(o, OutputOperand) for o in step.outputs.values()))
    ]
    found = set(pending)
    while pending:
        number = pending.pop()
        step = steps[number]
        if isinstance(step, Transfer) and step.stage <= stage:
            assert step.stage == stage, f"stage {stage} needs what only stage {step.stage} is given"
            continue
        fresh = makers[number] - found
        found |= fresh
        pending += fresh
    return found
