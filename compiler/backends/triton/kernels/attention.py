"""Attention over the paged KV cache: one kernel for mixed steps, another, split over the keys, for decode steps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import e, log2
from typing import ClassVar

from .....runtime.format.manifest import Limits
from .....runtime.format.plan import COUNTERS, CountersArg, Extent, OperandArg, Term
from ....program.steps.attention import Attention
from ...errors import CodegenError
from ...render import render
from ..spec import ONE, Arg, LaunchSpec, Shape, batch_arg, scratch_arg, size_arg
from ..tiling.attention import MOST_SPLITS, AttentionTiling, Workload, decode_tiling, mixed_tiling, split_count
from ..tiling.choice import Tuner, power_of_two
from .kv_cache import KvWriteKernel, Piece, RotatingKernel, pieces, product_type

JOINED = 8  # most sequences whose new keys attention writes itself; for more there is a separate kernel
SPLIT_TOKENS = 256  # larger mixed steps have enough tiles to keep a device busy
STATES = tuple(scratch_arg(name, "*fp32") for name in ("peaks", "totals", "partials"))


@dataclass(frozen=True)
class AttentionKernel(RotatingKernel[Attention]):
    """Attention of one layer; compiler/ops/attention.py documents the operands and facts."""

    @classmethod
    def refusal(cls, step: Attention) -> str:
        if step.scale < 0:
            return f"scale {step.scale}: negative ones are not supported"
        if step.write and (reason := KvWriteKernel.refusal(step.write)):
            return reason
        return super().refusal(step)

    @property
    def qk_type(self) -> str:
        """Triton's type of both operands of q k'."""
        return product_type(self.step.q.dtype, self.cached)

    @property
    def pv_type(self) -> str:
        """The type in which attention weights are multiplied with values. Weights times scales of codes may be too
        small for f16."""
        return self.cached.product or "bfloat16"

    @property
    def unit(self) -> float:
        """The factor that makes a score of the kernel's loop a logarithm to base 2; 1 if scores are already scaled."""
        s = self.step
        return 1.0 if s.softcap or s.adds else s.scale * log2(e)

    def span(self, limits: Limits) -> int:
        """The most keys that a query sees."""
        return min(n for n in (limits.max_seq_len, self.step.window, self.step.chunk) if n)

    @property
    def workload(self) -> Workload:
        """The sizes that decide the tiling."""
        kv = self.step.kv
        key, value = (sum(piece.width for piece in pieces(dim)) for dim in (kv.key_dim, kv.value_dim))
        multiplied = 4 if self.qk_type == "float32" else 2
        cached = 1 / self.packed if self.packed else self.numbers.item_size
        sizes = cached, multiplied, self.step.block_size
        return Workload(kv.kv_heads, self.step.group, key, value, *sizes, shared=kv.shared)

    @cached_property
    def writer(self) -> KvWriteKernel | None:
        """The kernel that writes new keys and values; None if the step has none."""
        return KvWriteKernel(self.step.write) if self.step.write else None

    def launches(self, shape: Shape, limits: Limits, tuner: Tuner) -> tuple[LaunchSpec, ...]:
        moves, write = map(_of_new, self.writer.launches(shape, limits, tuner)) if self.writer else (None, None)
        if shape.decode:
            attend = self._decode(decode_tiling(self.workload, tuner), self._splits(shape, limits, tuner), shape)
            if any(arg.name == "slot_mapping" for arg in attend[0].args):
                write = None
        else:
            tiling = mixed_tiling(self.workload, shape.tiled_tokens, tuner)
            attend = self._mixed(tiling, self._splits(shape, limits, tuner))
        return (*filter(None, (moves, write)), *attend)

    def scratch(self, shape: Shape, limits: Limits, tuner: Tuner) -> dict[str, int]:
        splits = self._splits(shape, limits, tuner)
        if splits == 1:
            return {}
        states = shape.max_tokens * self.step.q_heads * splits
        if states * self.step.kv.value_dim >= 2**31:
            raise CodegenError(f"attention of {shape.max_tokens} tokens in {splits} splits: too many partial outputs")
        return {"peaks": 4 * states, "totals": 4 * states, "partials": 4 * states * self.step.kv.value_dim}

    def _splits(self, shape: Shape, limits: Limits, tuner: Tuner) -> int:
        """Programs that share the keys of a sequence, or, in small mixed steps, of a tile of its tokens.

        1 in mixed steps if a row's sums must have one order whatever else is in its tile (shape.typical).
        """
        if shape.decode:
            tiling, tiles = decode_tiling(self.workload, tuner), shape.max_tokens
            if self.step.kv.kv_heads * -(-self.step.group // tiling.heads) > COUNTERS:
                return 1
        elif shape.max_tokens > SPLIT_TOKENS or shape.typical or self.step.ahead:
            return 1
        else:
            tiling = mixed_tiling(self.workload, shape.tiled_tokens, tuner)
            tiles = -(-shape.max_tokens // (tiling.rows // tiling.heads))
        return split_count(self.workload, tiling, tiles, self.span(limits), tuner, shape.decode)

    def _mixed(self, tiling: AttentionTiling, splits: int) -> tuple[LaunchSpec, ...]:
        source = AttentionSource(
            self, "attention", tiling.rows, tiling.heads, tiling.tile, tiling.widest, splits > 1, trees=True
        )
        names = ("seq_starts", "context_lens", "block_tables", "positions", "tree_masks")
        args = self._results(splits) + self.kv_args() + tuple(map(batch_arg, names))
        tiles = Extent(0, (Term("num_tokens", tiling.rows // tiling.heads), Term("num_seqs")))
        grid = (tiles, Extent(self.step.kv.kv_heads * source.head_parts), Extent(splits))
        attend = LaunchSpec(
            render("triton/attention_mixed.py.jinja", source, self.step), source.entry,
            (*args, size_arg("num_seqs"), size_arg("max_blocks")), grid, tiling.warps, tiling.stages,
        )  # fmt: skip
        return (attend, self._merge(splits)) if splits > 1 else (attend,)

    def _decode(self, tiling: AttentionTiling, splits: int, shape: Shape) -> tuple[LaunchSpec, ...]:
        source = AttentionSource(
            self, "attention", tiling.rows, tiling.heads, tiling.tile, tiling.widest, splits > 1, tiling.warps,
            joins=shape.max_tokens <= JOINED,
        )  # fmt: skip
        grid = (Extent(0, (Term("num_seqs"),)), Extent(self.step.kv.kv_heads * source.head_parts), Extent(splits))
        rest = (batch_arg("context_lens"), batch_arg("block_tables"), size_arg("max_blocks"))
        shared = (*STATES, Arg("counters_ptr", "*i32", CountersArg())) if splits > 1 else ()
        written = self.pointers(**{f"new.{name}": f"new_{name}_ptr" for name in ("k", "v", "cos", "sin")})
        new = (*written, batch_arg("slot_mapping")) if source.writes else ()
        return (
            LaunchSpec(
                render("triton/attention_decode.py.jinja", source, self.step), source.entry,
                self._operands() + new + shared + self.kv_args() + rest, grid, tiling.warps, tiling.stages,
            ),
        )  # fmt: skip

    def _merge(self, splits: int) -> LaunchSpec:
        """The launch that computes o from the states of all splits of a mixed step."""
        merge = MergeSource(self, "attention_merge", splits)
        ins = tuple(a for a in self._operands() if a.name in ("sinks_ptr", "o_ptr"))
        args, grid = (*ins, *STATES), (Extent(0, (Term("num_tokens"),)), Extent(self.step.q_heads), ONE)
        return LaunchSpec(
            render("triton/attention_merge.py.jinja", merge, self.step), merge.entry, args, grid, merge.warps
        )

    def _results(self, splits: int) -> tuple[Arg, ...]:
        """The operands; with splits, the scratch areas that `_merge` reads instead of o."""
        if splits == 1:
            return self._operands()
        return (*(a for a in self._operands() if a.name not in ("o_ptr", "sinks_ptr")), *STATES)

    def _operands(self) -> tuple[Arg, ...]:
        names = ("q", "cos", "sin", "sinks", "alibi", "bias", "row_bias", "key_bias", "o")
        return self.pointers(**{name: f"{name}_ptr" for name in names})


def _of_new(spec: LaunchSpec) -> LaunchSpec:
    """The launch of a key-value write with operands of an attention step."""

    def found(arg: Arg) -> Arg:
        return replace(arg, value=OperandArg(f"new.{arg.value.name}")) if isinstance(arg.value, OperandArg) else arg

    return replace(spec, args=tuple(map(found, spec.args)))


@dataclass(frozen=True)
class AttentionSource:
    """The parameters of the template of a mixed or decode kernel.

    A program has `rows` (token, head) pairs of `heads` query heads, and reads `tile` keys at a time; no product is
    wider than `widest`. split: the keys of a sequence are divided between programs. joins: the kernel may also write
    new keys. trees: sequences may verify trees of drafts.
    """

    layer: AttentionKernel
    entry: str
    rows: int
    heads: int
    tile: int
    widest: int = 256
    most_splits: ClassVar[int] = MOST_SPLITS
    split: bool = False
    warps: int = 4
    joins: bool = False
    trees: bool = False

    @property
    def writes(self) -> bool:
        """Whether the program that reads a sequence's last keys stores the new key first, because no other program
        reads it."""
        step = self.layer.step
        alone = self.head_parts == 1 and step.front <= self.tile and not self.trees
        return step.new is not None and self.joins and alone and step.rotary == step.new_rotary

    @property
    def stored(self) -> int:
        """Rows of a store, only one of which is real: the products of mixing need 16."""
        return 16 if self.layer.packed else 1

    @property
    def members(self) -> int:
        """Query heads of a program, padded to a power of two."""
        return power_of_two(self.heads)

    @property
    def merged(self) -> int:
        """How many splits a program of the merge reads at a time, so that a thread holds at most 64 elements of partial
        outputs."""
        widest = max(piece.width for piece in self.value_pieces)
        return min(max(64 * 32 * self.warps // (self.members * widest), 1), self.most_splits)

    @property
    def head_parts(self) -> int:
        """Programs that share the query heads of a KV head."""
        return -(-self.layer.step.group // self.heads)

    @property
    def one_page(self) -> bool:
        """Whether no tile crosses the end of a page."""
        return self.layer.step.block_size % self.tile == 0

    @property
    def value_pieces(self) -> tuple[Piece, ...]:
        """The pieces in which a value, and the output, are held: powers of two of dims, no wider than `widest` unless
        values are the beginning of keys."""
        dim = self.layer.step.kv.value_dim
        if self.layer.packed:
            return self.layer.mixing(dim)
        return pieces(dim) if self.layer.step.kv.shared else pieces(dim, self.widest)

    @property
    def reuses_keys(self) -> bool:
        """Whether values are pieces of keys that are already loaded."""
        values = self.value_pieces
        return self.layer.step.kv.shared and values == self.layer.key_pieces[: len(values)]

    def mixed_back(self, value: str, piece: Piece) -> str:
        """A piece of the output with the mixing of packed values undone."""
        return f"mix({value}, {piece.first}, {piece.width}, True)" if self.layer.packed else f"({value})"

    @property
    def queries(self) -> str:
        """The names of the pieces of q."""
        return ", ".join(f"q{i}" for i in range(len(self.layer.key_pieces)))

    @property
    def accumulators(self) -> str:
        """The names of the sums of the pieces of the output."""
        return ", ".join(f"acc{i}" for i in range(len(self.value_pieces)))


@dataclass(frozen=True)
class MergeSource:
    """The parameters of the template attention_merge."""

    layer: AttentionKernel
    entry: str
    splits: int

    @property
    def splits_pad(self) -> int:
        """The splits, padded to a power of two."""
        return power_of_two(self.splits)

    @property
    def warps(self) -> int:
        """About sixteen elements of the partial outputs per thread."""
        return min(max(self.splits_pad * self.layer.value_pad // 512, 1), 8)
