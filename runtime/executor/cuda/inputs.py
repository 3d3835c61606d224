"""What travels between host and device in a step: the batch, how its rows are sampled, and what was sampled."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...batch.packed import MOVES_MULTIPLE, PackedBatch
from ...batch.scheduled import ScheduledBatch
from ..sampling import TOP_LOGPROBS, Sampled, SamplingRow
from .driver import Cuda
from .memory import ALIGN, PinnedArrays

_BATCH = (
    "token_ids", "positions", "slot_mapping", "seq_starts", "context_lens", "logit_rows", "moves", "tree_masks",
    "block_tables",
)  # fmt: skip
_GREEDY = SamplingRow(0.0, 0, 1.0, 0.0, 0, 0)


class StepInputs:
    """The host's side of one step under way; `device` is where both of them lie on the device, in turn."""

    def __init__(self, cuda: Cuda, limits: Sequence[int], block_size: int, device: int) -> None:
        max_tokens, max_seqs, max_blocks, max_rows = limits
        self._arrays = PinnedArrays(cuda, input_bytes(limits), device)
        take = self._arrays.allocate
        self._temperature, self._top_p, self._min_p = (take((max_rows,)).view(np.float32) for _ in range(3))
        self._top_k, self._counter = take((max_rows,)), take((max_rows,))
        self._seed = take((max_rows, 2))
        self.packed = PackedBatch(max_tokens, max_seqs, max_blocks, max_rows, block_size, take)
        self.passed = cuda.event()

    def fill(self, batch: ScheduledBatch, rows: Sequence[SamplingRow | None]) -> None:
        """Take a step. Rows that the host samples are greedy on the device, and ignored."""
        self.packed.pack(batch)
        self._fill_rows(0, [row or _GREEDY for row in rows])

    def pad_decodes(self, count: int) -> None:
        """Make a batch of decodes `count` long."""
        have = self.packed.num_logit_rows
        self._fill_rows(have, [_GREEDY] * (count - have))
        self.packed.pad_decodes(count)

    def _fill_rows(self, first: int, rows: Sequence[SamplingRow]) -> None:
        if not rows:
            return
        part = slice(first, first + len(rows))
        self._temperature[part] = [row.temperature for row in rows]
        self._top_p[part] = [row.top_p for row in rows]
        self._min_p[part] = [row.min_p for row in rows]
        self._top_k[part] = [row.top_k for row in rows]
        self._counter[part] = [row.counter for row in rows]
        self._seed[part] = np.array([row.seed for row in rows], dtype=np.uint64).view(np.int32).reshape(-1, 2)

    def send(self, num_seqs: int) -> None:
        """Copy to the device what a step of so many sequences reads."""
        self._arrays.send_until(self.packed.block_tables[:num_seqs])

    def addresses(self) -> dict[str, int]:
        """Where each array lies on the device."""
        sampling = {
            "temperature": self._temperature, "top_k": self._top_k, "top_p": self._top_p, "min_p": self._min_p,
            "seed": self._seed, "counter": self._counter,
        }  # fmt: skip
        named = {name: getattr(self.packed, name) for name in _BATCH}
        named |= {f"sampling:{name}": array for name, array in sampling.items()}
        return {name: self._arrays.address(array) for name, array in named.items()}


def input_bytes(limits: Sequence[int]) -> int:
    """Bytes of the arrays of one step."""
    max_tokens, max_seqs, max_blocks, max_rows = limits
    counts = [*[max_rows] * 5, 2 * max_rows, *[max_tokens] * 3, max_seqs + 1, max_seqs, max_rows]
    counts += [2 * (max_tokens + MOVES_MULTIPLE), 2 * max_tokens, max_seqs * max_blocks]
    return sum(4 * count + ALIGN for count in counts)


class StepOutputs:
    """The host's side of what one step sampled."""

    def __init__(self, cuda: Cuda, max_rows: int, device: int) -> None:
        self._arrays = PinnedArrays(cuda, output_bytes(max_rows), device)
        take = self._arrays.allocate
        self._token, self._logprob = take((max_rows,)), take((max_rows,)).view(np.float32)
        self._top_ids = take((max_rows, TOP_LOGPROBS))
        self._top_logprobs = take((max_rows, TOP_LOGPROBS)).view(np.float32)

    def fetch(self, rows: int) -> None:
        """Copy the first rows from the device, in the order of the stream."""
        for array in (self._token, self._logprob, self._top_ids, self._top_logprobs):
            self._arrays.fetch(array[:rows])

    def sampled(self, rows: int, logits: np.ndarray | None) -> Sampled:
        """The first rows, once they have arrived."""
        return Sampled(
            self._token[:rows], self._logprob[:rows], self._top_ids[:rows], self._top_logprobs[:rows], logits
        )

    def addresses(self) -> dict[str, int]:
        """Where each array lies on the device."""
        named = {
            "token": self._token, "logprob": self._logprob, "top_ids": self._top_ids,
            "top_logprobs": self._top_logprobs,
        }  # fmt: skip
        return {f"sampled:{name}": self._arrays.address(array) for name, array in named.items()}


def output_bytes(max_rows: int) -> int:
    """Bytes of the arrays of what one step sampled."""
    return sum(4 * count + ALIGN for count in (max_rows, max_rows, *[max_rows * TOP_LOGPROBS] * 2))


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
