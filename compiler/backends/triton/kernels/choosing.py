"""The choice of the keys that attention reads, by an index: scores of all keys, then the best of each token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .....runtime.format.manifest import Limits
from .....runtime.format.plan import Extent, Term, extent
from ....ops.selecting import LEFT_OUT
from ....program.steps.attention import ChooseKeys
from ...render import render
from ..spec import ONE, LaunchSpec, Shape, batch_arg, scratch_arg, size_arg
from ..tiling.choice import Tuner, power_of_two
from .kv_cache import KvKernel, product_type

SCORES = scratch_arg("scores", "*fp32")


@dataclass(frozen=True)
class ChooseKeysKernel(KvKernel[ChooseKeys]):
    """The first kernel writes scores, indexed by distance, to scratch memory, a row of float32 per token; the second
    reads them."""

    chunk: ClassVar[int] = 1024

    @property
    def left_out(self) -> float:
        """The value that marks a key as not to be read."""
        return LEFT_OUT

    @property
    def qk_type(self) -> str:
        """Triton's type of both operands of a product."""
        return product_type(self.step.q.dtype, self.cached)

    def scratch(self, shape: Shape, limits: Limits, tuner: Tuner) -> dict[str, int]:
        return {"scores": 4 * shape.max_tokens * self.step.width}

    def launches(self, shape: Shape, limits: Limits, tuner: Tuner) -> tuple[LaunchSpec, ...]:
        source = ChooseScoresKernel(self, shape.decode)
        names = ("context_lens", "block_tables", *(() if shape.decode else ("seq_starts", "positions", "tree_masks")))
        args = (*self.pointers(q="q_ptr", w="w_ptr"), SCORES, *self.kv_args(), *map(batch_arg, names))
        sizes = ("max_blocks",) if shape.decode else ("num_seqs", "max_blocks")
        tiles = (Term("num_seqs"),) if shape.decode else (Term("num_tokens", source.tokens), Term("num_seqs"))
        segments = -(-min(self.step.width, limits.max_seq_len) // source.segment)
        choice = (SCORES, *self.pointers(o="o_ptr"), batch_arg("positions"))
        return (
            LaunchSpec(
                render("triton/choose_scores.py.jinja", source, self.step), "choose_scores",
                (*args, *map(size_arg, sizes)), (Extent(0, tiles), Extent(segments), ONE),
            ),
            LaunchSpec(
                render("triton/choose_keys.py.jinja", self, self.step), "choose_keys", choice,
                (extent("num_tokens", 1), ONE, ONE),
            ),
        )  # fmt: skip


@dataclass(frozen=True)
class ChooseScoresKernel:
    """The parameters of the template of scores: a program has `tokens` of a sequence and a `segment` of its keys, and
    processes `heads` of the index and `tile` keys at a time."""

    layer: ChooseKeysKernel
    decode: bool
    tile: ClassVar[int] = 64

    @property
    def heads(self) -> int:
        """Heads of the index that a program processes at a time; a matrix unit needs at least 16 rows."""
        return min(max(power_of_two(self.layer.step.heads), 16), 64)

    @property
    def head_parts(self) -> int:
        """How many groups of `heads` heads a program processes."""
        return -(-self.layer.step.heads // self.heads)

    @property
    def tokens(self) -> int:
        """Tokens of a sequence that a program processes: one in decode, else as many as give 64 rows of (token,
        head)."""
        return 1 if self.decode else 64 // self.heads

    @property
    def segment(self) -> int:
        """Keys of a program: a multiple of `tile`, so large that a sequence has at most 64 segments for a tile of
        tokens."""
        return max(-(-self.layer.step.width // 64 // self.tile) * self.tile, 8 * self.tile)
