"""What can be told of a compile before anything heavy is imported: a mistake is answered at once."""

from __future__ import annotations

from .engine.output import check_output
from .options import CompileOptions
from .speculate.choice import SpecChoice
from .targets import Target, find_target


def check(options: CompileOptions) -> tuple[Target, SpecChoice | None]:
    """The target and the drafter; raises what is wrong with them, or with the place of the engine."""
    target, choice = find_target(options.target), SpecChoice.parse(options.spec)
    check_output(options.output, options.force)
    return target, choice
