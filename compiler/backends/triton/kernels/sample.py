"""Sampling on the device, after the last step of the program: the runtime's sampler for all rows at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from .....runtime.format.batch import SAMPLED, SAMPLING, TOP_LOGPROBS
from .....runtime.format.manifest import Limits
from .....runtime.format.plan import Extent, OutputArg, SampledArg, SamplingArg, ScratchArg, extent
from .....runtime.format.program import LOGITS
from ...render import render
from ..bounds.forms import Number
from ..spec import ELEMENTS, ONE, Arg, LaunchSpec, Shape, TritonKernel
from ..tiling.choice import Tuner, power_of_two

_ARRAYS = {array.name: "*" + ELEMENTS[array.dtype] for array in SAMPLING}
_SLOTS = 32  # tokens that the scan of a part may list
_SCRATCH = {  # the scan's results per row and part: type and bytes
    "listed_logits": ("*fp32", 4 * _SLOTS), "listed_tokens": ("*i32", 4 * _SLOTS), "floors": ("*i64", 8),
    "tops": ("*fp32", 4), "totals": ("*fp32", 4), "warm_totals": ("*fp32", 4), "winners": ("*i32", 4),
}  # fmt: skip
_RESULTS = {array.name: "*" + ELEMENTS[array.dtype] for array in SAMPLED}
_MOST_PARTS = 32


@dataclass(frozen=True, kw_only=True)
class SampleKernel(TritonKernel):
    """Draws a token per row of logits, float32 with rows `stride` elements apart (0: without gaps).

    How rows are sampled: temperature (0: greedy), top_k (0: off), top_p (1: off), min_p (0: off), seed [L, 2] (low and
    high 32 bits) and counter (which token of its request). What is sampled: token (-1: the logits are not numbers),
    logprob, top_ids (-1: no more) and top_logprobs [L, 20]. Logprobs are those of the unmodified logits. A token's
    noise depends only on seed, counter and token, so the rest of the batch does not matter.
    """

    scan_entry: ClassVar[str] = "sample_scan"
    choose_entry: ClassVar[str] = "sample_choose"
    top: ClassVar[int] = TOP_LOGPROBS
    listed: ClassVar[int] = TOP_LOGPROBS
    slots: ClassVar[int] = _SLOTS
    vocab: int
    stride: int = 0

    @property
    def row_stride(self) -> int:
        """Elements from one row of logits to the next."""
        return self.stride or self.vocab

    @property
    def chunk(self) -> int:
        """Vocabulary tokens of one program of the scan."""
        return max(power_of_two(-(-self.vocab // _MOST_PARTS)), min(max(power_of_two(self.vocab), 32), 1024))

    @property
    def parts(self) -> int:
        """Programs of the scan that share a row."""
        return -(-self.vocab // self.chunk)

    @property
    def run(self) -> int:
        """Neighbouring tokens that one program scans: likely tokens lie together and should be spread over programs."""
        return min(128, self.chunk)

    @property
    def groups(self) -> int:
        """Groups that the tokens of a part are divided into; the scan finds the largest logit of each first."""
        return min(128, self.chunk)

    @property
    def parts_pad(self) -> int:
        """A power of two that holds `parts`."""
        return power_of_two(self.parts)

    @property
    def list_pad(self) -> int:
        """A power of two that holds the listed tokens of all parts of a row."""
        return power_of_two(self.parts * self.slots)

    @property
    def block(self) -> int:
        """Tokens that a program reads at a time."""
        return min(power_of_two(self.vocab), 2048)

    def scratch(self, shape: Shape, limits: Limits, tuner: Tuner) -> dict[str, int]:
        states = shape.max_tokens * self.parts
        return {f"sample_{name}": states * size for name, (_, size) in _SCRATCH.items()}

    def scratch_values(self, sizes: Mapping[str, Number]) -> dict[str, tuple[Number, Number]]:
        return {"sample_winners": (-2, self.vocab - 1)}

    def launches(self, shape: Shape, limits: Limits, tuner: Tuner) -> tuple[LaunchSpec, ...]:
        logits = Arg("logits_ptr", "*fp32", OutputArg(LOGITS))
        arrays = {n: Arg(f"{n}_ptr", kind, SamplingArg(n)) for n, kind in _ARRAYS.items()}
        states = tuple(Arg(f"{n}_ptr", kind, ScratchArg(f"sample_{n}")) for n, (kind, _) in _SCRATCH.items())
        results = tuple(Arg(f"{n}_ptr", kind, SampledArg(n)) for n, kind in _RESULTS.items())
        rows = extent("num_logit_rows")
        noise = tuple(arrays[name] for name in ("temperature", "seed", "counter"))
        scan = LaunchSpec(
            render("triton/sample_scan.py.jinja", self), self.scan_entry, (logits, *noise, *states),
            (Extent(self.parts), rows, ONE), num_warps=max(self.chunk // 1024, 1),
        )  # fmt: skip
        choose = LaunchSpec(
            render("triton/sample_choose.py.jinja", self), self.choose_entry,
            (logits, *arrays.values(), *states, *results), (rows, ONE, ONE),
            num_warps=max(self.list_pad // 128, self.block // 256, 1),
        )  # fmt: skip
        return scan, choose
