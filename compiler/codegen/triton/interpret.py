"""Runs rendered sources on CPU tensors: Triton's interpreter, for tests and for engines without their GPU.

The environment must have TRITON_INTERPRET=1 before triton is first imported.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Mapping
from functools import lru_cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import torch

from .spec import LaunchSpec

_TORCH = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "i32": torch.int32,
    "i8": torch.int8,
    "u8": torch.uint8,
    "u64": torch.int64,
}


def run_spec(spec: LaunchSpec, values: Mapping[str, torch.Tensor | int], sizes: Mapping[str, int]) -> None:
    """Launch once. `values` maps what arguments refer to; a tensor is reinterpreted as the argument's element type."""
    kernel = getattr(load_source(spec.source), spec.entry)
    args = [_argument(values[arg.value], arg.type) for arg in spec.args]
    grid = tuple(dim.value(sizes) for dim in spec.grid)
    if all(grid):
        kernel[grid](*args)


def _argument(value: torch.Tensor | int, kind: str) -> torch.Tensor | int:
    if isinstance(value, int):
        return value
    wanted = _TORCH[kind.removeprefix("*")]
    return value if value.dtype == wanted else value.view(wanted)


@lru_cache(maxsize=4096)
def load_source(text: str) -> ModuleType:
    """The rendered source as a module whose kernels are interpreted.

    Triton reads a kernel's source from its file. In the interpreter, `tl.dot` on bf16 operands returns garbage (Triton
    3.6 to 3.9), so INTERPRETED tells the templates to upcast them.
    """
    import triton
    import triton.language as tl

    if not triton.knobs.runtime.interpret:
        raise RuntimeError("set TRITON_INTERPRET=1 before triton is imported")
    name = "icc_" + hashlib.sha256(text.encode()).hexdigest()[:16]
    path = _folder() / f"{name}.py"
    path.write_text(text)
    found = spec_from_file_location(name, path)
    assert found is not None and found.loader is not None
    module = module_from_spec(found)
    found.loader.exec_module(module)
    module.INTERPRETED = tl.constexpr(True)  # type: ignore[attr-defined]
    return module


@lru_cache(maxsize=1)
def _folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="icc-interpret-"))
