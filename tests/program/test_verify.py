"""The lowered stage: the program of a real model satisfies its rules, and every broken rule is reported with its
place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from graph_tracing import Value, attention, icc, trace
from icc.compiler.errors import VerifyError
from icc.compiler.ops import AttentionSpec
from icc.compiler.program.program import Program
from icc.compiler.program.verify import verify_lowered, verify_plan
from icc.runtime.format.batch import BatchArray
from icc.runtime.format.operands import BufferOperand, InputOperand, OutputOperand, WeightOperand
from icc.runtime.format.plan import Call, Extent, KernelObject, KVArg, Launch, LaunchPlan, OperandArg, Phase
from icc.runtime.format.program import Section, SectionArray
from run_lowered import lower_graph, optimize

replace = msgspec.structs.replace


@pytest.fixture(scope="module")
def program() -> Program:
    def fn(x: Value, w: Value, b: Value, positions: Value) -> Value:
        q = icc.linear.default(x, w, b).view(-1, 2, 8)
        found = attention(q, q, q, AttentionSpec(0, 0.5))
        return icc.softmax.default(found.view(-1, 16))

    inputs = {"x": "f32[T, 16]", "w": "f32[16, 16]", "b": "f32[16]", "positions": ""}
    return lower_graph(optimize(trace(fn, **inputs))).program


def accepts(step: Any) -> str:
    return ""


def number(program: Program, op: str) -> int:
    """The index of the first step of an op."""
    return next(i for i, step in enumerate(program.steps) if step.op == op)


def with_step(program: Program, op: str, **changes: Any) -> Program:
    """The program with fields of one step changed, but not its kernel."""
    at = number(program, op)
    steps = list(program.steps)
    steps[at] = replace(steps[at], **changes)
    return replace(program, steps=tuple(steps))


def moved(program: Program, op: str, operand: str, **changes: Any) -> Program:
    """The program with fields of one operand changed."""
    found = program.steps[number(program, op)].operands[operand]
    return with_step(program, op, **{operand: replace(found, **changes)})


def overlapping(program: Program) -> Program:
    """The program with the product's result in the memory of its operand."""
    step = program.steps[number(program, "linear")].operands
    place = next(b.offset for b in program.buffers if b.name == step["x"].name)
    return replace(
        program, buffers=[replace(b, offset=place) if b.name == step["y"].name else b for b in program.buffers]
    )


def buffers(program: Program, **changes: Any) -> Program:
    return replace(program, buffers=[replace(program.buffers[0], **changes), *program.buffers[1:]])


def with_section(program: Program, **changes: Any) -> Program:
    """The program with a section of all steps except the first two."""
    found = Section("late", 2, len(program.steps))
    return replace(program, sections=[replace(found, **changes)])


BROKEN: dict[str, tuple[Callable[[Program], Program], str]] = {
    "kernel": (lambda p: replace(p, kernels={}), "is not in the program"),
    "kernel of another op": (lambda p: with_step(p, "linear", kernel="softmax_0"), "'softmax_0' of op 'linear'"),
    "type": (lambda p: moved(p, "softmax", "x", dtype="i8"), "operand x is of type i8, not f32 or"),
    "type of a buffer": (lambda p: moved(p, "linear", "y", dtype="bf16"), "not tokens of bf16"),
    "kind of rows": (lambda p: with_step(p, "linear", rows="logit_rows"), "has tokens of f32, not logit_rows"),
    "no buffer": (lambda p: moved(p, "linear", "y", name="b99"), "operand y: there is no buffer b99"),
    "stride": (lambda p: moved(p, "linear", "y", stride=20), "are 16 elements apart"),
    "range": (lambda p: moved(p, "linear", "y", offset=4), "operand y covers 4 to 20 of a row of 16"),
    "no weight": (lambda p: moved(p, "linear", "w", name="gone"), "operand w: there is no weight gone"),
    "range of a weight": (lambda p: moved(p, "linear", "bias", offset=8), "weight b has 16 elements"),
    "type of a weight": (lambda p: moved(p, "linear", "w", dtype="f32"), "is stored as tile_f32, not as f32"),
    "input": (lambda p: with_step(p, "embedding", ids=InputOperand("colours")), "a batch has no colours"),
    "type of an input": (
        lambda p: replace(
            with_step(p, "embedding", ids=InputOperand("kind")), inputs=[BatchArray("kind", ("T",), "i8")]
        ),
        "input kind is of i8, not i32",
    ),
    "rows of an input": (
        lambda p: with_step(p, "embedding", ids=InputOperand("token_ids", stride=2)),
        "rows of input token_ids are 1 elements apart",
    ),
    "declaration": (
        lambda p: replace(p, inputs=[BatchArray("positions", ("T",))]),
        "'positions' is no name for an input, or is taken",
    ),
    "output": (lambda p: with_step(p, "linear", y=OutputOperand("scores", "f32", 16)), "there is no output 'scores'"),
    "layer": (lambda p: with_step(p, "attention", layer=3), "there is no KV layer 3"),
    "no layer": (lambda p: with_step(p, "attention", layer=-1), "its cache is not that of KV layer -1"),
    "cache": (
        lambda p: with_step(p, "kv_write", block_size=4),
        "its cache is not that of KV layer 0",
    ),
    "aliasing": (overlapping, "lives while b[0-9]+ does, and shares its bytes"),
    "arena": (lambda p: buffers(p, offset=p.arena_bytes_per_token), "do not lie in the arena"),
    "alignment": (lambda p: buffers(p, offset=4), "do not lie in the arena"),
    "lifetime": (lambda p: replace(p, steps=p.steps[number(p, "linear") :]), "before it is written"),
    "section": (lambda p: with_section(p, end=99), "section late: steps 2 to 99 are not in the program"),
    "place of a section's input": (
        lambda p: with_section(p, inputs={"x": SectionArray("f32", [16], "b99")}),
        "section late: there is no buffer b99 for x",
    ),
    "type of a section's output": (
        lambda p: with_section(p, outputs={"y": SectionArray("i32", [16], p.buffers[0].name)}),
        r"y has rows of \[16\] i32, buffer b0 of \[16\] f32",
    ),
    "type of a section's input": (
        lambda p: with_section(p, inputs={"x": SectionArray("i8", [16], "b0")}),
        r"x has rows of \[16\] i8",
    ),
}


def test_a_lowered_program_keeps_the_rules(program: Program) -> None:
    verify_lowered(program, accepts)
    assert {type(o) for step in program.steps for o in step.operands.values()} == {
        BufferOperand, WeightOperand, InputOperand, OutputOperand,
    }  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_rule_is_told(program: Program, name: str) -> None:
    break_it, message = BROKEN[name]
    with pytest.raises(VerifyError, match=f"the program is not a valid lowered program: .*{message}") as error:
        verify_lowered(break_it(program), accepts)
    assert error.value.stage == "lowered"


def test_every_step_needs_a_kernel(program: Program) -> None:
    with pytest.raises(VerifyError, match=r"kernel softmax_0 \(softmax\): not today"):
        verify_lowered(program, lambda step: "not today" if step.op == "softmax" else "")


def planned(program: Program) -> LaunchPlan:
    """A plan with one launch per kernel, of all its operands."""
    calls = tuple(Call(step.kernel, step.operands, step.layer) for step in program.steps)
    one = Extent(1)
    launches = {
        name: (Launch("object", tuple(map(OperandArg, step.operands)), (one, one, one)),)
        for name, step in program.kernel_steps.items()
    }
    found = KernelObject("kernels/object.cubin", "entry", (), 4, 32, 0)
    return LaunchPlan({"object": found}, calls, (Phase(8, False, launches, (), ()),), 0)


def with_launch(plan: LaunchPlan, kernel: str, *launches: Launch) -> LaunchPlan:
    phase = plan.phases[0]
    return replace(plan, phases=(replace(phase, launches={**phase.launches, kernel: launches}),))


def test_a_plan_serves_every_step_with_what_it_has(program: Program) -> None:
    plan = planned(program)
    verify_plan(program)
    verify_plan(replace(program, plan=plan))
    launch = plan.phases[0].launches["softmax_0"][0]
    wrong = {
        "calls of": replace(plan, calls=plan.calls[1:]),
        "its call has other operands": replace(plan, calls=(plan.calls[1], *plan.calls[1:])),
        "nothing is launched in mixed steps of 8": replace(plan, phases=(replace(plan.phases[0], launches={}),)),
        "wants operand 'z'": with_launch(plan, "softmax_0", replace(launch, args=(OperandArg("z"),))),
        "wants a KV layer": with_launch(plan, "softmax_0", replace(launch, args=(KVArg(),))),
        "object gone is not in the plan": with_launch(plan, "softmax_0", replace(launch, object="gone")),
    }
    for message, broken in wrong.items():
        with pytest.raises(VerifyError, match=message):
            verify_plan(replace(program, plan=broken))
