"""What travels between host and device in a step: the batch, how its rows are sampled, and what was sampled."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...batch.packed import PackedBatch
from ...batch.scheduled import ScheduledBatch
from ...format.batch import INPUTS, SAMPLED, SAMPLING, BatchLimits
from ..sampling import Sampled, SamplingRow, fill_rows
from .driver import Cuda
from .memory import PinnedArrays, round_up

# block tables, of which not all rows travel, come last
_SENT = (*SAMPLING, *(array for array in INPUTS if array.gpu))


class StepInputs:
    """The host's side of one step under way; `device` is where both of them lie on the device, in turn."""

    def __init__(self, cuda: Cuda, limits: BatchLimits, block_size: int, device: int) -> None:
        self._pinned = PinnedArrays(cuda, input_bytes(limits), device)
        self._arrays = {array.name: self._pinned.allocate(array, limits) for array in _SENT}
        self.packed = PackedBatch(limits, block_size, self._arrays)
        self.passed = cuda.event()

    def fill(self, batch: ScheduledBatch, rows: Sequence[SamplingRow | None]) -> None:
        """Take a step. Rows that the host samples are greedy on the device, and ignored."""
        self.packed.pack(batch)
        fill_rows(self._arrays, 0, rows)

    def pad_decodes(self, count: int) -> None:
        """Make a batch of decodes `count` long."""
        have = self.packed.num_logit_rows
        fill_rows(self._arrays, have, [None] * (count - have))
        self.packed.pad_decodes(count)

    def send(self, num_seqs: int) -> None:
        """Copy to the device what a step of so many sequences reads."""
        self._pinned.send_until(self.packed.block_tables[:num_seqs])

    def addresses(self) -> dict[str, int]:
        """Where each array lies on the device, by its name in a plan."""
        return {array.plan_name: self._pinned.address(self._arrays[array.name]) for array in _SENT}


def input_bytes(limits: BatchLimits) -> int:
    """Bytes of the arrays of one step."""
    return sum(round_up(limits.nbytes(array)) for array in _SENT)


class StepOutputs:
    """The host's side of what one step sampled."""

    def __init__(self, cuda: Cuda, limits: BatchLimits, device: int) -> None:
        self._pinned = PinnedArrays(cuda, output_bytes(limits), device)
        self._arrays = {array.name: self._pinned.allocate(array, limits) for array in SAMPLED}

    def fetch(self, rows: int) -> None:
        """Copy the first rows from the device, in the order of the stream."""
        for array in self._arrays.values():
            self._pinned.fetch(array[:rows])

    def sampled(self, rows: int, logits: np.ndarray | None) -> Sampled:
        """The first rows, once they have arrived."""
        return Sampled(*(array[:rows] for array in self._arrays.values()), logits=logits)

    def addresses(self) -> dict[str, int]:
        """Where each array lies on the device, by its name in a plan."""
        return {array.plan_name: self._pinned.address(self._arrays[array.name]) for array in SAMPLED}


def output_bytes(limits: BatchLimits) -> int:
    """Bytes of the arrays of what one step sampled."""
    return sum(round_up(limits.nbytes(array)) for array in SAMPLED)


class HeadChoices:
    """Both sides of what draft heads are asked and answer, `shape` [batch, heads, ranks]. rows_at: the device's
    logit_rows, which the next step writes again."""

    def __init__(self, cuda: Cuda, shape: tuple[int, int, int], rows_at: int) -> None:
        nbytes = 4 * int(np.prod(shape))
        self.address = cuda.allocate(nbytes)
        self._cuda, self._rows_at = cuda, rows_at
        self._rows = cuda.pinned(4 * shape[0]).view(np.int32)
        self._choices = cuda.pinned(nbytes).view(np.int32).reshape(shape)

    def send(self, rows: Sequence[int], count: int) -> None:
        """Ask for `count` rows, the first one again where there are no more. Nothing that was sent may be under way."""
        self._rows[: len(rows)] = rows
        self._rows[len(rows) : count] = rows[0]
        self._cuda.to_device(self._rows_at, self._rows[:count])

    def fetch(self, count: int) -> np.ndarray:
        """Wait for the first answers."""
        self._cuda.to_host(self._choices[:count], self.address)
        self._cuda.wait()
        return self._choices[:count].copy()
