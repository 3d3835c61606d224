"""torch.export once per configuration in all processes of a run: it is most of a tiny model's compile, and does not see
weights."""

from __future__ import annotations

import functools
import hashlib
import os
import pickle
from pathlib import Path
from typing import Any


class _Callable(type):
    """Stands for `Callable` in torch's annotations, which it evaluates ten thousand times per trace."""

    def __getitem__(cls, _: Any) -> _Callable:
        return cls

    def __instancecheck__(cls, value: Any) -> bool:
        return callable(value)


def _look_once() -> None:
    """torch.export looks up all operators of the dispatcher in every trace, a third of a tiny one: once is enough."""
    from torch import _ops
    from torch._export import utils
    from torch.export import decomp_utils, exported_program

    found = functools.cache(utils._collect_all_valid_cia_ops)
    for module in (utils, decomp_utils, exported_program):
        module._collect_all_valid_cia_ops = found
    utils._materialize_cpp_cia_ops()
    utils._materialize_cpp_cia_ops = lambda: None
    _ops.Callable = _Callable("Callable", (), {})


def install() -> None:
    """Makes `load_graph` take an earlier trace of the same model of transformers.

    The fixture `compiler_runs` asks for a new one.
    """
    from icc.compiler.frontend import load

    _look_once()
    export, made = load.export, {}

    def once(model: Any, max_tokens: int, kinds: Any = None, declared: Any = ()) -> Any:
        if not type(model).__module__.startswith("transformers.") or os.environ.get("ICC_COMPILE_ANEW"):
            return export(model, max_tokens, kinds, declared)
        config = {name: value for name, value in model.config.to_dict().items() if name != "quantization_config"}
        key = type(model).__qualname__, repr(sorted(config.items())), max_tokens, kinds is None, repr(declared)
        if key not in made:
            file = Path(os.environ["ICC_COMPILED_ONCE"], hashlib.sha256(repr(key).encode()).hexdigest())
            made[key] = _read(file) or _written(file, export(model, max_tokens, kinds, declared))
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
