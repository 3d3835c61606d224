"""The rules of a lowered program, checked after the lowering and again after its launches are planned.

A program that keeps the rules reads and writes only memory that exists and holds what its kernels expect, so back ends
need not check their input again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations
from math import prod

from ...runtime.format.batch import OPERANDS, declaration_problem
from ...runtime.format.elements import ITEM_SIZE
from ...runtime.format.operands import BufferOperand, InputOperand, Operand, OutputOperand, WeightOperand
from ...runtime.format.plan import Call, CallArg, KernelRun, KVArg, LaunchArg, LaunchPlan, OperandArg
from ...runtime.format.program import LOGITS, Buffer, WeightEntry
from ...runtime.format.programs import section_problem
from ..errors import VerifyError
from .memory import ALIGN
from .own_rows import own_row_steps, own_rows_problem
from .program import Program
from .steps.attention import CacheStep
from .steps.base import Step
from .steps.state import StateStep

Refusal = Callable[[Step], str]
_OUTPUTS = {LOGITS: "f32"}


def verify_lowered(program: Program, refusal: Refusal) -> None:
    """Raise VerifyError naming the first step, buffer or section that breaks a rule.

    refusal: gives the reason why the back end has no kernel for a step; "" if it has one.
    """
    verify_steps(program)
    for kernel, step in program.kernel_steps.items():
        reason = refusal(step)
        _require(not reason, f"kernel {kernel} ({step.op})", reason)
    _verify_memory(program, _lifetimes(program))


def verify_steps(program: Program, pass_name: str = "lower") -> None:
    """Raise VerifyError, naming `pass_name`, if a step, the inputs or a section break a rule; the places of buffers are
    not checked."""
    buffers = {buffer.name: buffer for buffer in program.buffers}
    try:
        for number, step in enumerate(program.steps):
            problem = next(_step_problems(program, buffers, step), "")
            _require(not problem, f"step {number} ({step.kernel or step.op})", problem)
        for number in sorted(own_row_steps(program)):
            problem = own_rows_problem(program, number)
            _require(not problem, f"step {number} ({program.steps[number].op})", problem)
        _require(not (problem := declaration_problem(program.inputs)), "the inputs", problem)
        for section in program.sections:
            problem = section_problem(program, section)
            _require(not problem, f"section {section.name}", problem)
        _lifetimes(program)
    except VerifyError as error:
        if error.pass_name == pass_name:
            raise
        raise VerifyError(error.stage, pass_name, error.node, error.problem) from None


def verify_plan(program: Program) -> None:
    """Raise VerifyError if the launch plan does not serve every step, or passes arguments that its call does not
    have."""
    plan = program.plan
    if plan is None:
        return
    _require(
        len(plan.calls) == len(program.steps), "the plan", f"{len(plan.calls)} calls of {len(program.steps)} steps"
    )
    by_rows = own_row_steps(program)
    for number, (step, call) in enumerate(zip(program.steps, plan.calls, strict=True)):
        where = f"step {number} ({step.kernel})"
        _require(call.own == (number in by_rows), where, "its call is for other rows than the step")
        same = (call.kernel, call.operands, call.layer) == (step.kernel, step.operands, step.layer)
        _require(same, where, "its call has other operands, another kernel or another layer")
        problem = next(_launch_problems(plan, number), "")
        _require(not problem, where, problem)
    for run in (run for phase in plan.phases for run in phase.runs):
        problem = next(_run_problems(plan, run), "")
        _require(not problem, f"the run from step {run.first} on", problem)


def _run_problems(plan: LaunchPlan, run: KernelRun) -> Iterator[str]:
    calls = plan.calls[run.first : run.first + run.count]
    if len(calls) < run.count:
        yield f"has {run.count} steps, {len(calls)} are there"
    for launch in run.launches:
        if launch.object not in plan.objects:
            yield f"object {launch.object} is not in the plan"
        for arg in launch.args:
            if isinstance(arg, CallArg):
                yield from _arg_problems(arg.arg, calls[arg.call], "its phase")


def _launch_problems(plan: LaunchPlan, number: int) -> Iterator[str]:
    call = plan.calls[number]
    for phase in plan.phases:
        kind = f"{'decode' if phase.decode else 'mixed'} steps of {phase.max_tokens} tokens"
        if call.kernel not in phase.launches:
            yield f"nothing is launched in {kind}"
        for launch in phase.launches.get(call.kernel, ()):
            if launch.object not in plan.objects and not (launch.exchange and launch.exchange.only):
                yield f"object {launch.object} is not in the plan"
            for arg in launch.args:
                yield from _arg_problems(arg, call, kind)


def _arg_problems(arg: LaunchArg, call: Call, kind: str) -> Iterator[str]:
    if isinstance(arg, OperandArg) and arg.name not in call.operands:
        yield f"a launch in {kind} wants operand {arg.name!r}"
    if isinstance(arg, KVArg) and call.layer < 0:
        yield f"a launch in {kind} wants a KV layer"


def _require(holds: bool, where: str, problem: str) -> None:
    if not holds:
        raise VerifyError("lowered", "lower", where, problem)


# -- steps ------------------------------------------------------------------------------------------------------------


def _step_problems(program: Program, buffers: dict[str, Buffer], step: Step) -> Iterator[str]:
    if program.kernels.get(step.kernel) != step.op:
        yield f"kernel {step.kernel!r} of op {step.op!r} is not in the program"
    widths = step.widths()
    for name, operand in step.operands.items():
        if operand.dtype not in step.dtypes_of(name):
            yield f"operand {name} is of type {operand.dtype}, not {' or '.join(step.dtypes_of(name))}"
        problem = _operand_problem(program, buffers, step, name, operand)
        if problem:
            yield f"operand {name}: {problem}"
        if name in widths and not isinstance(operand, WeightOperand):
            row = operand.stride or widths[name]
            if operand.offset < 0 or operand.offset + widths[name] > row:
                yield f"operand {name} covers {operand.offset} to {operand.offset + widths[name]} of a row of {row}"
    groups = [group for group in program.kv.groups if step.layer in group.layers]
    if len(groups) != (step.layer >= 0):
        yield f"there is no KV layer {step.layer}"
    elif isinstance(step, CacheStep):
        if [(group.layers[step.layer], group.dtype, group.block_size) for group in groups] != [
            (step.kv, step.cache, step.block_size)
        ]:
            yield f"its cache is not that of KV layer {step.layer}"
    elif isinstance(step, StateStep):
        states = [(group.layers[step.layer].state, group.block_size) for group in groups]
        if states != [(step.state, step.block_size)]:
            yield f"its state is not that of KV layer {step.layer}"


def _operand_problem(program: Program, buffers: dict[str, Buffer], step: Step, name: str, operand: Operand) -> str:
    """The fault of an operand's place; "" if there is none."""
    rows = step.rows_of(name)
    match operand:
        case BufferOperand():
            return _buffer_problem(buffers.get(operand.name), operand, rows)
        case WeightOperand():
            return _weight_problem(program.weights.get(operand.name), operand, step.widths().get(name, 0))
        case InputOperand():
            return _input_problem(program, operand, rows)
        case OutputOperand():
            return _output_problem(program, operand, rows)


def _buffer_problem(buffer: Buffer | None, operand: BufferOperand, rows: tuple[str, ...]) -> str:
    if buffer is None:
        return f"there is no buffer {operand.name}"
    if operand.dtype != buffer.dtype or buffer.rows not in rows:
        wanted = " or ".join(rows)
        return f"buffer {buffer.name} has {buffer.rows} of {buffer.dtype}, not {wanted} of {operand.dtype}"
    size = prod(buffer.shape)
    return "" if operand.stride == size else f"rows of buffer {buffer.name} are {size} elements apart"


def _input_problem(program: Program, operand: InputOperand, rows: tuple[str, ...]) -> str:
    array = next((array for array in (*OPERANDS, *program.inputs) if array.name == operand.name), None)
    if array is None or "tokens" not in rows:
        return f"a batch has no {operand.name} for {' or '.join(rows)}"
    if operand.dtype != array.dtype:
        return f"input {array.name} is of {array.dtype}, not {operand.dtype}"
    size = prod(array.row_shape)
    return "" if operand.stride == size else f"rows of input {array.name} are {size} elements apart"


def _weight_problem(weight: WeightEntry | None, operand: WeightOperand, width: int) -> str:
    if weight is None:
        return f"there is no weight {operand.name}"
    plain, size = weight.format in ITEM_SIZE, prod(weight.shape)
    if operand.dtype != (weight.format if plain else "u8"):
        return f"weight {operand.name} is stored as {weight.format}, not as {operand.dtype}"
    return f"weight {operand.name} has {size} elements" if plain and operand.offset + width > size else ""


def _output_problem(program: Program, operand: OutputOperand, rows: tuple[str, ...]) -> str:
    if operand.dtype != _OUTPUTS.get(operand.name) or "logit_rows" not in rows:
        return f"there is no output {operand.name!r} of {' or '.join(rows)} of {operand.dtype}"
    wide = operand.name == LOGITS and operand.stride != program.vocab_size
    return f"rows of the output are {program.vocab_size} elements apart" if wide else ""


# -- memory -----------------------------------------------------------------------------------------------------------


def _lifetimes(program: Program) -> dict[str, tuple[int, int]]:
    """The first and the last step that touches each buffer, or may touch it: a value of the step that a section reads
    lives to the end of the program. VerifyError for a buffer that is read before it is written."""
    found: dict[str, tuple[int, int]] = {}
    sections = {number: s for s in program.sections for number in range(s.begin, s.end)}
    buffers = {buffer.name for buffer in program.buffers}
    for number, step in enumerate(program.steps):
        section = sections.get(number)
        if section is not None and number == section.begin:
            found |= {a.at: (number, section.end - 1) for a in section.inputs.values() if a.at in buffers}
        read = {o.name for o in step.inputs.values() if isinstance(o, BufferOperand)}
        unwritten = sorted(read - found.keys())
        _require(not unwritten, f"step {number} ({step.kernel})", f"reads buffer {unwritten[:1]} before it is written")
        for operand in step.operands.values():
            if isinstance(operand, BufferOperand):
                first, last = found.get(operand.name, (number, number))
                found[operand.name] = first, max(last, number)
        for name in read if section is not None and not section.is_step else ():
            if found[name][0] < section.begin:  # type: ignore[union-attr]
                found[name] = found[name][0], len(program.steps) - 1
    for section in program.sections:
        for array in section.outputs.values():
            if array.at in found:
                found[array.at] = found[array.at][0], max(found[array.at][1], section.end - 1)
    return found


def _verify_memory(program: Program, lives: dict[str, tuple[int, int]]) -> None:
    """Check that no two buffers that live at the same time share bytes, and that all lie in the arena."""
    spans: dict[str, tuple[int, int]] = {}
    for buffer in program.buffers:
        end = buffer.offset + prod(buffer.shape) * ITEM_SIZE[buffer.dtype]
        placed = buffer.offset >= 0 and buffer.offset % ALIGN == 0 and end <= program.arena_bytes_per_token
        _require(placed, f"buffer {buffer.name}", f"bytes {buffer.offset} to {end} do not lie in the arena")
        spans[buffer.name] = buffer.offset, end
    for one, two in combinations((name for name in spans if name in lives), 2):
        (a, b), (c, d) = lives[one], lives[two]
        (low, high), (start, end) = spans[one], spans[two]
        apart = b < c or d < a or high <= start or end <= low
        _require(apart, f"buffer {two}", f"lives while {one} does, and shares its bytes")
