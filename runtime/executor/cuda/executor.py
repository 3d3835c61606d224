"""CudaExecutor: walks a GPU engine's launch plan on one device, through the CUDA driver API alone."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import numpy as np

from ...engine.load import Engine
from ...engine.plan import Phase
from ...errors import UsageError
from ...scheduler.batch import ScheduledBatch
from ..batch import PackedBatch
from ..walk import BoundLaunch, Place, Walker
from .compat import check_device, check_memory
from .driver import Cuda
from .memory import ALIGN, PinnedArrays, round_up, upload_weights

_SHARE = 0.92  # of the free memory that the KV cache may fill: the driver needs some for modules and graphs
_LOGITS_BYTES = 256 << 20
_ARRAYS = ("token_ids", "positions", "slot_mapping", "seq_starts", "context_lens", "logit_rows", "block_tables")


class CudaExecutor:
    """Weights, arena, KV cache and kernels of one engine on one GPU.

    Steps of decodes only are replayed from CUDA graphs, one per batch size of the plan, captured when the engine is
    loaded; a batch is padded to the next size. kv_bytes: memory for the KV cache; default: enough for a full batch,
    within what is free. Raises DeviceError or CapacityError before any weight is read.
    """

    def __init__(self, engine: Engine, kv_bytes: int | None = None, cuda: Cuda | None = None) -> None:
        manifest, program = engine.manifest, engine.program
        if manifest.gpu is None or program.plan is None:
            raise UsageError("the engine has no launch plan", "compile the model for a GPU target")
        self._cuda = cuda or Cuda()
        try:
            self._open(engine, kv_bytes)
        except BaseException:
            self._cuda.close()
            raise

    def _open(self, engine: Engine, kv_bytes: int | None) -> None:
        manifest, program, cuda = engine.manifest, engine.program, self._cuda
        assert manifest.gpu is not None and program.plan is not None
        limits, self.plan = manifest.limits, program.plan
        self.block_size, self.vocab_size = program.kv.block_size, program.vocab_size
        self.max_step_tokens = limits.max_step_tokens
        self.max_batch_size = min(limits.max_batch_size, limits.max_step_tokens)
        rows = max(_LOGITS_BYTES // (4 * self.vocab_size), self.max_batch_size)
        self.max_logit_rows = min(rows, self.max_step_tokens)
        max_blocks = -(-limits.max_seq_len // self.block_size)
        sizes = {
            "arena": program.arena_bytes_per_token * self.max_step_tokens,
            "scratch": self.plan.scratch_bytes,
            "logits": 4 * self.max_logit_rows * self.vocab_size,
        }
        device = cuda.facts()
        check_device(manifest.target, manifest.gpu, device)
        fixed = sum(round_up(w.nbytes) for w in program.weights.values()) + sum(sizes.values())
        per_block = max(program.kv.total_block_bytes(), 1)
        check_memory(fixed, max_blocks * per_block, device, limits.max_seq_len)

        budget = int((device.free_bytes - fixed) * _SHARE) if kv_bytes is None else kv_bytes
        self.num_blocks = max(min(budget // per_block, max_blocks * self.max_batch_size), max_blocks)
        sizes["kv"] = self.num_blocks * per_block
        self._addresses = {space: cuda.allocate(nbytes) for space, nbytes in sizes.items()}
        cuda.zero(self._addresses["kv"], sizes["kv"])
        self._weights = upload_weights(cuda, engine.weights, list(program.weights))
        self._arrays = PinnedArrays(cuda, _array_bytes(limits.max_seq_len, self.max_batch_size, self))
        self._packed = PackedBatch(
            self.max_step_tokens, self.max_batch_size, max_blocks, self.max_logit_rows, self.block_size,
            self._arrays.allocate,
        )  # fmt: skip
        self._addresses |= {name: self._arrays.address(getattr(self._packed, name)) for name in _ARRAYS}
        host = cuda.pinned(sizes["logits"])
        self._logits = host.view(np.float32).reshape(self.max_logit_rows, self.vocab_size)
        self._walker = Walker(program, self.plan)
        self._functions = _load_functions(cuda, engine)
        self._graphs: dict[int, Any] = {}
        for phase in self.plan.phases:
            if phase.decode and phase.max_tokens <= self.max_batch_size:
                self._graphs[phase.max_tokens] = self._capture(phase)
        self._closed = False

    def step(self, batch: ScheduledBatch) -> np.ndarray:
        """Run one step: float32 `[batch.num_logit_rows, vocab]`, valid until the next step."""
        if self._closed:
            raise UsageError("the engine is closed")
        packed, cuda = self._packed, self._cuda
        packed.pack(batch)
        phase = self.plan.phase(packed.num_tokens, packed.num_seqs)
        graph = self._graphs.get(phase.max_tokens) if phase.decode else None
        seqs = packed.num_seqs
        if graph is not None:
            packed.pad_decodes(phase.max_tokens)
            seqs = phase.max_tokens
        self._arrays.send(packed.block_tables[:seqs].nbytes + self._tables_offset())
        if graph is not None:
            cuda.launch_graph(graph)
        else:
            self._walk(phase, self._sizes(packed.num_tokens, packed.num_seqs, packed.num_logit_rows))
        logits = self._logits[: packed.num_logit_rows]
        if len(logits):
            cuda.to_host(logits, self._addresses["logits"])
        cuda.wait()
        return logits

    def close(self) -> None:
        """Give everything back to the driver. Calling it again does nothing."""
        self._closed = True
        self._cuda.close()

    def _sizes(self, tokens: int, seqs: int, rows: int) -> Mapping[str, int]:
        return {
            "num_tokens": tokens, "num_seqs": seqs, "num_logit_rows": rows,
            "max_blocks": self._packed.block_tables.shape[1], "num_blocks": self.num_blocks,
        }  # fmt: skip

    def _tables_offset(self) -> int:
        return self._packed.block_tables.ctypes.data - self._packed.token_ids.ctypes.data

    def _capture(self, phase: Phase) -> Any:
        count = phase.max_tokens
        return self._cuda.capture(lambda: self._walk(phase, self._sizes(count, count, count)))

    def _walk(self, phase: Phase, sizes: Mapping[str, int]) -> None:
        for bound in self._walker.walk(phase, sizes):
            self._launch(bound)

    def _launch(self, bound: BoundLaunch) -> None:
        found = self.plan.objects[bound.launch.object]
        args = [value if isinstance(value, int) else self._address(value) for value in bound.args]
        types = [ctypes.c_void_p if kind.startswith("*") else ctypes.c_int32 for kind in found.types]
        # Triton's kernels end in pointers to scratch memory that these kernels do not use; the build checks that.
        params = (*args, 0, 0), (*types, ctypes.c_void_p, ctypes.c_void_p)
        function = self._functions[bound.launch.object]
        self._cuda.launch(function, bound.grid, found.warps * found.warp_size, found.shared_bytes, params)

    def _address(self, place: Place) -> int:
        base = self._weights[place.name] if place.space == "weight" else self._addresses[place.space]
        return base + place.offset


def _load_functions(cuda: Cuda, engine: Engine) -> dict[str, Any]:
    """Every kernel of the plan."""
    assert engine.program.plan is not None
    return {
        name: cuda.function((engine.path / found.file).read_bytes(), found.entry, found.shared_bytes)
        for name, found in engine.program.plan.objects.items()
    }


def _array_bytes(max_seq_len: int, max_seqs: int, executor: CudaExecutor) -> int:
    """Bytes of all arrays of a batch, each padded to the alignment."""
    tables = -(-max_seq_len // executor.block_size) * max_seqs
    counts = [executor.max_step_tokens] * 3 + [max_seqs + 1, max_seqs, executor.max_logit_rows, tables]
    return sum(4 * n + ALIGN for n in counts)
