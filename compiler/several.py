"""A compile for several targets: a compile for each, and their engines joined to one."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..runtime.format.load import read_targets
from ..runtime.format.open_container import open_container
from ..runtime.format.present import BESIDE, check_present
from ..runtime.format.targets import TargetFiles
from .calibrations import kept_between_targets
from .engine.atomic import engine_output
from .engine.output import check_output
from .errors import UsageError
from .options import CompileOptions
from .progress import Reporter
from .request import check
from .targets import find_target

if TYPE_CHECKING:  # imports torch
    from .report import CompileReport

_PARTS = ".parts"  # a folder in the directory that becomes the engine: an engine per target, until they are joined
One = tuple[CompileOptions, "CompileReport"]  # one target: its options, with the path of its engine, and its report
Done = list[One]


def for_targets(model: Path, output: Path, given: Mapping[str, Any]) -> list[CompileOptions]:
    """The options of a compile for each target that `target` names, with commas. given: the fields of CompileOptions;
    with several targets `isa` and `os` apply only to CPUs other than this machine's. UsageError if a target is named
    twice, or if several targets are given with an option for one."""
    text, found = given.get("target", CompileOptions.target), list[CompileOptions]()
    for name in text.split(","):
        fields = {**given, "target": name.strip()}
        target = find_target(name.strip())
        if "," in text and (target.backend != "cpu" or target.is_here):
            fields["isa"] = fields["os"] = None
        found.append(CompileOptions(model=model, output=output, **fields))
    names = [options.target for options in found]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UsageError(f"--target {text}: {twice[0]} is there twice", "name it once")
    if len(found) > 1 and found[0].like is not None:
        raise UsageError("--like is for one target", "compile for each by itself: --like ENGINE/TARGET")
    return found


def compile_all(asked: Sequence[CompileOptions], reporter: Reporter) -> Done:
    """Compile for each target, to the output that all name. Raises as `compile_engine`, which makes the engine directly
    if there is one target."""
    from .driver import compile_engine
    from .measure import check_device

    if len(asked) == 1:
        return [(asked[0], compile_engine(asked[0], reporter))]
    for options in asked:  # check the last target, too: else minutes would be lost
        check(options)
        if options.gate:
            check_device(find_target(options.target))

    def part(options: CompileOptions, output: Path) -> One:
        dumps = options.dump_passes and options.dump_passes / options.target
        options = replace(options, output=output, force=False, dump_passes=dumps)
        return options, compile_engine(options, reporter)

    with kept_between_targets():
        return _joined(asked[0].output, {options.target: partial(part, options) for options in asked}, reporter)


def refit_all(
    engine: Path, checkpoint: Path, output: Path | None, force: bool, given: Mapping[str, Any], reporter: Reporter
) -> Done:
    """Put the weights of a checkpoint into the engine of each target; see `check_refit` for the arguments and what it
    raises. UsageError for an in-place refit of one target of an engine with several."""
    check_present(engine)
    lost = set[str]()
    if output is not None:
        check_output(output, force)
    else:
        lost = {Path(name).name for name in open_container(engine).sizes()}.intersection(BESIDE)
    done = _refitted(engine, checkpoint, output, force, given, reporter)
    if lost:  # they would not be true of the new weights
        reporter.warn(f"{engine} has lost {', '.join(sorted(lost))}: make them again for the new weights")
    return done


def _refitted(
    engine: Path, checkpoint: Path, output: Path | None, force: bool, given: Mapping[str, Any], reporter: Reporter
) -> Done:
    from .driver import compile_engine  # these import torch
    from .refit import check_refit

    targets = read_targets(engine)
    if targets is None:
        if output is None and isinstance(open_container(engine), TargetFiles):
            raise UsageError(f"{engine} is one target of an engine", "give -o, or refit the whole engine")
        earlier, options = check_refit(engine, checkpoint, output, force, given)
        with closing(earlier):
            return [(options, compile_engine(options, reporter, earlier))]

    def part(target: str, output: Path) -> One:
        earlier, options = check_refit(engine / target, checkpoint, output, False, given)
        with closing(earlier):
            return options, compile_engine(options, reporter, earlier)

    with kept_between_targets():
        return _joined(output or engine, {target: partial(part, target) for target in targets.targets}, reporter)


def _joined(output: Path, parts: Mapping[str, Callable[[Path], One]], reporter: Reporter) -> Done:
    """Join the engines that `parts` write, by their targets, into one."""
    from .engine.joining import join_engines

    found: dict[str, One] = {}
    with engine_output(output) as stage:
        (stage / _PARTS).mkdir()
        for target, part in parts.items():
            found[target] = part(stage / _PARTS / target)
        with reporter.stage("join"):
            join_engines({target: stage / _PARTS / target for target in parts}, stage)
            shutil.rmtree(stage / _PARTS)
    return [
        (
            replace(options, output=output / target),
            replace(report, engine_bytes=sum(open_container(output / target).sizes().values())),
        )
        for target, (options, report) in found.items()
    ]
