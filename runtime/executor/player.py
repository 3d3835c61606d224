"""Player: runs the scheduled batches of an engine on a device. It holds the code that all devices share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from ..batch.declared import DeclaredRows
from ..batch.packed import PackedBatch
from ..batch.padding import StepSize, padded_size
from ..batch.scheduled import ScheduledBatch
from ..errors import UsageError
from ..format.batch import SAMPLED
from ..format.program import section_behind
from ..format.speculation import DRAFT_HIDDEN
from ..kv.config import GroupConfig
from ..kv.places import Places
from ..kv.upkeep import Upkeep
from .device import Chooser, Device, DeviceWork, Grouped, HostCache, Merger
from .sampling import Sampled, SamplingRow, fill_rows
from .swap import copies

if TYPE_CHECKING:
    import numpy as np

    from .asking import AskedSection


class Ticket(NamedTuple):
    """A step in flight: its turn, its number of logit rows, whether the host wants their logits, or only (greedy) the
    token of the largest logit of each row."""

    turn: int
    rows: int
    host_samples: bool
    greedy: bool = False


D = TypeVar("D", bound=Device)


def _spare(group: GroupConfig, device: Device) -> range:
    """The last blocks of a KV group, which no request gets: they hold the tokens that a draft layer guesses at once,
    for as many requests as a step may have. At most an eighth of all blocks, and none that the longest request may
    need."""
    guessed, size, count = device.program.speculation, group.block_size, group.num_blocks
    if guessed is None or not guessed.block or group.holds_states:
        return range(count, count)
    each = -(-guessed.block // size)
    needed = group.policy.most_blocks(device.limits.blocks * size, size)
    spare = min(each * device.limits.seqs, max(count // 8, each), max(count - needed, 0))
    return range(count - spare, count)


class Player(Generic[D]):
    """An executor (executor/base.py): packs batches, picks phases, and puts the work of a step on the device's queue.

    With a plan, steps are padded (batch/padding.py), so that few sizes occur and the device can prepare for them, and
    the device samples (then `samples` is True). Without a plan, steps are not padded.
    """

    def __init__(self, device: D) -> None:
        self.device, self.vocab_size = device, device.program.vocab_size
        self.max_step_tokens, self.max_batch_size = device.limits.tokens, device.limits.seqs
        self.max_logit_rows = device.limits.logit_rows
        counts = zip(device.program.kv.groups, device.cache.num_blocks, device.host.num_blocks, strict=True)
        groups = [GroupConfig(here, group.block_size, host, group.policy) for group, here, host in counts]
        self.spare_blocks = tuple(_spare(group, device) for group in groups)
        self.groups = tuple(
            replace(g, num_blocks=more.start) for g, more in zip(groups, self.spare_blocks, strict=True)
        )
        self.inputs = tuple(array for array in device.program.inputs if array.name != DRAFT_HIDDEN)
        self.adapters = device.program.adapters
        self.samples = device.plan is not None
        self.flights = 1 if self.samples else device.turns
        self.ranks = device.group if isinstance(device, Grouped) else None
        self._chooser = device if isinstance(device, Chooser) else None
        self.chooses = self._chooser is not None
        self.most_wanted = device.most_wanted if isinstance(device, Merger) else 0
        self._instead = {section.instead: section.name for section in device.program.sections if section.instead}
        self._closed = False
        self._asked: dict[str, AskedSection] = {}  # the sections asked for so far
        self._ran = ""  # the section that ran as the last step
        try:
            turns = range(device.turns)
            sizes = [group.block_size for group in self.groups]
            states = [number for number, group in enumerate(self.groups) if group.holds_states]
            places = {n: group.policy for n, group in enumerate(self.groups) if isinstance(group.policy, Places)}
            self._packed = [PackedBatch(device.limits, sizes, device.arrays(turn), states, places) for turn in turns]
            self._declared = [DeclaredRows(device.program.inputs, device.arrays(turn)) for turn in turns]
            self._turn = self._tokens = self._rows = 0  # the next turn; tokens and logit rows of the last step
            for phase in device.plan.phases if device.plan is not None else ():
                if phase.decode and phase.max_tokens <= self.max_batch_size:
                    size = phase.max_tokens
                    device.expect(DeviceWork(self._sizes(size, size, size), phase))
        except BaseException:
            device.close()
            raise

    def step(self, batch: ScheduledBatch) -> np.ndarray:
        """Run one step: float32 `[batch.num_logit_rows, vocab]`, valid until the next step."""
        ticket = self._start(batch, None)
        self.device.wait(ticket.turn)
        return self.device.logits[: ticket.rows]

    @property
    def kv_in_reach(self) -> bool:
        """Whether `kv_views` is available."""
        return isinstance(self.device, HostCache)

    def kv_views(self, group: int, block: int) -> list[memoryview]:
        """The bytes of a KV block in each layer; see KVExecutor."""
        assert isinstance(self.device, HostCache)
        places = self.device.cache.block_places(group, block)
        return [view for place in places for view in self.device.kv_views(*place)]

    def step_greedy(self, batch: ScheduledBatch) -> list[int]:
        """Run one step; only the token of each row's largest logit is wanted; see GreedyExecutor."""
        assert self._chooser is not None
        ticket = self._start(batch, None, wanted=1)
        self.device.wait(ticket.turn)
        return self._chooser.largest(ticket.rows)

    def step_largest(self, batch: ScheduledBatch, wanted: int) -> np.ndarray:
        """Run one step; only a few of each row's largest logits are wanted; see MergingExecutor."""
        ticket = self._start(batch, None, wanted=wanted)
        self.device.wait(ticket.turn)
        return self.device.logits[: ticket.rows]

    def begin(self, batch: ScheduledBatch, greedy: bool) -> Ticket:
        """Begin a step; see PipelinedExecutor."""
        return self._start(batch, None, wanted=int(greedy))._replace(greedy=greedy)

    def end(self, ticket: Ticket) -> tuple[list[int], np.ndarray | None]:
        """Wait for a step; see PipelinedExecutor."""
        self.device.wait(ticket.turn)
        if ticket.greedy:
            assert self._chooser is not None
            return self._chooser.largest(ticket.rows), None
        return [], self.device.logits[: ticket.rows]

    def submit(self, batch: ScheduledBatch, rows: Sequence[SamplingRow | None]) -> Ticket:
        """Start a step; see SamplingExecutor."""
        return self._start(batch, rows)

    def collect(self, ticket: Ticket) -> Sampled:
        """Wait for a step; see SamplingExecutor."""
        self.device.wait(ticket.turn)
        arrays, rows = self._packed[ticket.turn].arrays, ticket.rows
        logits = self.device.logits[:rows] if ticket.host_samples else None
        return Sampled(*(arrays[array.name][:rows] for array in SAMPLED), logits=logits)

    def run(self, section: str, inputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Run a section after the last step; see SectionExecutor."""
        section = section_behind(self._ran, section)
        asked, device, tokens = self._asked.get(section), self.device, self._tokens
        if asked is None or self._closed:
            asked = self._find(section)
        most = min(tokens, device.limits.logit_rows)
        count, given = asked.rows_of(inputs, most)
        phase, size = None, count
        if device.plan is not None:
            phase = device.plan.phase(count, count)
            size = min(phase.max_tokens, most)  # few sizes, within the step's buffers
        for at, rows in given:
            device.write(at, tokens, rows if size == count else asked.padded(rows, size))
        device.run(DeviceWork(self._sizes(tokens, size, size), phase, section))
        return dict(asked.results(device, tokens, count))

    def given(self, name: str) -> np.ndarray:
        """An output, besides logits, of the section that ran as the last step; see LayeredExecutor."""
        section = next(s for s in self.device.program.sections if s.name == self._ran)
        from .asking import AskedSection  # imports numpy

        return dict(AskedSection(section, (name,)).results(self.device, self._tokens, self._rows))[name]

    def write_pool(self, name: str, offset: int, values: np.ndarray, only: int = -1) -> None:
        """See AdaptingExecutor."""
        self.device.write_pool(name, offset, values, only)

    def _find(self, section: str) -> AskedSection:
        """Look up a section that runs after a step; called the first time that it is asked for."""
        found = next((s for s in self.device.program.sections if s.name == section and not s.is_step), None)
        if self._closed or found is None:
            raise UsageError(f"the engine is closed, or has no section {section!r} that runs behind a step")
        from .asking import AskedSection  # imports numpy

        return self._asked.setdefault(section, AskedSection(found))

    def prepare(self, batch: ScheduledBatch) -> Mapping[str, int]:
        """Send a batch without running it, to time single kernels; returns the sizes for its launches."""
        packed = self._pack(0, batch, None)
        self.device.send(0, packed.num_seqs, packed.num_tokens)
        return self._sizes(packed.num_tokens, packed.num_seqs, packed.num_logit_rows)

    def close(self) -> None:
        """Free everything. Calling it again does nothing."""
        if not self._closed:
            self._closed = True
            self.device.close()

    def _start(self, batch: ScheduledBatch, rows: Sequence[SamplingRow | None] | None, wanted: int = 0) -> Ticket:
        """Put a step on the device's queue. rows: None if the host samples all rows. wanted: see DeviceWork."""
        if self._closed:
            raise UsageError("the engine is closed")
        device, turn = self.device, self._turn
        self._turn = (turn + 1) % len(self._packed)
        packed = self._pack(turn, batch, rows)
        count = packed.num_logit_rows
        for group, upkeep in enumerate(batch.upkeep):
            for block in upkeep.zeros:
                for offset, nbytes in device.cache.block_places(group, block):
                    device.zero(offset, nbytes)
        self._ran = self._section(batch)
        work = self._work(packed, wanted, self._ran)
        self._tokens, self._rows = work.sizes["num_tokens"], count
        device.send(turn, work.sizes["num_seqs"], work.sizes["num_tokens"])
        if batch.copies_blocks:
            if batch.num_moves:  # usually each layer's steps make the moves, but these must come before the copies
                device.run(work._replace(moves_only=True))
                work = work._replace(sizes={**work.sizes, "num_moves": 0})
            self._copy(batch.upkeep)
        device.run(work)
        host_samples = rows is None or None in rows or not count
        device.fetch(turn, count, host_samples)
        return Ticket(turn, count, host_samples)

    def _pack(self, turn: int, batch: ScheduledBatch, rows: Sequence[SamplingRow | None] | None) -> PackedBatch:
        packed = self._packed[turn]
        packed.pack(batch)
        self._declared[turn].pack(batch)
        if self.samples:
            fill_rows(packed.arrays, 0, [None] * packed.num_logit_rows if rows is None else rows)
        return packed

    def _section(self, batch: ScheduledBatch) -> str:
        """The section that runs in place of the whole program, because a sequence gives its input; "" if none does."""
        if not self._instead:
            return ""
        given = {name for sequence in batch.sequences for name in sequence.extras}
        return next((self._instead[name] for name in self._instead if name in given), "")

    def _work(self, packed: PackedBatch, wanted: int, section: str) -> DeviceWork:
        """The work of a packed step, which is padded if there is a plan."""
        phase = None
        if self.device.plan is not None:
            have = StepSize(packed.num_tokens, packed.num_seqs, packed.num_logit_rows)
            phase = self.device.plan.phase(have.tokens, have.seqs)
            size = padded_size(phase, have, self.device.limits)
            fill_rows(packed.arrays, have.rows, [None] * (size.rows - have.rows))
            packed.pad(size)
            packed.pad_moves()
        sizes = self._sizes(packed.num_tokens, packed.num_seqs, packed.num_logit_rows, packed.num_moves)
        return DeviceWork(sizes, phase, section, trees=packed.has_trees, wanted=wanted)

    def _sizes(self, tokens: int, seqs: int, rows: int, moves: int = 0) -> Mapping[str, int]:
        return {
            "num_tokens": tokens, "num_seqs": seqs, "num_logit_rows": rows, "num_moves": moves,
            "max_blocks": self.device.limits.table_stride,
        }  # fmt: skip

    def _copy(self, upkeeps: Sequence[Upkeep]) -> None:
        """Do the upkeep of whole blocks: first swap blocks out to host memory, then copy blocks, then swap blocks
        in."""
        device = self.device
        for group, upkeep in enumerate(upkeeps):
            for place in copies(device.cache, device.host, group, upkeep.swap_outs):
                device.swap_out(*place)
        for group, upkeep in enumerate(upkeeps):
            for source, target in upkeep.copies:
                places = (device.cache.block_places(group, block) for block in (source, target))
                for (here, nbytes), (there, _) in zip(*places, strict=True):
                    device.copy(here, there, nbytes)
        for group, upkeep in enumerate(upkeeps):
            back = [(block, slot) for slot, block in upkeep.swap_ins]
            for place in copies(device.cache, device.host, group, back):
                device.swap_in(*place)
