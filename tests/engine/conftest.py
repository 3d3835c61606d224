"""Engines of tiny checkpoints, compiled once per run of the tests and shared by its workers."""

from __future__ import annotations

import fcntl
import hashlib
import os
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
    """compiled(name, dtype="float32", **options): the engine of a tiny configuration for this machine; tests must not
    change it."""
    import icc

    known: dict[tuple[Any, ...], Compiled] = {}
    checkpoints: dict[tuple[str, str], tuple[Path, Any]] = {}
    configs = tiny.tiny_configs()

    def get(name: str, dtype: str = "float32", **options: Any) -> Compiled:
        options = {"target": "native", **options}
        key = (name, dtype, os.environ.get("ICC_AS_SHIPPED"), *sorted(options.items()))
        if key not in known:
            if (name, dtype) not in checkpoints:
                path = tmp_path_factory.mktemp("model") / name
                checkpoints[name, dtype] = path, tiny.save_tiny(configs[name], path, dtype=dtype)
            path, oracle = checkpoints[name, dtype]
            shared = Path(os.environ["ICC_COMPILED_ONCE"], hashlib.sha256(repr(key).encode()).hexdigest()[:16])
            shared.mkdir(exist_ok=True)
            engine = shared / f"{name}.engine"
            with (shared / "lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not engine.exists():
                    icc.compile(path, engine, **options)
            known[key] = Compiled(engine, path, oracle)
        return known[key]

    return get
