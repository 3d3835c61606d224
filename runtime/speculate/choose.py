"""`--spec` at run time: makes a speculator from its text, or from the engine's own choice."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ExtensionError, IccError, UsageError
from ..executor.base import Executor, LayeredExecutor, SectionExecutor
from ..format.load import Engine, open_engine
from ..format.lookahead import LOOKAHEAD, Lookahead
from ..format.speculation import DRAFT_LAYER

if TYPE_CHECKING:  # only the chosen drafter is imported
    from ..adapters.resident import ResidentAdapters
    from .drafter import Drafter
    from .second_engine import EngineDrafter
    from .speculator import Speculator
    from .typical import TypicalAcceptance

GROUP = "icc.drafters"  # entry points of other packages, see `_of_a_package`
NONE = "none"
# Draft layers of an engine, by their names at compile time; and those without keys and values.
LAYERS = {"mtp": "mtp", "eagle": "eagle:DIR", "assistant": "assistant:DIR", "dflash": "dflash:DIR"}
READ_ONLY = ("assistant",)
MakeExecutor = Callable[[Engine, str, str], Executor]  # (program of an engine, the section to run, "" for none)
EXIT = "exit"  # the section that computes logits after the first layers
DRAFT = "draft"  # the program of an engine that drafts for its main program
UNO = "uno"


def choose_speculator(
    spec: str | None,
    engine: Engine,
    executor: Executor,
    make_executor: MakeExecutor,
    typical: TypicalAcceptance | None = None,
    adapters: ResidentAdapters | None = None,
) -> Speculator | None:
    """The speculator for `spec`: "none", "mtp", "eagle", "assistant", "dflash", "medusa", "ngram", "suffix",
    "lookahead", "lookahead:W,N,G", "layer-skip", "uno:DIR", "draft", "draft:ENGINE", or a drafter of another package,
    as NAME or NAME:ARGUMENT; None: the drafter that the engine was compiled for. The result is None for "none", or if
    spec is None and the engine was compiled without a drafter.

    make_executor: makes an executor for another program. typical: how guesses are accepted; None: losslessly. adapters:
    the engine's, None if it has no room for any. UsageError if `spec` is unknown, if the engine lacks what it needs, or
    if `typical` is given without a drafter; for "uno:DIR" also the errors of `ResidentAdapters.hold`.
    """
    own = engine.program.speculation
    chosen = spec if spec is not None else own.drafter if own is not None else NONE
    if chosen == NONE:
        if typical is not None:
            raise UsageError("--spec-accept typical: there is no drafter", "give --spec, or compile the engine with it")
        return None
    if engine.manifest.embedding is not None:
        raise UsageError(f"--spec {chosen}: the engine was compiled for embeddings, there are no tokens to guess")
    from .ledger import SLOPE
    from .speculator import Speculator

    name, _, path = chosen.partition(":")
    if name == UNO and path:
        drafter = _with_adapter(path, engine, executor, adapters)
    else:
        drafter = _drafter(chosen, engine, executor, make_executor)
    return Speculator(drafter, slope=SLOPE if own is None else own.slope, typical=typical)


def _drafter(chosen: str, engine: Engine, executor: Executor, make_executor: MakeExecutor) -> Drafter:
    own = engine.program.speculation
    name, _, path = chosen.partition(":")
    if (alone := _of_texts(chosen, executor)) is not None:
        return alone
    if chosen == "medusa":
        from .medusa import SECTION, MedusaDrafter

        if own is None or engine.program.section(SECTION) is None or not isinstance(executor, SectionExecutor):
            raise UsageError("--spec medusa: the engine has no Medusa heads", "compile it with --spec medusa:DIR")
        return MedusaDrafter(executor, own)
    if chosen in LAYERS:
        return _layer(chosen, engine, executor)
    if chosen == DRAFT:
        if DRAFT not in engine.manifest.programs:
            raise UsageError("--spec draft: the engine has no program 'draft'", "give draft:ENGINE")
        return _another_program(chosen, engine, engine.open_program(DRAFT), make_executor)
    if name == DRAFT and path:
        return _another_program(chosen, engine, open_engine(path), make_executor)
    if chosen == "layer-skip":
        if engine.program.section(EXIT) is None:
            raise UsageError("--spec layer-skip: the engine has no early exit", "compile it with --spec layer-skip:N")
        from .second_engine import EngineDrafter

        return EngineDrafter(make_executor(engine, engine.name, EXIT), engine.manifest.limits.max_seq_len, name=chosen)
    return _of_a_package(name, path, engine, executor)


def _with_adapter(path: str, engine: Engine, executor: Executor, adapters: ResidentAdapters | None) -> Drafter:
    """The drafter that is the model itself with the adapter of a directory."""
    from .uno import UnoDrafter

    spec = f"--spec {UNO}:{path}"
    if adapters is None:
        raise UsageError(f"{spec}: the engine has no room for adapters", "compile the model with --adapters 1x128")
    _without_states(spec, executor, "which noise would change")
    loaded = adapters.hold("of --spec uno", Path(path))
    longest = engine.manifest.limits.max_seq_len
    return UnoDrafter(executor, loaded.slot, longest, partial(adapters.let_go, loaded))


def _without_states(spec: str, executor: Executor, why: str) -> None:
    """UsageError if the model has recurrent states. why: a clause about them, for the message."""
    if any(group.holds_states for group in executor.groups):
        raise UsageError(f"{spec}: the model has recurrent states, {why}", "give ngram or suffix")


def _of_texts(chosen: str, executor: Executor) -> Drafter | None:
    """The drafter of that name if it needs no weights, only texts or the model's tokens; else None."""
    name, _, shape = chosen.partition(":")
    if chosen == "ngram":
        from .ngram import NgramDrafter

        return NgramDrafter()
    if chosen == "suffix":
        from .suffix import SuffixDrafter

        return SuffixDrafter()
    if name == LOOKAHEAD:
        from .lookahead import LookaheadDrafter

        _without_states(f"--spec {chosen}", executor, "which check one chain of guesses, not a window")
        return LookaheadDrafter(Lookahead.parse(shape))
    return None


def _layer(chosen: str, engine: Engine, executor: Executor) -> Drafter:
    """The drafter that uses a draft layer of the engine."""
    own, has_layer = engine.program.speculation, engine.program.section(DRAFT_LAYER) is not None
    if own is None or own.drafter != chosen or not has_layer or not isinstance(executor, LayeredExecutor):
        hint = f"compile it with --spec {LAYERS[chosen]}"
        raise UsageError(f"--spec {chosen}: the engine has no layer that guesses", hint)
    sizes = [group.block_size for group in executor.groups]
    if own.block:
        from .draft_block import BlockDrafter

        return BlockDrafter(executor, sizes, chosen, own.block, own.mask_token, engine.manifest.limits.max_seq_len)
    from .draft_layer import LayerDrafter

    return LayerDrafter(executor, sizes, chosen, keeps=chosen not in READ_ONLY)


def _of_a_package(name: str, argument: str, engine: Engine, executor: Executor) -> Drafter:
    """The drafter that the entry point `name` makes from its argument in --spec ("" for none), the engine and the
    executor. UsageError if no package has a drafter of that name, ExtensionError if the package fails to make it."""
    from .. import extensions
    from .drafter import Drafter

    make = extensions.load(GROUP, name)
    if make is None:
        known = ["none", *LAYERS, "medusa", "layer-skip", "ngram", "suffix", LOOKAHEAD, f"{UNO}:DIR", "draft"]
        known += [*extensions.names(GROUP), "draft:ENGINE"]
        raise UsageError(f"--spec {name!r} is unknown", f"give {', '.join(known[:-1])} or {known[-1]}")
    try:
        drafter = make(argument, engine, executor)
    except IccError:
        raise
    except Exception as error:  # third-party code may raise anything
        said = f"{type(error).__name__}: {error}"
        raise ExtensionError(
            f"{GROUP} {name!r} fails for {argument!r}, what follows its name in --spec: {said}"
        ) from error
    if not isinstance(drafter, Drafter):
        raise ExtensionError(f"{GROUP} {name!r} makes no Drafter but {drafter!r}")
    return drafter


def _another_program(spec: str, engine: Engine, second: Engine, make_executor: MakeExecutor) -> EngineDrafter:
    """The drafter that runs another program, of this engine or of a second one, which must have the same tokens. It
    closes `second`."""
    from .second_engine import EngineDrafter

    try:
        ours, theirs = engine.program.vocab_size, second.program.vocab_size
        if not second.program.samples:
            raise UsageError(f"--spec {spec}: its engine was compiled for embeddings and generates no tokens")
        if ours != theirs:
            raise UsageError(f"--spec {spec}: its engine has a vocabulary of {theirs} tokens, the engine has {ours}")
        if engine.tokenizer_json() != second.tokenizer_json():
            raise UsageError(f"--spec {spec}: its engine has another tokenizer than the engine")
        limit = second.manifest.limits.max_seq_len
        return EngineDrafter(make_executor(second, second.name, ""), limit, second)
    except BaseException:
        second.close()
        raise
