"""torch.export once per configuration in all processes of a run: it is most of a tiny model's compile, and does not see
weights."""

from __future__ import annotations

import hashlib
import os
import pickle
from pathlib import Path
from typing import Any


def install() -> None:
    """Makes `load_graph` take an earlier trace of the same model; the fixture `compiler_runs` asks for a new one."""
    from icc.compiler.frontend import load

    export, made = load.export, {}

    def once(model: Any, max_tokens: int, kinds: Any = None, token_types: int = 0) -> Any:
        config = getattr(model, "config", None)
        if config is None or os.environ.get("ICC_COMPILE_ANEW"):
            return export(model, max_tokens, kinds, token_types)
        key = type(model).__qualname__, config.to_json_string(use_diff=False), max_tokens, kinds is None, token_types
        if key not in made:
            file = Path(os.environ["ICC_COMPILED_ONCE"], hashlib.sha256(repr(key).encode()).hexdigest())
            made[key] = _read(file) or _written(file, export(model, max_tokens, kinds, token_types))
        return made[key]

    load.export = once


def _read(file: Path) -> Any:
    import torch
    from icc.compiler.frontend.export.trace import Traced

    if not file.with_suffix(".repeats").exists():  # the last that is written
        return None
    return Traced(torch.export.load(file.with_suffix(".pt2")), pickle.loads(file.with_suffix(".repeats").read_bytes()))


def _written(file: Path, traced: Any) -> Any:
    import torch

    for suffix, write in (
        (".pt2", lambda name: torch.export.save(traced.program, name)),
        (".repeats", lambda name: name.write_bytes(pickle.dumps(traced.repeats))),
    ):
        partial = file.with_suffix(f".{os.getpid()}{suffix}")
        write(partial)
        partial.replace(file.with_suffix(suffix))
    return traced
