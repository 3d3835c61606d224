"""Kernels of the tests on this machine's GPU instead of in the interpreter: ICC_ON_GPU=1 python -m pytest tests/triton

Each launch is compiled (once per process and source; objects are cached as engines' are), gets copies of the memory of
its arguments, and changed memory is copied back. Guards around the copies must not change: a write outside a tensor's
memory is a failure. Under compute-sanitizer, which sees reads too, copies have no guards (ICC_ON_GPU=exact, with
PYTORCH_NO_CUDA_MEMORY_CACHING=1). A launch that fails in the driver ends the process, because the device's context is
lost; pytest-xdist continues in a new one. icc-on-gpu.log among the temporary files names the launch.

ICC_ON_GPU=compare: the interpreter also runs each launch, and the test continues with its results; differences beyond
rounding are logged, which shows the first wrong kernel of a whole plan. This has not worked yet on the one GPU machine
that was tried, where Triton 3.6's interpreter fails with the installed numpy.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import torch
from icc.compiler.backends.triton import interpreter
from icc.compiler.backends.triton.objects import compile as objects
from icc.compiler.backends.triton.spec import LaunchSpec
from icc.compiler.interrupt import Processes
from icc.compiler.targets import TARGETS, Target
from icc.runtime.errors import DeviceError
from icc.runtime.executor.cuda.driver import Cuda
from icc.runtime.format.plan import HIDDEN_POINTERS

PLACE = "cuda"
_ALIGNED = 256  # addresses keep their remainders modulo this
_GUARD = 0 if os.environ.get("ICC_ON_GPU") == "exact" else 4096
LOST = Path(tempfile.gettempdir(), "icc-on-gpu.log")
_WRITTEN = 0xA5  # in guards
_ALIKE = {torch.float32: 1e-4, torch.float64: 1e-4}  # of the largest value: sums in another order; else 1e-2


def install() -> None:
    """Make `interpreter.launch` run kernels on the GPU."""
    device = _Device(Cuda(), _target())
    interpreter.instead = device.compare if os.environ["ICC_ON_GPU"] == "compare" else device.launch


def _target() -> Target:
    """A target of this GPU's architecture."""
    major, minor = torch.cuda.get_device_capability()
    return next(target for target in TARGETS.values() if target.arch == f"sm_{major}{minor}")


@dataclass
class _Range:
    """Host memory [low, high) and its copy on the device."""

    low: int
    high: int
    copy: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    before: torch.Tensor = field(default_factory=lambda: torch.empty(0))

    @property
    def first(self) -> int:
        """The byte offset of the memory in `copy`."""
        base = self.copy.data_ptr() + _GUARD
        return _GUARD + (self.low - base) % _ALIGNED

    def upload(self) -> None:
        size = self.high - self.low
        room = _ALIGNED if _GUARD else self._shift(size)
        self.copy = torch.full((size + room + 2 * _GUARD,), _WRITTEN, dtype=torch.uint8, device=PLACE)
        self._inside().copy_(_host(self.low, size))
        self.before = self.copy.clone()

    def _shift(self, size: int) -> int:
        """Bytes before memory without guards that keep its address's remainder, because device memory is aligned."""
        return self.low % _ALIGNED

    def _inside(self) -> torch.Tensor:
        first = self.first
        return self.copy[first : first + self.high - self.low]

    def result(self) -> torch.Tensor:
        """The device's content of the range, uint8 on the host."""
        return self._inside().cpu()

    def download(self, entry: str) -> None:
        """Copy the range to the host if it has changed; asserts that the guards have not."""
        if torch.equal(self.copy, self.before):
            return
        first, size = self.first, self.high - self.low
        changed = self.copy != self.before
        assert not changed[:first].any(), f"{entry} writes in front of its memory"
        assert not changed[first + size :].any(), f"{entry} writes behind its memory"
        _host(self.low, size).copy_(self._inside())


def _host(low: int, size: int) -> torch.Tensor:
    return torch.frombuffer((ctypes.c_uint8 * size).from_address(low), dtype=torch.uint8)


class _Device:
    """Compiles and launches kernels on the GPU."""

    def __init__(self, cuda: Cuda, target: Target) -> None:
        self._cuda, self._target = cuda, target
        self._worker = cache(lambda: objects._Worker(Processes().__enter__()))
        self._functions: dict[str, tuple[object, int]] = {}

    def launch(self, spec: LaunchSpec, grid: tuple[int, ...], args: Sequence[torch.Tensor | int]) -> None:
        """As `interpreter.launch`."""
        for part in self._run(spec, grid, args):
            part.download(spec.entry)

    def compare(self, spec: LaunchSpec, grid: tuple[int, ...], args: Sequence[torch.Tensor | int]) -> None:
        """As `interpreter.launch`, with its results; the GPU's results are compared with them."""
        ranges = self._run(spec, grid, args)
        interpreter._interpret(spec, grid, args, check_overflow=False)
        for number, arg in enumerate(args):
            if not isinstance(arg, int) and arg.numel():
                _tell_difference(f"{spec.entry} of {grid} programs, argument {number}", arg, _there(arg, ranges))

    def _run(self, spec: LaunchSpec, grid: tuple[int, ...], args: Sequence[torch.Tensor | int]) -> list[_Range]:
        function, shared = self._function(spec)
        ranges = _merged([_extent(a) for a in args if not isinstance(a, int) and a.numel()])
        for part in ranges:
            part.upload()
        torch.cuda.synchronize()
        values = (ctypes.c_uint64 * (len(args) + HIDDEN_POINTERS))(*(_value(a, ranges) for a in args))
        first = ctypes.addressof(values)
        pointers = (ctypes.c_uint64 * len(values))(*(first + 8 * i for i in range(len(values))))
        try:
            self._cuda.launch(function, grid, 32 * spec.num_warps, shared, ctypes.addressof(pointers))
            self._cuda.wait()
        except DeviceError as error:
            LOST.open("a").write(f"{spec.entry} of {grid} programs: {error}\n{spec.source}\n")
            os._exit(70)
        return ranges

    def _function(self, spec: LaunchSpec) -> tuple[object, int]:
        key = objects.spec_key(spec)
        if key not in self._functions:
            folder = objects._cache_folder(key, self._target, objects._triton_version())
            found = objects._load(folder)
            if found is None:
                found = objects._compile(self._worker(), key, spec, self._target)
                objects._store(folder, found)
            self._functions[key] = (
                self._cuda.function(found.binary, found.entry, found.shared_bytes), found.shared_bytes
            )  # fmt: skip
        return self._functions[key]


def _extent(tensor: torch.Tensor) -> _Range:
    """The whole storage of a tensor."""
    storage = tensor.untyped_storage()
    return _Range(storage.data_ptr(), storage.data_ptr() + storage.nbytes())


def _merged(parts: list[_Range]) -> list[_Range]:
    """Merge overlapping ranges, so that each byte is in one."""
    found: list[_Range] = []
    for part in sorted(parts, key=lambda part: part.low):
        if found and part.low < found[-1].high:
            found[-1].high = max(found[-1].high, part.high)
        else:
            found.append(_Range(part.low, part.high))
    return found


def _value(arg: torch.Tensor | int, ranges: list[_Range]) -> int:
    """The value that is passed to a kernel: a device address for tensors, 0 for empty ones."""
    if isinstance(arg, int):
        return arg & 0xFFFFFFFFFFFFFFFF
    if not arg.numel():
        return 0
    place = arg.data_ptr()
    part = next(part for part in ranges if part.low <= place < part.high)
    return part.copy.data_ptr() + part.first + place - part.low


def _there(arg: torch.Tensor, ranges: list[_Range]) -> torch.Tensor:
    """A tensor like `arg` with the device's content."""
    place = arg.untyped_storage().data_ptr()
    part = next(part for part in ranges if part.low <= place < part.high)
    size = arg.untyped_storage().nbytes()
    storage = part.result()[place - part.low :][:size].clone().untyped_storage()
    return torch.empty(0, dtype=arg.dtype).set_(storage, arg.storage_offset(), arg.shape, arg.stride())


def _tell_difference(where: str, expected: torch.Tensor, found: torch.Tensor) -> None:
    if torch.equal(expected, found):
        return
    a, b = (t.double() if t.dtype.is_floating_point else t.to(torch.int64).double() for t in (expected, found))
    same = (a == b) | (a.isnan() & b.isnan())
    off = (a - b)[~same].abs().nan_to_num(nan=float("inf"))
    largest = float(a.nan_to_num(0, 0, 0).abs().max())
    if not expected.dtype.is_floating_point or float(off.max()) > _ALIKE.get(expected.dtype, 1e-2) * largest:
        share = f"{len(off)} of {same.numel()} values"
        LOST.open("a").write(f"{where} ({expected.dtype}): {share}, by {float(off.max()):.3g} of {largest:.3g}\n")
