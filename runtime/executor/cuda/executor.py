"""CudaExecutor: walks a GPU engine's launch plan on one device, through the CUDA driver API alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ...batch.scheduled import ScheduledBatch
from ...errors import UsageError
from ...format.load import Engine
from ...format.plan import KernelObject, Launch, Phase
from ...format.program import DRAFTS, HEADS, Step
from ...kv.group import GroupConfig
from ..sampling import Sampled, SamplingRow
from ..walk import Argument, Walker
from .compat import check_memory, open_device
from .driver import Cuda
from .graphs import RecurringWork
from .inputs import HeadChoices, StepInputs, StepOutputs, input_bytes, output_bytes
from .launches import ReadyLaunch
from .memory import upload_nbytes, upload_weights
from .swap import HostCache, choose_host_blocks

_SHARE = 0.92  # of the free memory that the KV cache may fill: the driver needs some for modules and graphs
_LOGITS_BYTES = 256 << 20
_SMALL = 512  # tokens of a step whose launches take longer to give than to run, so that a graph pays


class Ticket(NamedTuple):
    """A step on the stream: whose turn it is, how many logit rows it has, whether the host wants their logits."""

    turn: int
    rows: int
    host_samples: bool


class CudaExecutor:
    """Weights, arena, KV cache and kernels of one engine on one GPU.

    Steps of decodes only are replayed from CUDA graphs, one per batch size of the plan, captured when the engine is
    loaded; a batch is padded to the next size. Of other small steps, such as those that verify guesses, those get a
    graph whose sizes come again. kv_bytes: memory for the KV cache; default: enough for a full batch, within what is
    free. swap_bytes: host memory for the KV of preempted requests; default: some, if the cache can run out. section:
    run this section of the program as a step, instead of the program; several executors of one engine on one device
    share its weights. Raises DeviceError or CapacityError before any weight is read.
    """

    def __init__(
        self,
        engine: Engine,
        kv_bytes: int | None = None,
        cuda: Cuda | None = None,
        section: str = "",
        swap_bytes: int | None = None,
    ) -> None:
        manifest, program = engine.manifest, engine.program
        if manifest.gpu is None or program.plan is None:
            raise UsageError("the engine has no launch plan", "compile the model for a GPU target")
        self._section, self._speculation = section, program.speculation
        self.cuda = open_device(manifest.target, manifest.gpu, cuda)
        try:
            self._open(engine, kv_bytes, 0 if section else swap_bytes)
        except BaseException:
            self.cuda.close()
            raise

    def _open(self, engine: Engine, kv_bytes: int | None, swap_bytes: int | None) -> None:
        manifest, program, cuda = engine.manifest, engine.program, self.cuda
        assert program.plan is not None
        limits, self.plan, self._layout = manifest.limits, program.plan, program.kv
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
        self.walker = Walker(program, self.plan)
        device = cuda.facts()
        fixed = upload_nbytes(cuda, engine.weights, program) + sum(sizes.values())
        per_block = max(self.walker.block_bytes(self._section), 1)
        check_memory(fixed, max_blocks * per_block, device, limits.max_seq_len)

        budget = int((device.free_bytes - fixed) * _SHARE) if kv_bytes is None else kv_bytes
        self.num_blocks = max(min(budget // per_block, max_blocks * self.max_batch_size), max_blocks)
        sizes["kv"] = self.num_blocks * per_block
        self._addresses = {space: cuda.allocate(nbytes) for space, nbytes in sizes.items()}
        cuda.zero(self._addresses["kv"], sizes["kv"])
        most_blocks = max_blocks * self.max_batch_size
        self.host_blocks = choose_host_blocks(self._layout, self.num_blocks, most_blocks, swap_bytes)
        if self.host_blocks:
            self._host = HostCache(cuda, self._layout, self.num_blocks, self.host_blocks, self._addresses["kv"])
        self._weights = upload_weights(cuda, engine.weights, program)
        self._open_sides((self.max_step_tokens, self.max_batch_size, max_blocks, self.max_logit_rows))
        self._functions = _load_functions(cuda, engine)
        self._ready: dict[tuple[int, bool, str], list[ReadyLaunch]] = {}
        self._recurring = RecurringWork(cuda)
        self._graphs: dict[int, Any] = {}
        for phase in self.plan.phases:
            if phase.decode and phase.max_tokens <= self.max_batch_size:
                count = phase.max_tokens
                self._graphs[count] = cuda.capture(partial(self._walk, phase, self._sizes(count, count, count)))
        self._closed = False

    def _open_sides(self, limits: tuple[int, int, int, int]) -> None:
        """The host's buffers: two sets, for the step that runs and the one after it, over one set on the device."""
        cuda, max_rows = self.cuda, self.max_logit_rows
        device = cuda.allocate(input_bytes(limits)), cuda.allocate(output_bytes(max_rows))
        self._inputs = [StepInputs(cuda, limits, self.block_size, device[0]) for _ in range(2)]
        self._outputs = [StepOutputs(cuda, max_rows, device[1]) for _ in range(2)]
        self._addresses |= self._inputs[0].addresses() | self._outputs[0].addresses()
        host = cuda.pinned(4 * max_rows * self.vocab_size)
        self._logits = host.view(np.float32).reshape(max_rows, self.vocab_size)
        self._turn = self._last_tokens = 0
        if self._speculation is not None and self._speculation.heads:
            shape = self.max_batch_size, self._speculation.heads, self._speculation.ranks
            self._heads = HeadChoices(cuda, shape, self._addresses["logit_rows"])
            self._addresses[DRAFTS] = self._heads.address

    @property
    def groups(self) -> tuple[GroupConfig, ...]:
        """The one KV group."""
        return (GroupConfig(self.num_blocks, self.block_size, self.host_blocks),)

    def step(self, batch: ScheduledBatch) -> np.ndarray:
        """Run one step: float32 `[batch.num_logit_rows, vocab]`, valid until the next step."""
        logits = self.collect(self.submit(batch, [None] * batch.num_logit_rows)).logits
        assert logits is not None
        return logits

    def submit(self, batch: ScheduledBatch, rows: Sequence[SamplingRow | None]) -> Ticket:
        """Put a step on the stream; see SamplingExecutor."""
        if self._closed:
            raise UsageError("the engine is closed")
        self.cuda.enter()
        cuda, turn = self.cuda, self._turn % 2
        self._turn += 1
        inputs, outputs = self._inputs[turn], self._outputs[turn]
        inputs.fill(batch, rows)
        packed, count = inputs.packed, batch.num_logit_rows
        for block in (block for upkeep in batch.upkeep for block in upkeep.zeros):
            for offset, nbytes in self._layout.block_places(block, self.num_blocks):
                cuda.zero(self._addresses["kv"] + offset, nbytes)
        swaps = batch.swaps
        if swaps and not batch.num_moves:
            self._host.swap(batch.upkeep[0])
        phase = self.plan.phase(packed.num_tokens, packed.num_seqs)
        if phase.decode and count == packed.num_seqs and not batch.num_moves:
            self._last_tokens = phase.max_tokens
            inputs.pad_decodes(phase.max_tokens)
            inputs.send(phase.max_tokens)
            cuda.launch_graph(self._graphs[phase.max_tokens])
        else:
            self._last_tokens = packed.num_tokens
            packed.pad_moves()
            inputs.send(packed.num_seqs)
            moves = packed.num_moves
            if swaps and moves:  # moves are part of every layer's steps: here they must come before the copies
                self._walk(phase, self._sizes(packed.num_tokens, packed.num_seqs, count, moves), moves_only=True)
                self._host.swap(batch.upkeep[0])
                moves = 0
            self._run(phase, self._sizes(packed.num_tokens, packed.num_seqs, count, moves))
        if count:
            outputs.fetch(count)
        host_samples = None in rows or not count
        if host_samples and count:
            cuda.to_host(self._logits[:count], self._addresses["logits"])
        cuda.record(inputs.passed)
        return Ticket(turn, count, host_samples)

    def collect(self, ticket: Ticket) -> Sampled:
        """Wait for a step; see SamplingExecutor."""
        self.cuda.enter()
        self.cuda.wait_event(self._inputs[ticket.turn].passed)
        logits = self._logits[: ticket.rows] if ticket.host_samples else None
        return self._outputs[ticket.turn].sampled(ticket.rows, logits)

    def draft(self, rows: Sequence[int]) -> np.ndarray:
        """What the draft heads choose behind these logit rows of the last step: int32 `[rows, heads, ranks]`."""
        if self._closed or self._speculation is None or not self._speculation.heads:
            raise UsageError("the engine is closed, or has no draft heads")
        self.cuda.enter()
        phase = self.plan.phase(len(rows), len(rows))
        count = min(phase.max_tokens, self._last_tokens)  # of few sizes, within the buffers of the last step
        self._heads.send(rows, count)
        self._run(phase, self._sizes(self._last_tokens, count, count), HEADS)
        return self._heads.fetch(len(rows))

    def close(self) -> None:
        """Give everything back to the driver. Calling it again does nothing."""
        self._closed = True
        self.cuda.close()

    def prepare(self, batch: ScheduledBatch) -> Mapping[str, int]:
        """Send a batch without running it, for timing single kernels; the sizes of its launches."""
        inputs = self._inputs[0]
        inputs.fill(batch, [None] * batch.num_logit_rows)
        inputs.send(inputs.packed.num_seqs)
        return self._sizes(batch.num_tokens, len(batch.sequences), batch.num_logit_rows)

    def ready(self, function: Any, found: KernelObject, launch: Launch, step: Step | None) -> ReadyLaunch:
        """A launch of a loaded kernel for a step of the program."""
        return ReadyLaunch(function, found, launch, self.walker.arguments(launch, step), self._address)

    def _sizes(self, tokens: int, seqs: int, rows: int, moves: int = 0) -> Mapping[str, int]:
        return {
            "num_tokens": tokens, "num_seqs": seqs, "num_logit_rows": rows, "num_moves": moves,
            "max_blocks": self._inputs[0].packed.block_tables.shape[1], "num_blocks": self.num_blocks,
        }  # fmt: skip

    def _run(self, phase: Phase, sizes: Mapping[str, int], section: str = "") -> None:
        work = partial(self._walk, phase, sizes, section)
        if sizes["num_tokens"] > _SMALL:
            work()
        else:
            self._recurring.run((section, phase.max_tokens, phase.decode, *sizes.values()), work)

    def _walk(self, phase: Phase, sizes: Mapping[str, int], section: str = "", moves_only: bool = False) -> None:
        """Put all launches of a step on the stream, or those that make its moves."""
        section = section or self._section
        key = phase.max_tokens, phase.decode, section
        if key not in self._ready:
            self._ready[key] = [
                ReadyLaunch(
                    self._functions[launch.object], self.plan.objects[launch.object], launch, arguments, self._address
                )
                for launch, arguments in self.walker.launches(phase, section)
            ]
        for launch in self._ready[key]:
            if launch.moves or not moves_only:
                launch.put(self.cuda, sizes)

    def _address(self, argument: Argument) -> int:
        """Of a pointer in a step of no tokens."""
        space = argument.space
        base = self._weights[argument.name] if space == "weight" else self._addresses[space]
        return base + argument.offset + argument.per_block * self.num_blocks


def _load_functions(cuda: Cuda, engine: Engine) -> dict[str, Any]:
    """Every kernel of the plan."""
    assert engine.program.plan is not None
    return {
        name: cuda.function(engine.files.read(found.file), found.entry, found.shared_bytes)
        for name, found in engine.program.plan.objects.items()
    }
