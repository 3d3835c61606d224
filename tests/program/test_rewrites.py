"""The rewrites of steps: the text of a small program after each rewrite, the steps that it does not change, and the
result of a second run.

The results of rewritten steps are tested by interpreting plans against the reference (tests/triton).
"""

# ruff: noqa: E501 (steps have a line each)
from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from expecttest import assert_expected_inline
from icc.compiler.backends.registry import backend_for
from icc.compiler.cli import main
from icc.compiler.errors import VerifyError
from icc.compiler.graph.parser import parse_graph
from icc.compiler.opt_names import STEP_NAMES
from icc.compiler.program.builder import ProgramBuilder
from icc.compiler.program.epilogue import FuseEpilogues
from icc.compiler.program.lower import LowerOptions, lower
from icc.compiler.program.profile import Profile
from icc.compiler.program.rewrite import StepRewrite
from icc.compiler.program.rewrites import LOWER, REWRITES, find_rewrite
from icc.compiler.program.steps_text import steps_text
from icc.compiler.targets import find_target

SILU = '  %2: f32[T, 64] = icc.pointwise([%1], "t0 = silu a0")\n'
NORMED = f"""\
graph(%token_ids: i64[T], %positions: i64[T] < 24, %logit_rows: i64[L]):
  %0: f32[T, 32] = icc.embedding(%token_ids, @table: bf16[16, 32])
  %1: f32[T, 64] = icc.linear(%0, @up: bf16[64, 32], None)
{SILU}\
  %3: f32[T, 32] = icc.linear(%2, @down: bf16[32, 64], None)
  %4: (f32[T, 32], f32[T, 32]) = icc.add_rms_norm(%0, %3, @norm: bf16[32], 1e-06)
  %5: f32[T, 32] = getitem(%4, 0)
  %6: f32[L, 32] = icc.select_rows(%5, %logit_rows)
  %7: f32[L, 16] = icc.linear(%6, @head: bf16[16, 32], None)
  return %7
"""
CODED = """\
graph(%token_ids: i64[T], %positions: i64[T] < 24, %logit_rows: i64[L]):
  %0: f32[T, 256] = icc.embedding(%token_ids, @table: bf16[16, 256])
  %1: f32[T, 256] = icc.rms_norm(%0, @norm: bf16[256], 1e-06)
  %2: f32[T, 256] = icc.linear(%1, @w: FORMAT[256, 256], None)
  %3: f32[L, 256] = icc.select_rows(%2, %logit_rows)
  return %3
"""
ADAPTED = """\
graph(%token_ids: i64[T], %positions: i64[T] < 24, %logit_rows: i64[L]):
  %0: f32[T, 32] = icc.embedding(%token_ids, @table: bf16[16, 32])
  %1: f32[T, 1, 32] = aten.view(%0, [-1, 1, 32])
  %2: i64[T, 1] = aten.view(%positions, [-1, 1])
  %3: f32[T, 1, 16] = icc.expert_linear(%1, @A: bf16[4, 16, 32], None, %2)
  %4: f32[T, 1, 64] = icc.expert_linear(%3, @B: bf16[4, 64, 16], @bias: f32[4, 64], %2)
  %5: f32[T, 64] = aten.view(%4, [-1, 64])
  %6: f32[T, 64] = icc.linear(%0, @up: bf16[64, 32], None)
  %7: f32[T, 64] = icc.pointwise([%6, %5], "t0 = add a0 a1")
  %8: f32[L, 64] = icc.select_rows(%7, %logit_rows)
  return %8
"""


GATED = """\
graph(%token_ids: i64[T], %positions: i64[T] < 24, %logit_rows: i64[L]):
  %0: f32[T, 32] = icc.embedding(%token_ids, @table: bf16[16, 32])
  %1: f32[T, 1, 32] = aten.view(%0, [-1, 1, 32])
  %2: i64[T, 1] = aten.view(%positions, [-1, 1])
  %3: f32[T, 1, 16] = icc.expert_linear(%1, @A: bf16[4, 16, 32], None, %2)
  %4: f32[T, 1, HALF] = icc.expert_linear(%3, @B0: bf16[4, HALF, 16], @bias0: f32[4, HALF], %2)
  %5: f32[T, 1, HALF] = icc.expert_linear(%3, @B1: bf16[4, HALF, 16], @bias1: f32[4, HALF], %2)
  %6: f32[T, HALF] = aten.view(%4, [-1, HALF])
  %7: f32[T, HALF] = aten.view(%5, [-1, HALF])
  %8: f32[T, WHOLE] = icc.linear(%0, @up: bf16[WHOLE, 32], None)
  %9: f32[T, HALF] = aten.slice.Tensor(%8, 1, 0, HALF, 1)
  %10: f32[T, HALF] = aten.slice.Tensor(%8, 1, HALF, WHOLE, 1)
  %11: f32[T, HALF] = icc.pointwise([%9, %6, %10, %7], "t0 = add a0 a1; t1 = silu t0; t2 = add a3 a2; t3 = mul t1 t2")
  %12: f32[L, HALF] = icc.select_rows(%11, %logit_rows)
  return %12
"""


JOINED = """\
graph(%token_ids: i64[T], %positions: i64[T] < 24, %logit_rows: i64[L]):
  %0: f32[T, 32] = icc.embedding(%token_ids, @table: bf16[16, 32])
  %1: f32[T, 1, 32] = aten.view(%0, [-1, 1, 32])
  %2: i64[T, 1] = aten.view(%positions, [-1, 1])
  %3: f32[T, 1, 16] = icc.expert_linear(%1, @A: bf16[4, 16, 32], None, %2)
  %4: f32[T, 1, 32] = icc.expert_linear(%3, @B0: bf16[4, 32, 16], @bias0: f32[4, 32], %2)
  %5: f32[T, 1, 16] = icc.expert_linear(%3, @B1: bf16[4, 16, 16], @bias1: f32[4, 16], %2)
  %6: f32[T, 32] = aten.view(%4, [-1, 32])
  %7: f32[T, 16] = aten.view(%5, [-1, 16])
  %8: f32[T, 48] = icc.linear(%0, @up: bf16[48, 32], None)
  %9: f32[T, 48] = aten.cat([%6, %7], 1)
  %10: f32[T, 48] = icc.pointwise([%8, %9], "t0 = add a0 a1")
  %11: f32[L, 48] = icc.select_rows(%10, %logit_rows)
  return %11
"""


def gated(half: int) -> str:
    """A graph with two linears merged into one, of `half` columns each, both with an adapter's change."""
    return GATED.replace("HALF", str(half)).replace("WHOLE", str(2 * half))


def text_after(graph: str, *rewrites: StepRewrite, target: str = "h100") -> str:
    """The text of a graph's steps for an H100 or another target, after these rewrites."""
    found: list[str] = []
    options = LowerOptions("bf16", backend_for(find_target(target), "bf16").profile, block_size=16)
    lower(parse_graph(graph), options, lambda report, program: found.append(steps_text(program)), rewrites)
    return found[-1]


def run(tmp_path: Path, *arguments: str) -> Result:
    (tmp_path / "graph.txt").write_text(NORMED)
    return CliRunner().invoke(main, ["opt", str(tmp_path / "graph.txt"), *arguments])


def test_the_names_on_the_command_line() -> None:
    assert STEP_NAMES == (LOWER, *(item.name for item in REWRITES))
    assert all(find_rewrite(item.name) is item for item in REWRITES)


def test_lowered() -> None:
    assert_expected_inline(
        text_after(NORMED),
        """\
  b0 = embedding(ids=token_ids, table=@table) {n=32, table_rows=16, stored={format=bf16, role=table}}
  b1 = linear(x=b0, w=@up) {k=32, n=64, stored={format=bf16, role=product}}
  b2 = pointwise(args.0=b1) {body="t0 = silu a0", shape=[64], walks=[[1], [1]]}
  b3 = linear(x=b2, w=@down) {k=64, n=32, stored={format=bf16, role=product}}
  b4, b5 = add_rms_norm(x=b0, r=b3, w=@norm) {d=32, eps=1e-06}
  b6 = select_rows(x=b4) {rows=logit_rows, n=32}
  logits = linear(x=b6, w=@head) {rows=logit_rows, k=32, n=16, stored={format=bf16, role=product}}
""",
    )


def test_fuse_epilogues() -> None:
    assert_expected_inline(
        text_after(NORMED, find_rewrite("fuse-epilogues")),
        """\
  b0 = embedding(ids=token_ids, table=@table) {n=32, table_rows=16, stored={format=bf16, role=table}}
  b2 = linear(x=b0, w=@up) {k=32, n=64, stored={format=bf16, role=product}, epilogue={body="t0 = silu a0", inputs=[{offset=0, stride=1}], width=64}}
  b3 = linear(x=b2, w=@down) {k=64, n=32, stored={format=bf16, role=product}}
  b4, b5 = add_rms_norm(x=b0, r=b3, w=@norm) {d=32, eps=1e-06}
  b6 = select_rows(x=b4) {rows=logit_rows, n=32}
  logits = linear(x=b6, w=@head) {rows=logit_rows, k=32, n=16, stored={format=bf16, role=product}}
""",
    )


def test_join_adapters() -> None:
    rewrites = find_rewrite("fuse-epilogues"), find_rewrite("join-adapters")
    assert_expected_inline(
        text_after(ADAPTED, *rewrites),
        """\
  b0 = embedding(ids=token_ids, table=@table) {n=32, table_rows=16, stored={format=bf16, role=table}}
  b1 = expert_linear(x=b0, w=@A, index=positions) {k=32, n=16, stored={format=bf16, role=product}, experts=4, topk=1, x_per_slot=True}
  b4 = linear(x=b0, w=@up, low.0=b1, up.0=@B, shift.0=@bias, slot=positions) {k=32, n=64, stored={format=bf16, role=product}, epilogue={body="t0 = add a0 a1", inputs=[{offset=0, stride=1}, {ends=[64], rank=16, slots=4}], width=64}}
  b5 = select_rows(x=b4) {rows=logit_rows, n=64}
  logits = pointwise(args.0=b5) {rows=logit_rows, body="t0 = copy a0", shape=[64], walks=[[1], [1]]}
""",
    )
    read_twice = ADAPTED.replace(
        "%8: f32[L, 64] = icc.select_rows(%7",
        '%9: f32[T, 64] = icc.pointwise([%7, %5], "t0 = mul a0 a1")\n  %8: f32[L, 64] = icc.select_rows(%9',
    )
    assert "low.0" not in text_after(read_twice, *rewrites)
    assert "low.0" not in text_after(ADAPTED.replace("@bias: f32[4, 64]", "None"), *rewrites)


def added(graph: str) -> str:
    """The text of a graph's steps for CPUs after add-changes."""
    return text_after(graph, find_rewrite("add-changes"), target="cpu")


def test_add_changes() -> None:
    assert_expected_inline(
        added(ADAPTED),
        """\
  b0 = embedding(ids=token_ids, table=@table) {n=32, table_rows=16, stored={format=bf16, role=table}}
  b1 = expert_linear(x=b0, w=@A, index=positions) {k=32, n=16, stored={format=bf16, role=product}, experts=4, topk=1, x_per_slot=True}
  b4 = linear(x=b0, w=@up, low.0=b1, up.0=@B, shift.0=@bias, slot=positions) {k=32, n=64, stored={format=bf16, role=product}, epilogue={body="t0 = add a0 a1", inputs=[{offset=0, stride=1}, {ends=[64], rank=16, slots=4, stored={format=bf16, role=product}}], width=64}}
  b5 = select_rows(x=b4) {rows=logit_rows, n=64}
  logits = pointwise(args.0=b5) {rows=logit_rows, body="t0 = copy a0", shape=[64], walks=[[1], [1]]}
""",
    )
    assert_expected_inline(
        added(JOINED),
        """\
  b0 = embedding(ids=token_ids, table=@table) {n=32, table_rows=16, stored={format=bf16, role=table}}
  b1 = expert_linear(x=b0, w=@A, index=positions) {k=32, n=16, stored={format=bf16, role=product}, experts=4, topk=1, x_per_slot=True}
  b6 = linear(x=b0, w=@up, low.0=b1, low.1=b1, up.0=@B0, up.1=@B1, shift.0=@bias0, shift.1=@bias1, slot=positions) {k=32, n=48, stored={format=bf16, role=product}, epilogue={body="t0 = add a0 a1", inputs=[{offset=0, stride=1}, {ends=[32, 48], rank=16, slots=4, stored={format=bf16, role=product}}], width=48}}
  b7 = select_rows(x=b6) {rows=logit_rows, n=48}
  logits = pointwise(args.0=b7) {rows=logit_rows, body="t0 = copy a0", shape=[48], walks=[[1], [1]]}
""",
    )
    assert_expected_inline(
        added(gated(32)),
        """\
  b0 = embedding(ids=token_ids, table=@table) {n=32, table_rows=16, stored={format=bf16, role=table}}
  b1 = expert_linear(x=b0, w=@A, index=positions) {k=32, n=16, stored={format=bf16, role=product}, experts=4, topk=1, x_per_slot=True}
  b4 = linear(x=b0, w=@up, low.0=b1, low.1=b1, up.0=@B0, up.1=@B1, shift.0=@bias0, shift.1=@bias1, slot=positions) {k=32, n=64, stored={format=bf16, role=product}, epilogue={body="t0 = add a0 a1", inputs=[{offset=0, stride=1}, {ends=[32, 64], rank=16, slots=4, stored={format=bf16, role=product}}], width=64}}
  b5 = pointwise(args.0=b4, args.1=b4+32) {body="t0 = copy a0; t1 = silu t0; t2 = copy a1; t3 = mul t1 t2", shape=[32], walks=[[1], [1], [1]]}
  b6 = select_rows(x=b5) {rows=logit_rows, n=32}
  logits = pointwise(args.0=b6) {rows=logit_rows, body="t0 = copy a0", shape=[32], walks=[[1], [1]]}
""",
    )


@pytest.mark.parametrize(
    ("part", "instead"),
    [
        ('"t0 = add a0 a1")', '"t0 = mul a0 a1")'),  # no sum
        ('"t0 = add a0 a1")', '"t0 = add a0 a1; t1 = mul t0 a0")'),  # the product is also read alone
        ('"t0 = add a0 a1")', '"t0 = add a0 a1; t1 = mul t0 a1")'),  # the change is also read alone
        ("@bias: f32[4, 64]", "None"),
        ("%7, %logit_rows)", "%6, %logit_rows)"),  # the output reads the product without it
        ("%7, %logit_rows)", "%5, %logit_rows)"),
    ],
)
def test_what_is_no_change_of_a_product(part: str, instead: str) -> None:
    assert part in ADAPTED
    assert "low.0" not in added(ADAPTED.replace(part, instead))


def test_changes_of_pieces_that_share_a_tile_stay() -> None:
    """Columns 24 to 31 of the product would be written by two threads at once."""
    assert "low.1" in added(gated(48))
    assert "low.0" not in added(gated(24))


def test_join_norms() -> None:
    assert_expected_inline(
        text_after(NORMED, find_rewrite("join-norms")),
        """\
  b0 = embedding(ids=token_ids, table=@table) {n=32, table_rows=16, stored={format=bf16, role=table}}
  b1 = linear(x=b0, w=@up) {k=32, n=64, stored={format=bf16, role=product}}
  b2 = pointwise(args.0=b1) {body="t0 = silu a0", shape=[64], walks=[[1], [1]]}
  b3, b4, b5 = linear(x=b2, w=@down, norm_in.r=b0, norm_in.w=@norm) {k=64, n=32, stored={format=bf16, role=product}, norm=add_rms_norm, eps=1e-06}
  b6 = select_rows(x=b4) {rows=logit_rows, n=32}
  logits = linear(x=b6, w=@head) {rows=logit_rows, k=32, n=16, stored={format=bf16, role=product}}
""",
    )


def test_code_rows() -> None:
    assert_expected_inline(
        text_after(CODED.replace("FORMAT", "e4m3"), find_rewrite("code-rows")),
        """\
  b0 = embedding(ids=token_ids, table=@table) {n=256, table_rows=16, stored={format=bf16, role=table}}
  b1, b4, b5 = rms_norm(x=b0, w=@norm) {d=256, eps=1e-06, coding=fp8}
  b2 = linear_q(x=b1, w=@w, x_coded.codes=b4, x_coded.scales=b5) {k=256, n=256, stored={format=e4m3, role=product}}
  b3 = select_rows(x=b2) {rows=logit_rows, n=256}
  logits = pointwise(args.0=b3) {rows=logit_rows, body="t0 = copy a0", shape=[256], walks=[[1], [1]]}
""",
    )


def test_rows_of_16_bits_are_not_coded() -> None:
    assert "coding" not in text_after(CODED.replace("FORMAT", "bf16"), find_rewrite("code-rows"))


def test_a_product_that_somebody_else_reads_stays() -> None:
    graph = NORMED.replace(SILU, f'{SILU}  %8: f32[T, 64] = icc.pointwise([%1, %2], "t0 = mul a0 a1")\n')
    graph = graph.replace("icc.linear(%2, @down", "icc.linear(%8, @down")
    assert "epilogue" not in text_after(graph, find_rewrite("fuse-epilogues"))


def test_opt_prints_the_steps_and_what_was_rewritten(tmp_path: Path) -> None:
    done = run(tmp_path, "-p", "fuse-epilogues,join-norms", "--target", "h100", "--verify")
    assert done.exit_code == 0, done.stderr
    assert "epilogue={body=" in done.stdout and "norm=add_rms_norm" in done.stdout
    assert done.stderr.splitlines()[-2:] == ["fuse-epilogues: 1 rewritten, 6 steps", "join-norms: 1 rewritten, 5 steps"]


def test_opt_refuses_what_a_target_has_no_use_for(tmp_path: Path) -> None:
    refused = run(tmp_path, "-p", "join-norms", "--target", "cpu")
    assert refused.exit_code == 2 and "kernels for cpu have no use for it" in refused.stderr
    late = run(tmp_path, "-p", "lower,simplify")
    assert late.exit_code == 2 and "simplify is a pass of the graph, which lower has turned into steps" in late.stderr


class LosesAStep(FuseEpilogues):
    """A rewrite that removes a step whose output others read."""

    name = "loses-a-step"

    def run(self, builder: ProgramBuilder, profile: Profile) -> int:
        builder.records = builder.records[1:]
        return 1


def test_the_program_is_verified_behind_each_rewrite() -> None:
    with pytest.raises(VerifyError, match=r"after pass 'loses-a-step' .* reads buffer .* before it is written"):
        text_after(NORMED, LosesAStep())
