"""The manager: requirements, verification, reports and dumps."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
from graph_tracing import aten, icc, mean, trace
from icc.compiler.errors import PassError, VerifyError
from icc.compiler.graph.facts import Fact
from icc.compiler.graph.graph import Graph
from icc.passes.attention.paged_attention import PagedAttention
from icc.passes.attention.recognize_rope import RecognizeRope
from icc.passes.base import Pass, PassContext, PassResult, Refusal
from icc.passes.canonicalize.dead_code import DeadCode
from icc.passes.canonicalize.eliminate_common import EliminateCommon
from icc.passes.canonicalize.fold_constants import FoldConstants
from icc.passes.canonicalize.position_tables import PositionTables
from icc.passes.canonicalize.recognize_norms import RecognizeNorms
from icc.passes.canonicalize.simplify import Simplify
from icc.passes.fuse.fuse_pointwise import FusePointwise
from icc.passes.manager import check_order, run_passes


def graph() -> Graph:
    return trace(lambda x: aten.exp.default(x) * 2.0, x="f32[T, 8]")


@dataclass(frozen=True)
class Spoil(Pass):
    """A pass that gives the output a wrong type."""

    name: ClassVar[str] = "spoil"

    def run(self, graph: Graph, ctx: PassContext) -> PassResult:
        graph.output.meta["type"] = graph.output.args[0].meta["type"].__class__("tokens", (9,), None)  # type: ignore[union-attr, arg-type]
        return PassResult(True, Counter(spoiled=1))


def test_requirements_are_checked_before_the_pass() -> None:
    built = trace(lambda positions, x: x + aten.cos.default(positions.view(-1, 1)), positions="", x="f32[T, 8]")
    reason = r"'recognize-rope' requires position-tables, but cos_default computes with positions alone"
    with pytest.raises(PassError, match=reason):
        run_passes(built, [RecognizeRope()], PassContext())
    run_passes(built, [PositionTables(), RecognizeRope()], PassContext())


@dataclass(frozen=True)
class Claim(Pass):
    """A pass that claims to leave no two equal calls, and does nothing."""

    name: ClassVar[str] = "claim"
    ensures: ClassVar[frozenset[str]] = frozenset({Fact.UNIQUE})

    def run(self, graph: Graph, ctx: PassContext) -> PassResult:
        return PassResult(False)


def test_what_a_pass_ensures_is_checked_after_it() -> None:
    built = trace(lambda x: aten.exp.default(x) + aten.exp.default(x), x="f32[T, 8]")
    reason = "'claim' ensures unique, but exp_default_1 computes again what an earlier call does"
    with pytest.raises(PassError, match=reason):
        run_passes(built, [Claim()], PassContext())


def test_the_order_of_passes_is_checked_without_a_graph() -> None:
    with pytest.raises(PassError, match=r"'paged-attention' requires rope, which no earlier pass ensures"):
        check_order([PositionTables(), PagedAttention()])
    assert check_order([PositionTables(), RecognizeRope(), PagedAttention()]) >= {Fact.PAGED, Fact.ROPE}
    with pytest.raises(PassError, match=r"'recognize-norms' requires unique"):  # views must be folded again
        check_order([FoldConstants(), EliminateCommon(), Simplify(), RecognizeNorms()])


def test_verifies_after_each_pass() -> None:
    with pytest.raises(VerifyError, match="spoil") as caught:
        run_passes(graph(), [DeadCode(), Spoil(), DeadCode()], PassContext())
    assert caught.value.pass_name == "spoil"


def test_reports_and_facts() -> None:
    built = trace(lambda x, y: x * aten.rsqrt.default(mean(x * x) + 1e-5) * y, x="f32[T, 8]", y="f32[T, 8]")
    ctx = PassContext()
    norms, fused = run_passes(built, [RecognizeNorms(), FusePointwise()], ctx)
    assert (norms.name, norms.modified, norms.counts) == ("recognize-norms", True, {"rms-norm": 1})
    assert norms.refusals == (
        Refusal("scaled-rms-norm", "mul_tensor_2", "the scale is not a constant vector over the last axis"),
    )
    assert fused.refusals == () and fused.counts == {"kernels": 1, "fused-ops": 1} and fused.seconds >= 0
    assert built.facts == {Fact.NORMS, Fact.OPTIMIZED}


def test_optimized_graphs_may_hold_dialect_ops_only() -> None:
    built = graph()
    built.facts.add(Fact.OPTIMIZED)
    with pytest.raises(VerifyError, match="is not an op of this stage"):
        run_passes(built, [DeadCode()], PassContext())


def test_dumps_the_graph_after_each_pass(tmp_path: Path) -> None:
    run_passes(graph(), [DeadCode(), FusePointwise()], PassContext(), tmp_path / "dump")
    names = sorted(p.name for p in (tmp_path / "dump").iterdir())
    assert names == ["00-dead-code.txt", "01-fuse-pointwise.txt"]
    text = (tmp_path / "dump" / names[1]).read_text()
    assert 'icc.pointwise([%0], "t0 = exp a0; t1 = mul t0 2.0")' in text


def test_progress_is_told() -> None:
    seen: list[tuple[str, int, int]] = []
    run_passes(graph(), [DeadCode(), FusePointwise()], PassContext(progress=lambda *told: seen.append(told)))
    assert seen == [("dead-code", 0, 2), ("fuse-pointwise", 1, 2)]


def test_dead_nodes_are_swept_after_each_pass() -> None:
    built = trace(
        lambda x: (icc.rms_norm.default(x, None, 1e-5), aten.exp.default(x))[1], keep_dead=True, x="f32[T, 8]"
    )
    run_passes(built, [FusePointwise()], PassContext())
    assert not any(n.target is icc.rms_norm.default for n in built.nodes)
