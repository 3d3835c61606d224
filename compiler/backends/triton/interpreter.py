"""Runs rendered sources on CPU tensors: Triton's interpreter, for tests.

The environment must have TRITON_INTERPRET=1 before triton is first imported.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace

import numpy as np
import torch

from ....runtime.format.plan import LaunchArg
from .quick_interpreter import quicken
from .spec import LaunchSpec

TORCH_TYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "i32": torch.int32,
    "i8": torch.int8,
    "u8": torch.uint8,
    "i64": torch.int64,
}
Launcher = Callable[[LaunchSpec, tuple[int, ...], Sequence[torch.Tensor | int]], None]
instead: Launcher | None = None  # runs kernels instead of the interpreter: on a GPU, in tests/triton/on_gpu.py


def run_spec(
    spec: LaunchSpec,
    values: Mapping[LaunchArg, torch.Tensor | int],
    sizes: Mapping[str, int],
    check_overflow: bool = True,
) -> None:
    """Launch once. `values` maps the objects that arguments refer to; a tensor is reinterpreted as the argument's
    element type. check_overflow: see `launch`."""
    args = [_argument(values[arg.value], arg.type) for arg in spec.args]
    grid = tuple(dim.value(sizes) for dim in spec.grid)
    if all(grid):
        launch(spec, grid, args, check_overflow)


def launch(
    spec: LaunchSpec, grid: tuple[int, ...], args: Sequence[torch.Tensor | int], check_overflow: bool = False
) -> None:
    """Run a kernel over its grid. args: integers, and tensors of any shape as memory. check_overflow: check every sum
    and product of 8 to 32 bits; for tests of single kernels, not for whole plans."""
    if instead is not None:
        instead(spec, grid, args)
    else:
        _interpret(spec, grid, args, check_overflow)


def _interpret(
    spec: LaunchSpec, grid: tuple[int, ...], args: Sequence[torch.Tensor | int], check_overflow: bool
) -> None:
    import triton.runtime.interpreter as interpreter

    builder = interpreter.interpreter_builder  # type: ignore[attr-defined]
    # not restored afterwards: ranks are threads of one process, and one would turn it on for another
    builder.options = replace(builder.options, sanitize_overflow=check_overflow)
    # programs that wait for each other: here they run one after the other, so one program does all the work
    getattr(load_source(spec.source), spec.entry)[(1, 1, 1) if spec.resident else grid](*args)


def _argument(value: torch.Tensor | int, kind: str) -> torch.Tensor | int:
    if isinstance(value, int):
        return value
    wanted = TORCH_TYPES[kind.removeprefix("*")]
    return value if value.dtype == wanted else value.view(wanted)


@lru_cache(maxsize=4096)
def load_source(text: str) -> ModuleType:
    """The rendered source as a module whose kernels are interpreted.

    Triton reads a kernel's source from its file. In the interpreter, `tl.dot` on bf16 operands returns garbage (Triton
    3.6 to 3.9), so INTERPRETED tells the templates to upcast them; it converts operands of e4m3 to float16, exactly,
    and adds their products in float32. Its conversions to bf16 truncate and its conversions to e4m3 carry no bit,
    whereas a GPU rounds: they are replaced.
    """
    import triton.language as tl

    if os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("set TRITON_INTERPRET=1 before triton is imported")
    name = "icc_" + hashlib.sha256(text.encode()).hexdigest()[:16]
    quicken()
    _round_as_gpus_do()
    _patch_language_once()
    path = _folder() / f"{name}.py"
    path.write_text(text)
    found = spec_from_file_location(name, path)
    assert found is not None and found.loader is not None
    module = module_from_spec(found)
    found.loader.exec_module(module)
    module.INTERPRETED = tl.constexpr(True)  # type: ignore[attr-defined]
    return module


@lru_cache(maxsize=1)
def _round_as_gpus_do() -> None:
    """Replace the interpreter's conversions between float32 and bf16 (held as uint16) or e4m3 (uint8) by torch's."""
    import triton.language as tl
    import triton.runtime.interpreter as interpreter

    slow = interpreter._convert_float  # type: ignore[attr-defined]

    def convert(data: np.ndarray, source: tl.dtype, target: tl.dtype, rounding: object) -> np.ndarray:
        if (source, target) == (tl.float32, tl.bfloat16):
            rounded = torch.from_numpy(np.array(data)).to(torch.bfloat16).view(torch.int16)
            return rounded.numpy().view(np.uint16)
        if (source, target) == (tl.bfloat16, tl.float32):
            return data.astype(np.uint32) << 16
        if (source, target) == (tl.float32, tl.float8e4nv):  # saturating, as instructions do
            rounded = torch.from_numpy(np.array(data)).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
            return rounded.view(torch.uint8).numpy()
        if source == tl.float8e4nv and target in (tl.float16, tl.float32):
            values = torch.from_numpy(np.array(data).view(np.uint8)).view(torch.float8_e4m3fn)
            wide = values.to(torch.float32 if target == tl.float32 else torch.float16).numpy()
            return wide.view(np.uint32 if target == tl.float32 else np.uint16)
        return slow(data, source, target, rounding)

    interpreter._convert_float = convert  # type: ignore[attr-defined]


@lru_cache(maxsize=1)
def _patch_language_once() -> None:
    """Let Triton replace its language's functions once. By itself it does and undoes so at every launch and every call
    from kernel to kernel, which takes longer than many kernels. Nothing is compiled in a process that interprets."""
    import triton.language as tl
    import triton.runtime.interpreter as interpreter

    patch, patched = interpreter._patch_lang, set()  # type: ignore[attr-defined]

    scope, kernels = SimpleNamespace(restore=lambda: None), set()

    def patch_once(kernel: FunctionType) -> object:
        if kernel not in kernels:
            kernels.add(kernel)
            seen = {id(value) for value in kernel.__globals__.values() if value is tl or value is tl.core}
            if not seen <= patched:
                patch(kernel)
                patched.update(seen)
        return scope

    interpreter._patch_lang = patch_once  # type: ignore[attr-defined]


@lru_cache(maxsize=1)
def _folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="icc-interpret-"))
