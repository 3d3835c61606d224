"""Params of the KV write and of paged attention. See `params.py` and `codegen_templates/cpp/attention.h`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..layouts.elements import C_TYPES, round_up
from .params import KernelParams, contiguous

KEYS = 64  # keys of one chunk, as in attention.h
ROWS = 4  # query rows of the wide micro-kernels


@dataclass(frozen=True, kw_only=True)
class CacheParams(KernelParams):
    """The KV geometry that both kernels share."""

    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: str
    block_size: int
    rotary_dim: int = 0
    rope_style: str = "half"
    table_rows: int = 0

    @property
    def ctype(self) -> str:
        return C_TYPES[self.dtype]

    @property
    def interleaved(self) -> str:
        return "true" if self.rope_style == "interleaved" else "false"


@dataclass(frozen=True, kw_only=True)
class KvWriteParams(CacheParams):
    """k, v, cos, sin -> nothing: rotates k and stores both at slot_mapping."""

    template: ClassVar[str] = "cpp/attention/kv_write.cpp.jinja"
    k_stride: int = contiguous(lambda p: p.kv_heads * p.key_dim)
    v_stride: int = contiguous(lambda p: p.kv_heads * p.value_dim)


@dataclass(frozen=True)
class AttentionMicroParams:
    """A micro-kernel of `mr` query rows by `nv` sixteen-lane vectors: keys for qk, value columns for pv, whose last
    vector has `last` columns. `integer`: of an int8 cache."""

    kind: str  # "qk" or "pv"
    mr: int
    nv: int
    last: int = 16
    integer: bool = False

    @property
    def name(self) -> str:
        kind = f"{self.kind}_i8" if self.integer else self.kind
        return f"{kind}_m{self.mr}_v{self.nv}" + (f"_l{self.last}" if self.last < 16 else "")

    @property
    def template(self) -> str:
        return f"cpp/attention/micro_{self.kind}.cpp.jinja"


@dataclass(frozen=True, kw_only=True)
class AttentionParams(CacheParams):
    """q, cos, sin, sinks, alibi -> o. `vectors` is the ISA level's column count for four rows."""

    template: ClassVar[str] = "cpp/attention/attention.cpp.jinja"
    q_heads: int
    scale: float
    vectors: int
    q_stride: int = contiguous(lambda p: p.q_heads * p.key_dim)
    o_stride: int = contiguous(lambda p: p.q_heads * p.value_dim)
    window: int = 0
    chunk: int = 0
    softcap: float = 0.0
    has_sinks: bool = False
    has_alibi: bool = False

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.q_heads // self.kv_heads

    @property
    def tile(self) -> int:
        """Tokens of one work item: at least sixteen query rows, in whole blocks of the widest micro-kernel."""
        fewest = -(-16 // self.group)
        return next(t for t in range(fewest, fewest + ROWS) if t * self.group % ROWS == 0)

    @property
    def row_blocks(self) -> tuple[int, ...]:
        """Query rows of the micro-kernels, most first."""
        return ROWS, 3, 2, 1

    @property
    def scale_text(self) -> str:
        return f"{float(self.scale)!r}f"

    @property
    def softcap_text(self) -> str:
        return f"{float(self.softcap)!r}f"

    def _vectors(self, rows: int) -> int:
        """Vectors per row that the registers hold beside those of the other rows."""
        return self.vectors if rows == ROWS else min(4, self.vectors * ROWS // rows)

    def qk(self, rows: int) -> AttentionMicroParams:
        """The score kernel for `rows` rows."""
        return AttentionMicroParams("qk", rows, self._vectors(rows), integer=self.dtype == "i8")

    def pv(self, rows: int) -> tuple[tuple[int, AttentionMicroParams], ...]:
        """(first column, kernel) of the pieces that the value columns are cut into."""
        total, pieces, done = round_up(self.value_dim, 16) // 16, [], 0
        while done < total:
            take = next(n for n in (4, 2, 1) if n <= min(total - done, self._vectors(rows)))
            last = self.value_dim - 16 * (total - 1) if done + take == total else 16
            pieces.append((16 * done, AttentionMicroParams("pv", rows, take, last, self.dtype == "i8")))
            done += take
        return tuple(pieces)

    def micros(self) -> tuple[AttentionMicroParams, ...]:
        """Every micro-kernel that this kernel calls."""
        found = [m for rows in self.row_blocks for m in (self.qk(rows), *(piece for _, piece in self.pv(rows)))]
        return tuple(dict.fromkeys(found))

    def scratch_bytes(self) -> int:
        """Bytes of AttentionTile::Work and the row states (checked by the C++ side)."""
        rows, width = self.tile * self.group, round_up(self.value_dim, 16)
        per_row = self.key_dim + 1 + KEYS + KEYS // 2 + width + 19  # the half: 16-bit weights of an int8 cache
        copied = KEYS * (self.key_dim + self.value_dim + 2)
        return round_up(4 * (rows * (per_row + width + 2) + copied) + 256, 64)
