"""Runs rendered sources on CPU tensors: Triton's interpreter, for tests and for engines without their GPU.

The environment must have TRITON_INTERPRET=1 before triton is first imported.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace

import numpy as np
import torch

from ...runtime.batch.packed import PackedBatch
from ...runtime.batch.scheduled import ScheduledBatch
from ...runtime.executor.sampling import TOP_LOGPROBS, Sampled, SamplingRow
from ...runtime.executor.walk import BoundLaunch, Place, Walker
from ...runtime.format.manifest import Limits
from ...runtime.format.program import DRAFTS, HEADS, Program
from ...runtime.kv.group import GroupConfig
from ...runtime.kv.upkeep import Upkeep
from ..backends.triton.spec import LaunchSpec

_TORCH = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "i32": torch.int32,
    "i8": torch.int8,
    "u8": torch.uint8,
    "i64": torch.int64,
}
_GREEDY = SamplingRow(0.0, 0, 1.0, 0.0, 0, 0)


def run_spec(spec: LaunchSpec, values: Mapping[str, torch.Tensor | int], sizes: Mapping[str, int]) -> None:
    """Launch once. `values` maps what arguments refer to; a tensor is reinterpreted as the argument's element type."""
    args = [_argument(values[arg.value], arg.type) for arg in spec.args]
    grid = tuple(dim.value(sizes) for dim in spec.grid)
    if all(grid):
        launch(spec, grid, args, check_overflow=True)


def launch(
    spec: LaunchSpec, grid: tuple[int, ...], args: Sequence[torch.Tensor | int], check_overflow: bool = False
) -> None:
    """Run a kernel over its grid. check_overflow: of every integer sum and product, which takes half of the time: for
    the tests of single kernels, not for whole plans of the same kernels."""
    import triton.runtime.interpreter as interpreter

    builder = interpreter.interpreter_builder  # type: ignore[attr-defined]
    options = builder.options
    builder.options = replace(options, sanitize_overflow=check_overflow)
    try:
        getattr(load_source(spec.source), spec.entry)[grid](*args)
    finally:
        builder.options = options


def _argument(value: torch.Tensor | int, kind: str) -> torch.Tensor | int:
    if isinstance(value, int):
        return value
    wanted = _TORCH[kind.removeprefix("*")]
    return value if value.dtype == wanted else value.view(wanted)


@lru_cache(maxsize=4096)
def load_source(text: str) -> ModuleType:
    """The rendered source as a module whose kernels are interpreted.

    Triton reads a kernel's source from its file. In the interpreter, `tl.dot` on bf16 operands returns garbage (Triton
    3.6 to 3.9), so INTERPRETED tells the templates to upcast them. Its conversions to bf16 truncate, where a GPU
    rounds: they are replaced.
    """
    import triton.language as tl

    if os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("set TRITON_INTERPRET=1 before triton is imported")
    name = "icc_" + hashlib.sha256(text.encode()).hexdigest()[:16]
    _round_to_bf16()
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
def _round_to_bf16() -> None:
    """Make the interpreter's conversions between float32 and bf16 (kept as uint16) those of torch."""
    import triton.language as tl
    import triton.runtime.interpreter as interpreter

    slow = interpreter._convert_float  # type: ignore[attr-defined]

    def convert(data: np.ndarray, source: tl.dtype, target: tl.dtype, rounding: object) -> np.ndarray:
        if (source, target) == (tl.float32, tl.bfloat16):
            rounded = torch.from_numpy(np.array(data)).to(torch.bfloat16).view(torch.int16)
            return rounded.numpy().view(np.uint16)
        if (source, target) == (tl.bfloat16, tl.float32):
            return data.astype(np.uint32) << 16
        return slow(data, source, target, rounding)

    interpreter._convert_float = convert  # type: ignore[attr-defined]


@lru_cache(maxsize=1)
def _patch_language_once() -> None:
    """Let Triton replace its language's functions once: it does so, and undoes it, at every launch and at every call
    from kernel to kernel, which takes longer than many kernels. Nothing is compiled in a process that interprets."""
    import triton.language as tl
    import triton.runtime.interpreter as interpreter

    patch, patched = interpreter._patch_lang, set()  # type: ignore[attr-defined]

    def patch_once(kernel: FunctionType) -> object:
        seen = {id(value) for value in kernel.__globals__.values() if value is tl or value is tl.core}
        if not seen <= patched:
            patch(kernel)
            patched.update(seen)
        return SimpleNamespace(restore=lambda: None)

    interpreter._patch_lang = patch_once  # type: ignore[attr-defined]


@lru_cache(maxsize=1)
def _folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="icc-interpret-"))


class InterpretExecutor:
    """Runs the steps of a GPU engine on the CPU: the same plan and the same rendered sources, interpreted.

    specs: every object's source by name. packed: the bytes of each weight. For tests: it is thousands of times slower
    than a GPU. Memory that no kernel has written is NaN, so that what a kernel must not read shows. Decodes are padded
    to the phase's size, as the CUDA executor's graphs need it.
    """

    def __init__(
        self,
        program: Program,
        specs: Mapping[str, LaunchSpec],
        packed: Mapping[str, np.ndarray],
        limits: Limits,
        num_blocks: int,
        section: str = "",
        host_blocks: int = 0,
    ) -> None:
        assert program.plan is not None
        self.plan, self._section = program.plan, section
        self.num_blocks, self.host_blocks, self.block_size = num_blocks, host_blocks, program.kv.block_size
        self._layout = program.kv
        self.vocab_size = program.vocab_size
        self.max_batch_size, self.max_step_tokens = limits.max_batch_size, limits.max_step_tokens
        self.max_logit_rows = rows = limits.max_step_tokens
        self._walker = Walker(program, self.plan)
        self._specs = specs
        self._weights = {name: _memory_of(data) for name, data in packed.items()}
        max_blocks = -(-limits.max_seq_len // self.block_size)
        self._batch = PackedBatch(self.max_step_tokens, self.max_batch_size, max_blocks, rows, self.block_size)
        self._sampling = {
            "temperature": np.zeros(rows, np.float32), "top_p": np.ones(rows, np.float32),
            "min_p": np.zeros(rows, np.float32), "top_k": np.zeros(rows, np.int32),
            "counter": np.zeros(rows, np.int32), "seed": np.zeros(rows, np.uint64),
        }  # fmt: skip
        self._sampled = {
            "token": np.full(rows, -9, np.int32), "logprob": np.zeros(rows, np.float32),
            "top_ids": np.zeros((rows, TOP_LOGPROBS), np.int32),
            "top_logprobs": np.zeros((rows, TOP_LOGPROBS), np.float32),
        }  # fmt: skip
        self._spaces = {
            "arena": _poisoned(program.arena_bytes_per_token * limits.max_step_tokens),
            "kv": _poisoned(program.kv.total_block_bytes() * num_blocks),
            "host": _poisoned(program.kv.total_block_bytes() * host_blocks),
            "scratch": _poisoned(self.plan.scratch_bytes),
            "logits": _poisoned(4 * rows * self.vocab_size),
        }
        if program.speculation is not None and program.speculation.heads:
            shape = self.max_batch_size, program.speculation.heads, program.speculation.ranks
            self._drafts = np.full(shape, -9, np.int32)
            self._spaces[DRAFTS] = _memory_of(self._drafts)
        self._spaces |= {f"sampling:{name}": _memory_of(array) for name, array in self._sampling.items()}
        self._spaces |= {f"sampled:{name}": _memory_of(array) for name, array in self._sampled.items()}

    @property
    def groups(self) -> tuple[GroupConfig, ...]:
        """The one KV group."""
        return (GroupConfig(self.num_blocks, self.block_size, self.host_blocks),)

    def step(self, batch: ScheduledBatch) -> np.ndarray:
        """Run one step: float32 `[batch.num_logit_rows, vocab]`."""
        logits = self.submit(batch, [None] * batch.num_logit_rows).logits
        assert logits is not None
        return logits

    def submit(self, batch: ScheduledBatch, rows: Sequence[SamplingRow | None]) -> Sampled:
        """Run a step at once; see SamplingExecutor."""
        packed = self._batch
        packed.pack(batch)
        for i, row in enumerate(rows):
            for name, array in self._sampling.items():
                array[i] = getattr(row or _GREEDY, name)
        tokens, seqs, count = packed.num_tokens, packed.num_seqs, packed.num_logit_rows
        phase = self.plan.phase(tokens, seqs)
        if phase.decode and count == seqs:
            tokens = seqs = count = phase.max_tokens
            packed.pad_decodes(tokens)
        packed.pad_moves()
        self._tokens = tokens
        moves = packed.num_moves
        if batch.swaps:  # after the moves, which are part of every layer's steps
            for bound in self._walker.walk(phase, self._sizes(tokens, seqs, count, moves), self._section):
                if bound.launch.makes_moves:
                    self._launch(bound)
            self._swap(batch.upkeep[0])
            moves = 0
        for bound in self._walker.walk(phase, self._sizes(tokens, seqs, count, moves), self._section):
            self._launch(bound)
        logits = self._spaces["logits"].view(torch.float32).view(-1, self.vocab_size)[: len(rows)].clone().numpy()
        token, logprob, top_ids, top_logprobs = (array[: len(rows)].copy() for array in self._sampled.values())
        return Sampled(token, logprob, top_ids, top_logprobs, logits)

    def _swap(self, upkeep: Upkeep) -> None:
        """Copy whole blocks from the cache to host memory, then from there."""
        kv, host = self._spaces["kv"], self._spaces["host"]
        device_of = partial(self._layout.block_places, num_blocks=self.num_blocks)
        host_of = partial(self._layout.block_places, num_blocks=self.host_blocks)
        for block, slot in upkeep.swap_outs:
            for (at, nbytes), (to, _) in zip(device_of(block), host_of(slot), strict=True):
                host[to : to + nbytes] = kv[at : at + nbytes]
        for slot, block in upkeep.swap_ins:
            for (at, nbytes), (to, _) in zip(host_of(slot), device_of(block), strict=True):
                kv[to : to + nbytes] = host[at : at + nbytes]

    def draft(self, rows: Sequence[int]) -> np.ndarray:
        """What the draft heads choose behind these logit rows of the last step: int32 `[rows, heads, ranks]`."""
        phase = self.plan.phase(len(rows), len(rows))
        count = min(phase.max_tokens, self._tokens)
        self._batch.logit_rows[:count] = rows[0]
        self._batch.logit_rows[: len(rows)] = rows
        for bound in self._walker.walk(phase, self._sizes(self._tokens, count, count), HEADS):
            self._launch(bound)
        return self._drafts[: len(rows)].copy()

    def _sizes(self, tokens: int, seqs: int, rows: int, moves: int = 0) -> Mapping[str, int]:
        return {
            "num_tokens": tokens, "num_seqs": seqs, "num_logit_rows": rows, "num_moves": moves,
            "max_blocks": self._batch.block_tables.shape[1], "num_blocks": self.num_blocks,
        }  # fmt: skip

    def collect(self, ticket: Sampled) -> Sampled:
        """The step's result; see SamplingExecutor."""
        return ticket

    def _launch(self, bound: BoundLaunch) -> None:
        spec = self._specs[bound.launch.object]
        types = self.plan.objects[bound.launch.object].types
        for arg, place in zip(spec.args, bound.args, strict=True):
            offset = place if isinstance(place, int) else place.offset
            assert offset % 16 == 0 or not arg.aligned, f"{spec.entry}: {arg.name} is compiled as a multiple of 16"
        launch(spec, bound.grid, [self._resolve(a, t) for a, t in zip(bound.args, types, strict=True)])

    def _resolve(self, value: Place | int, kind: str) -> torch.Tensor | int:
        if isinstance(value, int):
            return value
        if value.space == "weight":
            memory = self._weights[value.name]
        elif value.space in self._spaces:
            memory = self._spaces[value.space]
        else:
            memory = _memory_of(getattr(self._batch, value.space))
        dtype = _TORCH[kind.removeprefix("*")]
        rest = memory[value.offset :]
        return rest[: len(rest) // dtype.itemsize * dtype.itemsize].view(dtype)

    def close(self) -> None:
        """Nothing to free."""


def _poisoned(nbytes: int) -> torch.Tensor:
    """Memory whose every float is NaN."""
    return torch.full((max(nbytes, 64),), 255, dtype=torch.uint8)


def _memory_of(array: np.ndarray) -> torch.Tensor:
    """The bytes of an array, shared."""
    return torch.from_numpy(array.reshape(-1).view(np.uint8))
