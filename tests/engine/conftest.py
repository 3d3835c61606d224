"""Engines of tiny checkpoints, compiled once per session and shared."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest


class Compiled(NamedTuple):
    """An engine, the checkpoint it came from, and transformers' float32 model of that checkpoint."""

    engine: Path
    checkpoint: Path
    oracle: Any


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory, tiny: Any) -> Callable[..., Compiled]:
    """compiled(name, dtype="float32", **options): the engine of a tiny configuration, for this machine."""
    import icc

    known: dict[tuple[Any, ...], Compiled] = {}
    checkpoints: dict[tuple[str, str], tuple[Path, Any]] = {}
    configs = tiny.tiny_configs()

    def get(name: str, dtype: str = "float32", **options: Any) -> Compiled:
        options = {"target": "native", **options}
        key = (name, dtype, *sorted(options.items()))
        if key not in known:
            if (name, dtype) not in checkpoints:
                path = tmp_path_factory.mktemp("model") / name
                checkpoints[name, dtype] = path, tiny.save_tiny(configs[name], path, dtype=dtype)
            path, oracle = checkpoints[name, dtype]
            engine = tmp_path_factory.mktemp("engine") / f"{name}.engine"
            known[key] = Compiled(icc.compile(path, engine, **options), path, oracle)
        return known[key]

    return get
