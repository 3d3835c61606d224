"""Passes by name, and pass lists as text: `canonicalize,quantize-rtn{group=32},fuse`.

A pass's options are its dataclass fields. Another package's passes are found through its entry points (icc.passes).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import fields
from importlib import import_module
from typing import TYPE_CHECKING, Any, get_type_hints

from ..compiler.adapter_slots import AdapterSlots, read_adapter_slots
from ..compiler.errors import ExtensionError, UsageError
from ..compiler.eviction import Eviction, read_eviction
from ..runtime import extensions

if TYPE_CHECKING:
    from .base import Pass

GROUP = "icc.passes"
PASSES: dict[str, str] = {
    "absorb-projections": "attention.absorb_projections:AbsorbProjections",
    "dead-code": "canonicalize.dead_code:DeadCode",
    "divide": "parallel.divide:DivideAmongRanks",
    "eliminate-common": "canonicalize.eliminate_common:EliminateCommon",
    "evict": "attention.evict:Evict",
    "fold-constants": "canonicalize.fold_constants:FoldConstants",
    "fuse-add-norm": "fuse.add_norm:FuseAddNorm",
    "fuse-pointwise": "fuse.fuse_pointwise:FusePointwise",
    "insert-adapters": "adapters.insert:InsertAdapters",
    "insert-early-exit": "speculate.insert_early_exit:InsertEarlyExit",
    "insert-medusa-heads": "speculate.insert_medusa_heads:InsertMedusaHeads",
    "merge-linears": "fuse.merge_linears:MergeLinears",
    "paged-attention": "attention.paged_attention:PagedAttention",
    "position-tables": "canonicalize.position_tables:PositionTables",
    "quantize-auto": "quantize.auto:QuantizeAuto",
    "quantize-awq": "quantize.awq:QuantizeAwq",
    "quantize-gptq": "quantize.gptq:QuantizeGptq",
    "quantize-rtn": "quantize.rtn:QuantizeRtn",
    "quantize-smooth": "quantize.smooth:QuantizeSmooth",
    "recognize-norms": "canonicalize.recognize_norms:RecognizeNorms",
    "recognize-rope": "attention.recognize_rope:RecognizeRope",
    "rotate": "quantize.rotate:Rotate",
    "sequence": "parallel.sequence:DivideRows",
    "select-logit-rows": "attention.select_logit_rows:SelectLogitRows",
    "simplify": "canonicalize.simplify:Simplify",
    "stages": "parallel.stages:CutIntoStages",
    "sort-columns": "fuse.sort_columns:SortColumns",
}
# The rules of these passes, and choices that state their reasons: with the names of passes, the values of --explain.
RULES = (
    "awq-scale",
    "divide-by-power-of-two",
    "gptq",
    "layer-norm",
    "neutral-element",
    "no-op",
    "quantize",
    "rms-norm",
    "rope-half",
    "rope-interleaved",
    "rope-partial",
    "rope-split-half",
    "rotate",
    "scaled-layer-norm",
    "scaled-rms-norm",
    "shifted-layer-norm",
    "slice-of-slice",
    "square",
    "view-of-view",
)
PHASES = ("canonicalize", "attention", "fuse")  # functions of pipelines.py that need no arguments
_ITEM = re.compile(r"\s*([\w-]+)\s*(?:\{([^}]*)\})?\s*(?:,|$)")
_READ: dict[Any, Callable[[str], Any]] = {
    bool: lambda text: {"true": True, "false": False}[text.lower()],
    int: int,
    float: float,
    str: str,
    AdapterSlots: read_adapter_slots,
    Eviction | None: read_eviction,
    str | None: lambda text: None if text == "none" else text,
    tuple[str, ...]: lambda text: tuple(text.split("+")),
}


def pass_names() -> list[str]:
    """The names of all passes that `parse_passes` accepts, including those of other packages."""
    return sorted({*PASSES, *extensions.names(GROUP)})


def find_pass(name: str) -> type[Pass]:
    """The pass class of that name; UsageError if there is none, ExtensionError if a package's entry is not a pass."""
    if name in PASSES:
        module, _, attribute = PASSES[name].partition(":")
        return getattr(import_module(f".{module}", __package__), attribute)
    check_names(name)
    from .base import Pass

    found = extensions.load(GROUP, name)
    if not (isinstance(found, type) and issubclass(found, Pass)):
        raise ExtensionError(f"{GROUP} {name!r} is not a Pass but {found!r}")
    if found.name != name:
        raise ExtensionError(f"{GROUP} {name!r}: the name of {found.__name__} is {found.name!r}")
    return found


def check_names(text: str) -> None:
    """Raise UsageError if `text` is not a list of passes or names an unknown one; imports no pass."""
    for name, _ in _items(text):
        if name not in PHASES and name not in PASSES and name not in extensions.names(GROUP):
            raise UsageError(f"there is no pass {name!r}", f"passes: {', '.join([*PHASES, *pass_names()])}")


def check_explainable(name: str) -> None:
    """Raise UsageError if no pass or rule is called `name`; imports no pass, so any rule name of another package is
    accepted."""
    if name not in RULES and name not in pass_names() and not extensions.names(GROUP):
        known = ", ".join(sorted({*RULES, *pass_names()}))
        raise UsageError(f"--explain: no pass or rule is called {name!r}", f"known: {known}")


def parse_passes(text: str) -> list[Pass]:
    """The passes of `NAME[{OPTION=VALUE,...}],...`; a phase stands for its passes. UsageError names what is wrong.

    Items of a tuple are joined by "+". Options that are neither text nor numbers keep their defaults.
    """
    check_names(text)
    passes: list[Pass] = []
    for name, options in _items(text):
        if name not in PHASES:
            passes.append(_make(find_pass(name), options))
        elif options:
            raise UsageError(f"{name} is a phase of the pipeline and has no options")
        else:
            passes += getattr(import_module(".pipelines", __package__), name)()
    return passes


def _items(text: str) -> Iterator[tuple[str, str]]:
    """(name, options) of each item of a list of passes."""
    at = 0
    while at < len(text.rstrip()):
        found = _ITEM.match(text, at)
        if found is None:
            raise UsageError(f"{text[at:]!r} is not a list of passes", "write NAME{option=value,...},NAME")
        yield found[1], found[2] or ""
        at = found.end()


def _make(cls: type[Pass], options: str) -> Pass:
    hints = get_type_hints(cls)
    kinds = {field.name: hints[field.name] for field in fields(cls)}
    given: dict[str, Any] = {}
    for item in filter(None, (part.strip() for part in options.split(","))):
        name, _, value = item.partition("=")
        if name not in kinds:
            raise UsageError(f"pass {cls.name!r} has no option {name!r}", f"options: {', '.join(kinds) or 'none'}")
        read = _READ.get(kinds[name], str if _is_choice(kinds[name]) else None)
        if read is None:
            raise UsageError(f"option {name!r} of pass {cls.name!r} cannot be written as text")
        try:
            given[name] = read(value)
        except (ValueError, KeyError):
            raise UsageError(f"option {name} of pass {cls.name!r}: {value!r} is not {_title(kinds[name])}") from None
        choices = getattr(kinds[name], "__args__", ()) if _is_choice(kinds[name]) else ()
        if choices and value not in choices:
            raise UsageError(f"option {name} of pass {cls.name!r}: {value!r} is none of {', '.join(choices)}")
    return cls(**given)


def _is_choice(kind: Any) -> bool:
    """Whether the type is a Literal of strings."""
    args = getattr(kind, "__args__", ())
    return bool(args) and all(isinstance(arg, str) for arg in args)


def _title(kind: Any) -> str:
    return {bool: "true or false", int: "a whole number", float: "a number"}.get(kind, "text")
