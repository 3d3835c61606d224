"""`icc opt -p ..,fuse-epilogues --target T`: the steps that a graph is lowered to for a target, after some rewrites."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..passes import pipelines
from ..passes.base import PassContext
from ..passes.manager import run_passes
from .backends.registry import backend_for
from .caches import lower_options
from .engine.manifest import make_limits
from .errors import PassError, UsageError
from .graph.facts import Fact
from .graph.graph import Graph
from .options import CompileOptions
from .program.builder import ProgramBuilder
from .program.lower import lower
from .program.profile import Profile
from .program.program import Program
from .program.rewrite import StepRewrite
from .program.rewrites import LOWER, REWRITES, RewriteReport
from .program.steps_text import steps_text
from .targets import find_target


@dataclass(frozen=True)
class Checked(StepRewrite):
    """A rewrite that is run twice: PassError if the second run finds something to do."""

    item: StepRewrite

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.item.name

    def applies(self, profile: Profile) -> bool:
        return self.item.applies(profile)

    def run(self, builder: ProgramBuilder, profile: Profile) -> int:
        count = self.item.run(builder, profile)
        again = self.item.run(builder, profile)
        if again:
            raise PassError(f"a second run of {self.name} rewrites {again} steps again")
        return count


def lowered_text(graph: Graph, model: Path, target: str, names: Sequence[str], check: bool = False) -> tuple[str, str]:
    """The steps after the rewrites `names`, in the compile's order, and for each a line that says what it did.

    First the remaining passes of the graph's pipeline run. check: a second run of each rewrite must change nothing.
    UsageError if the target's kernels do not use a rewrite.
    """
    options = CompileOptions(model, Path(), target=target)
    backend = backend_for(find_target(target), graph.info.weight_dtype)
    chosen = [item for item in REWRITES if item.name in names]
    for item in chosen:
        if not item.applies(backend.profile):
            raise UsageError(f"{item.name}: kernels for {target} have no use for it", "give another --target")
    if Fact.OPTIMIZED not in graph.facts:
        for phase in (pipelines.canonicalize(), pipelines.attention(), pipelines.fuse()):
            run_passes(graph, phase, PassContext())
    lines: list[str] = []
    texts: list[str] = []

    def observe(report: RewriteReport, program: Program) -> None:
        if report.name != LOWER:
            lines.append(f"{report.name}: {report.count} rewritten, {report.steps} steps")
        texts.append(steps_text(program))

    rewrites = tuple(Checked(item) if check else item for item in chosen)
    lower(graph, lower_options(graph, options, backend, make_limits(graph, options)), observe, rewrites)
    return texts[-1], "\n".join(lines)
