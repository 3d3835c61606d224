"""Other weights for an engine that is there: its program and kernels stay."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .engine.earlier import EarlierEngine, open_earlier
from .engine.output import check_output
from .options import CompileOptions
from .recorded import options_again


def check_refit(
    engine: Path, checkpoint: Path, output: Path | None, force: bool, given: Mapping[str, Any]
) -> tuple[EarlierEngine, CompileOptions]:
    """The engine, opened and verified, and the options of a compile of CHECKPOINT as it was compiled, to `output` or in
    its place. given: files that those options name, see `options_again`. What that and `open_engine` raise."""
    if output is not None:
        check_output(output, force)
    earlier = open_earlier(engine)
    return earlier, options_again(earlier.engine, checkpoint, output or engine, given)
