"""Attention layers, and steps of sequences with a past, run by the kernels and by a float64 reference."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from icc.compiler.backends.triton.spec import Shape
from icc.compiler.backends.triton.tiling.choice import Tuner
from icc.compiler.ops.attention import rotate
from icc.runtime.format.manifest import Limits
from interpreting import TUNER, make_kernel, run_kernel
from paged import CODES, DTYPES, Pool, cache, tables
from step_making import rotary
from torch import Tensor

POSITIONS = 400
LIMITS = Limits(max_seq_len=POSITIONS, max_batch_size=16, max_step_tokens=128)


@dataclass(frozen=True)
class Layer:
    """One attention layer."""

    q_heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    rotary_dim: int = 0
    rope_style: str = "half"
    window: int = 0
    front: int = 0
    chunk: int = 0
    softcap: float = 0.0
    sinks: bool = False
    alibi: bool = False
    ahead: int = 0
    bias: bool = False
    row_bias: int = 0  # columns
    later: int = 0
    key_bias: int = 0
    key_later: int = 0
    shared: bool = False  # values are the first columns of keys


@dataclass
class Step:
    """Sequences of (tokens before, tokens of this step); (0, 0) is a padding sequence of one token.

    trees: for each sequence that is a tree of guesses, the parent of each token of this step except the first.
    """

    layer: Layer
    sequences: list[tuple[int, int]]
    cache: str = "f32"
    block_size: int = 16
    kind: str = ""  # element type of q and o; "": the cache's if it is a float type, else bf16
    gap: int = 3  # elements between rows of q and o
    seed: int = 0
    trees: dict[int, list[int]] = field(default_factory=dict)
    pool: Pool = field(init=False)

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        layer = self.layer
        self.kind = self.kind or ("bf16" if self.cache in CODES else self.cache)
        self.tokens = sum(max(n, 1) for _, n in self.sequences)
        self.q = torch.randn(self.tokens, layer.q_heads * layer.key_dim + self.gap).to(DTYPES[self.kind])
        self.cos, self.sin = tables(POSITIONS, layer.rotary_dim, layer.rope_style) if layer.rotary_dim else (None, None)
        self.sinks = torch.randn(layer.q_heads) * 2 if layer.sinks else None
        self.alibi = torch.rand(layer.q_heads) if layer.alibi else None
        self.bias = torch.randn(layer.q_heads, 2 * POSITIONS) if layer.bias else None
        self.row_bias, self.key_bias = self._rows(layer.row_bias), self._rows(layer.key_bias)
        self._fill_pages()

    def _rows(self, columns: int) -> Tensor | None:
        """Random values [tokens, q_heads * columns], with a gap after each row; None without columns."""
        width = self.layer.q_heads * columns
        return torch.randn(self.tokens, width + self.gap).to(DTYPES[self.kind]) if width else None

    def _fill_pages(self) -> None:
        layer, size = self.layer, self.block_size
        needed = [-(-(before + n) // size) for before, n in self.sequences]
        blocks = torch.randperm(sum(needed) + 2).to(torch.int32)
        self.pool = Pool(
            layer.kv_heads, layer.key_dim, layer.value_dim, self.cache, size, sum(needed) + 2, layer.shared
        )
        self.block_tables = torch.full((len(needed), max(needed) + 2), -9, dtype=torch.int32)
        for row, count in enumerate(needed):
            self.block_tables[row, :count], blocks = blocks[:count], blocks[count:]
            for at in range(sum(self.sequences[row])):
                k, v = torch.randn(layer.kv_heads, layer.key_dim), torch.randn(layer.kv_heads, layer.value_dim)
                self.pool.write(self.slot(row, at), k, v)

    def slot(self, row: int, at: int) -> int:
        """The slot of the token at position `at` of sequence `row`."""
        return int(self.block_tables[row, at // self.block_size]) * self.block_size + at % self.block_size

    def slots(self) -> Tensor:
        """The slots of the step's tokens; -1 for padding."""
        found = []
        for row, (before, n) in enumerate(self.sequences):
            found += [self.slot(row, at) for at in range(before, before + n)] or [-1]
        return torch.tensor(found, dtype=torch.int32)

    def positions(self, row: int) -> Tensor:
        """The positions of the step's tokens of a sequence."""
        before, n = self.sequences[row]
        positions = [before]
        for parent in self.trees.get(row, range(max(n, 1) - 1)):
            positions.append(positions[parent] + 1)
        return torch.tensor(positions)

    def ancestors(self, row: int) -> Tensor:
        """Boolean [n, n]: the tokens of a tree that each token attends to."""
        seen = torch.eye(self.sequences[row][1], dtype=torch.bool)
        for token, parent in enumerate(self.trees[row], start=1):
            seen[token] |= seen[parent]
        return seen

    def masks(self, row: int) -> Tensor:
        """int32 [n, 2]: `ancestors` as bits; zeros if the sequence is no tree."""
        if row not in self.trees:
            return torch.zeros(max(self.sequences[row][1], 1), 2, dtype=torch.int32)
        bits = [sum(1 << i for i, one in enumerate(line) if one) for line in self.ancestors(row).tolist()]
        return torch.tensor([b - (1 << 64) * (b >> 63) for b in bits])[:, None].view(torch.int32)

    def kernel(self) -> Any:
        """The kernel of the layer."""
        layer, rotated = self.layer, "f32" if self.cos is not None else ""
        vectors = ["f32" if given else "" for given in (layer.sinks, layer.alibi, layer.bias)]
        by_rows = [self.kind if width else "" for width in (layer.row_bias, layer.key_bias)]
        types = (self.kind, rotated, rotated, *vectors, *by_rows, self.kind)
        return make_kernel(
            "attention",
            **cache(layer.kv_heads, layer.key_dim, layer.value_dim, self.cache, self.block_size, layer.shared),
            rotary=rotary(layer.rotary_dim, POSITIONS, layer.rope_style), q_heads=layer.q_heads,
            scale=layer.key_dim**-0.5, window=layer.window, front=layer.front, chunk=layer.chunk, softcap=layer.softcap,
            strides={
                "q": self.q.shape[1], "o": layer.q_heads * layer.value_dim + self.gap,
                "row_bias": layer.q_heads * layer.row_bias + self.gap,
                "key_bias": layer.q_heads * layer.key_bias + self.gap,
            },
            types=types, aligned=(False,) * 9, ahead=layer.ahead, bias_width=2 * POSITIONS if layer.bias else 0,
            row_bias_width=layer.row_bias, later=layer.later,
            key_bias_width=layer.key_bias, key_later=layer.key_later,
        )  # fmt: skip

    def run(
        self, decode: bool, tuner: Tuner = TUNER, max_tokens: int = 0, kernel: Any = None,
        more: dict[str, Tensor] | None = None,
    ) -> Tensor:  # fmt: skip
        """The output [tokens, heads * value_dim] of the kernels; asserts that the gap of each row is still NaN.

        max_tokens: of the phase; 0: in mixed steps, too many for splits of the keys. kernel: replaces the layer's own;
        None: that. more: its further operands, None: none.
        """
        width = self.layer.q_heads * self.layer.value_dim
        o = torch.full((self.tokens, width + self.gap), torch.nan, dtype=DTYPES[self.kind])
        counts = torch.tensor([0, *(max(n, 1) for _, n in self.sequences)])
        batch = {
            "seq_starts": counts.cumsum(0).to(torch.int32),
            "context_lens": torch.tensor([before + n for before, n in self.sequences], dtype=torch.int32),
            "block_tables": self.block_tables,
            "positions": torch.cat([self.positions(row) for row in range(len(self.sequences))]).to(torch.int32),
            "slot_mapping": self.slots(),
            "moves": torch.zeros(0, 2, dtype=torch.int32),
            "tree_masks": torch.cat([self.masks(row) for row in range(len(self.sequences))]),
        }
        sizes = {"num_tokens": self.tokens, "num_seqs": len(self.sequences), "max_blocks": self.block_tables.shape[1]}
        run_kernel(
            kernel or self.kernel(),
            [self.q, self.cos, self.sin, self.sinks, self.alibi, self.bias, self.row_bias, self.key_bias], [o],
            limits=LIMITS, tuner=tuner,
            shape=Shape(max_tokens or (self.tokens if decode else 512), decode), batch=batch, sizes=sizes,
            kv=self.pool.bytes, more=more,
        )  # fmt: skip
        assert o[:, width:].isnan().all()
        return o[:, :width].double()

    def expected(self) -> Tensor:
        """The output of `run` by the definition, in float64 on the content of the pages."""
        rows, token = [], 0
        for row, (before, n) in enumerate(self.sequences):
            if before + n == 0:
                rows.append(torch.zeros(1, self.layer.q_heads * self.layer.value_dim).double())
            else:
                rows.append(self._attend(row, token, before, n))
            token += max(n, 1)
        return torch.cat(rows)

    def _attend(self, row: int, token: int, before: int, n: int) -> Tensor:
        layer, group = self.layer, self.layer.q_heads // self.layer.kv_heads
        positions = self.positions(row)
        keys = torch.cat([torch.arange(before), positions])
        q = self.q[token : token + n, : layer.q_heads * layer.key_dim].double().view(n, layer.q_heads, -1)
        based = positions.clamp(max=layer.front + layer.window - 1) if layer.front else positions
        far = q
        if self.cos is not None and self.sin is not None:
            cos, sin = self.cos.double(), self.sin.double()
            q, far = (rotate(q, cos[at], sin[at], layer.rope_style) for at in (positions, based))
        pairs = [self.pool.read(self.slot(row, at)) for at in range(before + n)]
        k, v = (torch.stack(x).repeat_interleave(group, 1) for x in zip(*pairs, strict=True))
        i, j = torch.where(keys < layer.front, based[:, None], positions[:, None]), keys[None]
        scores = torch.where(j < layer.front, *(torch.einsum("ihd,jhd->hij", x, k) for x in (far, q)))
        scores = scores * layer.key_dim**-0.5
        if layer.softcap:
            scores = layer.softcap * torch.tanh(scores / layer.softcap)
        if self.alibi is not None:
            scores = scores + self.alibi.double()[:, None, None] * (j - i)
        if self.bias is not None:
            scores = scores + self.bias.double()[:, POSITIONS + j - i]
        if self.row_bias is not None:
            own = self.row_bias[token : token + n, : -self.gap].double().view(n, layer.q_heads, -1).transpose(0, 1)
            column = positions[:, None] - j + layer.later
            there = (column >= 0) & (column < layer.row_bias)
            found = own.gather(2, column.clamp(0, layer.row_bias - 1).expand(layer.q_heads, -1, -1))
            scores = scores + found.masked_fill(~there, 0.0)
        if self.key_bias is not None:
            own = self.key_bias[token : token + n, : -self.gap].double().view(n, layer.q_heads, -1).transpose(0, 1)
            column = positions[:, None] - j + layer.key_later
            there = (column >= 0) & (column < layer.key_bias)
            found = own.gather(2, column.mT.clamp(0, layer.key_bias - 1).expand(layer.q_heads, -1, -1)).mT
            scores = scores + found.masked_fill(~there, 0.0)
        i = positions[:, None]
        seen = j <= i + layer.ahead if layer.ahead >= 0 else torch.ones_like(j <= i)
        if row in self.trees:
            seen = torch.cat([torch.ones(n, before, dtype=torch.bool), self.ancestors(row)], dim=1)
        if layer.window:
            seen = seen & ((j > i - layer.window) | (j < layer.front))
        if layer.chunk:
            seen = seen & (j // layer.chunk == i // layer.chunk)
        scores = scores.masked_fill(~seen, -torch.inf)
        if self.sinks is not None:
            sinks = self.sinks.double()[:, None, None].expand(-1, n, 1)
            scores = torch.cat([scores, sinks], dim=-1)
        weights = scores.softmax(-1)[..., : before + n]
        return torch.einsum("hij,jhd->ihd", weights, v).reshape(n, -1)
