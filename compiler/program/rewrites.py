"""The step rewrites in their order, and the function that runs them: it times each and then verifies the program."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from ..errors import UsageError
from .adapted_products import JoinAdapters
from .added_changes import AddChanges
from .builder import ProgramBuilder
from .coded_rows import CodeRows
from .epilogue import FuseEpilogues
from .joined_norms import JoinNorms
from .profile import Profile
from .program import Program
from .rewrite import StepRewrite
from .verify import verify_steps

REWRITES: tuple[StepRewrite, ...] = (FuseEpilogues(), JoinAdapters(), AddChanges(), JoinNorms(), CodeRows())
LOWER = "lower"  # the name in reports of the walk over the graph that makes the steps


@dataclass(frozen=True)
class RewriteReport:
    """The effect of a rewrite: seconds, how many steps it rewrote, and how many the program has afterwards."""

    name: str
    seconds: float
    count: int
    steps: int


Observer = Callable[[RewriteReport, Program], None]


def find_rewrite(name: str) -> StepRewrite:
    """The rewrite of that name; UsageError if there is none."""
    for item in REWRITES:
        if item.name == name:
            return item
    raise UsageError(f"there is no step rewrite {name!r}", f"rewrites: {', '.join(item.name for item in REWRITES)}")


def run_rewrites(
    builder: ProgramBuilder,
    profile: Profile,
    program: Callable[[], Program],
    observe: Observer,
    rewrites: tuple[StepRewrite, ...] = REWRITES,
) -> None:
    """Run those of `rewrites` that the back end has kernels for.

    program: gives the builder's current program, without places in memory. observe: called with the report of the
    lowering and of each rewrite. VerifyError names the rewrite after which a step reads a value that does not exist or
    has another type.
    """
    _observed(LOWER, 0.0, len(builder.records), program(), observe)
    for item in rewrites:
        if item.applies(profile):
            start = time.perf_counter()
            count = item.run(builder, profile)
            _observed(item.name, time.perf_counter() - start, count, program(), observe)


def _observed(name: str, seconds: float, count: int, program: Program, observe: Observer) -> None:
    verify_steps(program, name)
    observe(RewriteReport(name, seconds, count, len(program.steps)), program)
