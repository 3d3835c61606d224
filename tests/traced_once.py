"""Runs torch.export once per configuration for all processes of a run: it takes most of a tiny model's compile, and
does not depend on weights."""

from __future__ import annotations

import functools
import hashlib
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class _Callable(type):
    """Stands for `Callable` in torch's annotations, which it evaluates ten thousand times per trace."""

    def __getitem__(cls, _: Any) -> _Callable:
        return cls

    def __instancecheck__(cls, value: Any) -> bool:
        return callable(value)


def _look_once() -> None:
    """Cache torch.export's look-up of all operators of the dispatcher, which takes a third of each tiny trace."""
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
    """Makes `load_graph` use an earlier trace of the same transformers model.

    The fixture `compiler_runs` forces a new one.
    """
    from icc.compiler.frontend import load

    _look_once()
    export, made = load.export, {}

    def once(model: Any, max_tokens: int, kinds: Any = None, declared: Any = ()) -> Any:
        if not type(model).__module__.startswith("transformers.") or os.environ.get("ICC_COMPILE_ANEW"):
            return export(model, max_tokens, kinds, declared)
        key = _facts(model, kinds), max_tokens, kinds is None, repr(declared)
        if key not in made:
            file = Path(os.environ["ICC_COMPILED_ONCE"], hashlib.sha256(repr(key).encode()).hexdigest())
            made[key] = _read(file) or _written(file, export(model, max_tokens, kinds, declared))
        return made[key]

    load.export = once


def _facts(model: Any, kinds: Any) -> tuple[Any, ...]:
    """All that a trace depends on, except the model's folder: the configuration; names, types and ties of tensors; the
    values of tensors that are not on meta, and of integer attributes that may distinguish layers."""
    config = {name: value for name, value in _everywhere(model.config.to_dict()) if name != "quantization_config"}
    first: dict[int, int] = {}
    tensors = (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    )
    described = [
        (name, tuple(t.shape), str(t.dtype), first.setdefault(id(t), number), None if t.is_meta else _digest(t))
        for number, (name, t) in enumerate(tensors)
    ]
    stored = {} if kinds is None else kinds._weights
    whole = [(name, _digest(w.load())) for name, w in stored.items() if not w.dtype.is_floating_point]
    written_out = getattr(model.config, "_attn_implementation", None)
    return type(model).__qualname__, repr(sorted(config.items())), written_out, repr(described), repr(whole)


def _digest(tensor: Any) -> str:
    import torch

    return hashlib.sha256(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def _everywhere(config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The fields of a configuration and of those inside it, without the folder that they were read from."""
    for name, value in config.items():
        if name != "_name_or_path":
            yield name, sorted(_everywhere(value), key=str) if isinstance(value, dict) else value


def _read(file: Path) -> Any:
    import torch
    from icc.compiler.frontend.export.trace import Traced

    if not file.with_suffix(".repeats").exists():  # written last
        return None
    repeats, shortest = pickle.loads(file.with_suffix(".repeats").read_bytes())
    return Traced(torch.export.load(file.with_suffix(".pt2")), repeats, shortest)


def _written(file: Path, traced: Any) -> Any:
    import torch

    for suffix, write in (
        (".pt2", lambda name: torch.export.save(traced.program, name)),
        (".repeats", lambda name: name.write_bytes(pickle.dumps((traced.repeats, traced.shortest)))),
    ):
        partial = file.with_suffix(f".{os.getpid()}{suffix}")
        write(partial)
        partial.replace(file.with_suffix(suffix))
    return traced
