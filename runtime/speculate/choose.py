"""`--spec` at run time: from its text, or the engine's own choice, to a speculator."""

from __future__ import annotations

from ..engine.load import Engine
from ..errors import UsageError
from ..executor.base import Executor
from .drafter import Drafter
from .medusa import HeadsExecutor, MedusaDrafter
from .ngram import NgramDrafter
from .speculator import Speculator

NONE = "none"


def choose_speculator(spec: str | None, engine: Engine, executor: Executor) -> Speculator | None:
    """The speculator for `spec`: "none", "medusa" or "ngram"; None is what the engine was compiled for.

    UsageError if it is unknown, or the engine lacks what it needs.
    """
    own = engine.program.speculation
    chosen = spec if spec is not None else own.drafter if own is not None else NONE
    if chosen == NONE:
        return None
    drafter = _drafter(chosen, engine, executor)
    return Speculator(drafter) if own is None else Speculator(drafter, slope=own.slope)


def _drafter(chosen: str, engine: Engine, executor: Executor) -> Drafter:
    own = engine.program.speculation
    if chosen == "ngram":
        return NgramDrafter()
    if chosen == "medusa":
        if own is None or not own.heads or not isinstance(executor, HeadsExecutor):
            raise UsageError("--spec medusa: the engine has no Medusa heads", "compile it with --spec medusa:DIR")
        return MedusaDrafter(executor, own)
    raise UsageError(f"--spec {chosen!r} is unknown", "give none, medusa or ngram")
