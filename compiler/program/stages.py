"""Which stages of a pipeline run each step: those that its outputs depend on, back to its inputs."""

from __future__ import annotations

from collections import defaultdict

import msgspec

from ...runtime.format.adapters import Pool
from ...runtime.format.operands import BufferOperand, OutputOperand, WeightOperand
from .program import Program
from .steps.base import Step
from .steps.collective import Transfer


def stages_of(program: Program) -> list[frozenset[int]]:
    """For every step of the program the stages that run it; empty sets if the program is no pipeline. A step that
    depends on no KV layer may run on several stages, each of which then has its weights."""
    count = _count(program)
    found: list[set[int]] = [set() for _ in program.steps]
    if count > 1:
        makers = _makers(program.steps)
        for stage in range(count):
            for number in _needed(program.steps, makers, stage, count):
                found[number].add(stage)
    return [frozenset(stages) for stages in found]


def weights_of(program: Program, stage: int) -> set[str]:
    """The names of the weights that a stage of a pipeline reads; for the first stage also those that adapters are
    packed with."""
    sites = program.adapters.sites if program.adapters is not None and stage == 0 else ()
    packing = {name for s in sites for name in (s.columns, s.rows, s.gguf_rows, s.base_bias) if name}
    own = (step for step, stages in zip(program.steps, stages_of(program), strict=True) if stage in stages)
    return packing | {o.name for step in own for o in step.operands.values() if isinstance(o, WeightOperand)}


def with_pools_of_stages(program: Program, parts: int) -> Program:
    """The program with adapter pools that are filled only on the ranks of a pipeline that read them. parts: ranks of a
    stage."""
    if program.adapters is None or (count := _count(program)) == 1:
        return program
    held = [weights_of(program, stage) for stage in range(count)]
    pools = list[Pool]()
    for pool in program.adapters.pools:
        own = pool.cuts or [[(0, pool.matrices)]] * parts
        nothing: list[list[tuple[int, int]]] = [[]] * parts
        cuts = [ranges for names in held for ranges in (own if pool.weight in names else nothing)]
        pools.append(msgspec.structs.replace(pool, cuts=cuts))
    return msgspec.structs.replace(program, adapters=msgspec.structs.replace(program.adapters, pools=pools))


def _count(program: Program) -> int:
    return 1 + max((step.stage for step in program.steps if isinstance(step, Transfer)), default=0)


def _makers(steps: tuple[Step, ...]) -> list[set[int]]:
    """For each step the earlier steps that wrote the buffers it reads or partly writes, or its layer's cache."""
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
