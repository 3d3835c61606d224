"""CudaDevice: an engine's memory and kernels on one GPU, through the CUDA driver API only."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from ...batch.padding import GRAPHED
from ...errors import DeviceError, UsageError, install
from ...format.batch import GPU_INPUTS, SAMPLED
from ...format.footprint import KV_SHARES, LOGITS_BYTES, batch_limits
from ...format.kv import KVMemory
from ...format.load import Engine
from ...format.plan import Call, KernelObject, Launch
from ...format.program import DRAFTS
from ..device import DeviceWork
from ..walk import LaunchArgument, Walker
from .compat import check_memory, open_device
from .driver import Cuda
from .graphs import RecurringWork
from .host import choose_host_blocks, pin_blocks
from .launches import ReadyExchange, ReadyLaunch
from .memory import PinnedArrays, nbytes_of, upload_nbytes, upload_weights
from .peers import Peers
from .staging import Staging


class CudaDevice:
    """Weights, arena, KV cache and kernels of one engine on one GPU, and its stream.

    Work announced by `expect` is captured in CUDA graphs when the engine is loaded. Other small steps, such as those
    with chunks of prompts and those that verify draft tokens, get a graph when their padded sizes recur.

    kv_bytes: memory for the KV cache; None: enough for a full batch, within the free memory. swap_bytes: host memory
    for the KV of preempted requests; None: a share of it, if the cache can run out. section: run this section as a
    step, instead of the whole program; devices that share `cuda` share an engine's weights. blocks: of each KV group,
    on the device and on the host; None: as many as fit. Raises DeviceError or CapacityError before any weight is read.
    """

    turns = 2

    def __init__(
        self,
        engine: Engine,
        kv_bytes: int | None = None,
        cuda: Cuda | None = None,
        section: str = "",
        swap_bytes: int | None = None,
        blocks: tuple[Sequence[int], Sequence[int]] | None = None,
    ) -> None:
        manifest, program = engine.manifest, engine.program
        if manifest.gpu is None or program.plan is None:
            raise UsageError("the engine has no launch plan", "compile the model for a GPU target")
        self.program, self.plan, self._section = program, program.plan, section
        self.cuda = open_device(manifest.target, manifest.gpu, cuda)
        self.peers: Peers | None = None
        try:
            self._open(engine, kv_bytes, 0 if section else swap_bytes, blocks)
        except BaseException:
            self.cuda.close()
            raise

    def _open(
        self,
        engine: Engine,
        kv_bytes: int | None,
        swap_bytes: int | None,
        blocks: tuple[Sequence[int], Sequence[int]] | None,
    ) -> None:
        program, cuda, most = self.program, self.cuda, engine.manifest.limits
        self.limits = limits = batch_limits(program, most, LOGITS_BYTES["cuda"])
        sizes = {
            "arena": program.arena_bytes_per_token * limits.tokens,
            "scratch": self.plan.scratch_bytes,
            "counters": 4 * self.plan.counters(limits.seqs),
            "logits": 4 * limits.logit_rows * program.vocab_size,
        }
        device, layout = cuda.facts(), program.kv_of(self._section)
        fixed = upload_nbytes(cuda, engine.weights, program) + sum(sizes.values())
        one, batch = (layout.blocks_needed(most, sequences) for sequences in (1, limits.seqs))
        check_memory(fixed, KVMemory(layout, one).nbytes, device, most.max_seq_len)

        budget = int((device.free_bytes - fixed) * KV_SHARES["cuda"]) if kv_bytes is None else kv_bytes
        self.cache = KVMemory(layout, tuple(blocks[0]) if blocks else layout.split(budget, one, batch))
        self.walker = Walker(program, self.plan, self.cache, limits, self._multiprocessors())
        sizes["kv"] = self.cache.nbytes
        self._addresses = {space: cuda.allocate(nbytes) for space, nbytes in sizes.items()}
        for space in ("kv", "counters"):
            cuda.zero(self._addresses[space], sizes[space])
        if blocks:
            self.host = KVMemory(layout, tuple(blocks[1]))
        else:
            self.host = choose_host_blocks(self.cache, batch, swap_bytes)
        if self.host.nbytes:
            self._host = pin_blocks(cuda, self.host)
        self._weights = upload_weights(cuda, engine.weights, program)
        self._open_sides()
        self._functions = _load_functions(cuda, engine)
        self._ready: dict[tuple[int, bool, str], list[ReadyLaunch | ReadyExchange]] = {}
        self._expected: dict[Hashable, Any] = {}
        self._recurring = RecurringWork(cuda)

    def _multiprocessors(self) -> int:
        """How many multiprocessors the device has, if the plan has launches whose programs must all be resident at
        once; else 0."""
        return self.cuda.multiprocessors() if any(phase.runs for phase in self.plan.phases) else 0

    def _open_sides(self) -> None:
        """Allocate the host's buffers: two sets, for the running step and the next one, and one set on the device."""
        cuda, limits, program = self.cuda, self.limits, self.program
        there = cuda.allocate(nbytes_of(GPU_INPUTS, limits))
        self._inputs = [PinnedArrays(cuda, GPU_INPUTS, limits, there) for _ in range(self.turns)]
        places = [(array, cuda.allocate(nbytes_of([array], limits))) for array in program.inputs]
        self._declared = [[PinnedArrays(cuda, [a], limits, at) for a, at in places] for _ in range(self.turns)]
        there = cuda.allocate(nbytes_of(SAMPLED, limits))
        self._outputs = [PinnedArrays(cuda, SAMPLED, limits, there) for _ in range(self.turns)]
        for side in (self._inputs[0], *self._declared[0], self._outputs[0]):
            self._addresses |= side.addresses
        self._pool_written = cuda.event()
        self._ended = [cuda.event() for _ in range(self.turns)]
        shape = limits.logit_rows, program.vocab_size
        self.logits = cuda.pinned(4 * shape[0] * shape[1]).view(np.float32).reshape(shape)
        self._staging, self._offsets = Staging(cuda), {buffer.name: buffer.offset for buffer in program.buffers}
        for array in (array for section in program.sections for array in section.outputs.values()):
            if array.at == DRAFTS:  # for engines of format 2
                self._addresses[DRAFTS] = cuda.allocate(limits.logit_rows * array.row_bytes)

    def arrays(self, turn: int) -> Mapping[str, np.ndarray]:
        """The host's arrays of a turn, in pinned memory, by name."""
        sides = (self._inputs[turn], *self._declared[turn], self._outputs[turn])
        return {name: array for side in sides for name, array in side.arrays.items()}

    def zero(self, offset: int, nbytes: int) -> None:
        """Fill bytes [offset, offset + nbytes) of the KV cache with zeros, on the stream."""
        self.cuda.enter()
        self.cuda.zero(self._addresses["kv"] + offset, nbytes)

    def copy(self, source: int, target: int, nbytes: int) -> None:
        """Copy `nbytes` bytes from byte `source` of the KV cache to its byte `target`, on the stream."""
        self.cuda.copy(self._addresses["kv"] + target, self._addresses["kv"] + source, nbytes)

    def swap_out(self, cache: int, host: int, nbytes: int) -> None:
        """Copy `nbytes` bytes from byte `cache` of the KV cache to byte `host` of the host's blocks, on the stream."""
        self.cuda.to_host(self._host[host : host + nbytes], self._addresses["kv"] + cache)

    def swap_in(self, cache: int, host: int, nbytes: int) -> None:
        """Copy `nbytes` bytes from byte `host` of the host's blocks to byte `cache` of the KV cache, on the stream."""
        self.cuda.to_device(self._addresses["kv"] + cache, self._host[host : host + nbytes])

    def send(self, turn: int, num_seqs: int, num_tokens: int) -> None:
        """Copy the arrays to the device, on the stream: all INPUTS in one copy, and one copy per input that the program
        declares."""
        self.cuda.enter()
        for side, rows in self.sides(turn, num_seqs, num_tokens):
            side.send(rows)

    def sides(self, turn: int, num_seqs: int, num_tokens: int) -> list[tuple[PinnedArrays, int]]:
        """The host's buffers of a turn that are sent, each with the number of rows to send of its last array."""
        return [(self._inputs[turn], num_seqs), *((own, num_tokens) for own in self._declared[turn])]

    def expect(self, work: DeviceWork) -> None:
        """Capture a graph of this work."""
        self._expected[_key(work)] = self.cuda.capture(partial(self._walk, work))

    def run(self, work: DeviceWork) -> None:
        """Run work as a CUDA graph if there is one for it, or if the same work came before. Steps of many tokens, and
        moves alone, run launch by launch."""
        graph = self._expected.get(_key(work))
        if work.moves_only or (graph is None and work.sizes["num_tokens"] > GRAPHED):
            self._walk(work)
        elif graph is not None:
            self.cuda.launch_graph(graph)
        else:
            self._recurring.run(_key(work), partial(self._walk, work))

    def _walk(self, work: DeviceWork) -> None:
        """Put all launches on the stream, or with `moves_only` those that make moves."""
        phase, section = work.phase, work.section or self._section
        assert phase is not None
        key = phase.max_tokens, phase.decode, section
        if key not in self._ready:
            self._ready[key] = [self._make_ready(*pair) for pair in self.walker.launches(phase, section)]
        sizes = work.sizes if self.peers is None else phase.rank_sizes(work.sizes, self.peers.rank)
        for launch in self._ready[key]:
            if launch.moves or not work.moves_only:
                launch.put(self.cuda, sizes)

    def _make_ready(self, launch: Launch, arguments: Sequence[LaunchArgument]) -> ReadyLaunch | ReadyExchange:
        """A launch, or the communicator's call that replaces it."""
        communicator = self.peers and self.peers.communicator
        if launch.exchange is not None and communicator is not None:
            return ReadyExchange(communicator, launch.exchange, arguments, self._address)
        if not launch.object:
            raise DeviceError("GPUs of this engine's target exchange values by NCCL alone", install("nccl"))
        found = self.plan.objects[launch.object]
        return ReadyLaunch(self._functions[launch.object], found, launch, arguments, self._address)

    def fetch(self, turn: int, rows: int, logits: bool) -> None:
        """Copy the results to the host, on the stream, and record an event after them."""
        if rows:
            self._outputs[turn].fetch(rows)
            if logits:
                self.cuda.to_host(self.logits[:rows], self._addresses["logits"])
        self.cuda.record(self._ended[turn])

    def wait(self, turn: int) -> None:
        """Wait until the device has passed the turn's event."""
        self.cuda.enter()
        self.cuda.wait_event(self._ended[turn])

    def write(self, at: str, tokens: int, rows: np.ndarray) -> None:
        """As `Device.write`. The next step sends its own logit rows."""
        self.cuda.enter()
        staged = self._staging.of(at, rows.nbytes)  # no earlier copy from this buffer is pending: `read` has waited
        staged[:] = rows.reshape(-1).view(np.uint8)
        self.cuda.to_device(self._place(at, tokens), staged)

    def write_pool(self, name: str, offset: int, values: np.ndarray, only: int = -1) -> None:
        """As `Device.write_pool`, through pinned memory, on the stream: steps in flight end first."""
        self.cuda.enter()
        staged = self._staging.of(f"pool:{name}", values.nbytes)
        staged[:] = values.reshape(-1).view(np.uint8)
        with self.cuda.capturing:  # runs in the loading thread: the copy must not be captured in a graph
            self.cuda.to_device(self._weights[name] + offset, staged)
            self.cuda.record(self._pool_written)
        self.cuda.wait_event(self._pool_written)  # the next write uses the same staging memory

    def read(self, at: str, tokens: int, nbytes: int) -> np.ndarray:
        """Wait for the stream; then a copy of the first bytes, uint8 `[nbytes]`, of what a section wrote to `at`."""
        staged = self._staging.of(at, nbytes)
        self.cuda.to_host(staged, self._place(at, tokens))
        self.cuda.wait()
        return staged.copy()

    def _place(self, at: str, tokens: int) -> int:
        """The address of a section's input or output `at`, after a step of `tokens` tokens."""
        offset = self._offsets.get(at)
        return self._addresses[at] if offset is None else self._addresses["arena"] + offset * tokens

    def close(self) -> None:
        """Free everything."""
        self.cuda.close()

    def ready(self, function: Any, found: KernelObject, launch: Launch, call: Call | None) -> ReadyLaunch:
        """A launch of a loaded kernel, to time the kernel. call: a step of the program; None: a launch before or after
        the steps."""
        return ReadyLaunch(
            function, found, launch, self.walker.arguments(launch, *(() if call is None else (call,))), self._address
        )

    def take_scratch(self, nbytes: int) -> None:
        """Allocate at least `nbytes` of scratch memory, to time kernels that the engine does not contain."""
        if nbytes > self.plan.scratch_bytes:
            self._addresses["scratch"] = self.cuda.allocate(nbytes)

    def _address(self, argument: LaunchArgument) -> int:
        """The address of a pointer argument in a step of 0 tokens."""
        space = argument.space
        match space:
            case "weight":
                base = self._weights[argument.name]
            case "area":
                assert self.peers is not None, "one of several ranks runs alone"
                base = self.peers.address(int(argument.name))
            case _:
                base = self._addresses[space]
        return base + argument.offset


def _key(work: DeviceWork) -> Hashable:
    """A key that determines the launches of this work and their parameters."""
    assert work.phase is not None
    return work.section, work.phase.max_tokens, work.phase.decode, *work.sizes.values()


def _load_functions(cuda: Cuda, engine: Engine) -> dict[str, Any]:
    """Load every kernel of the plan, by the name of its object."""
    assert engine.program.plan is not None
    return {
        name: cuda.function(engine.files.read(found.file), found.entry, found.shared_bytes)
        for name, found in engine.program.plan.objects.items()
    }
