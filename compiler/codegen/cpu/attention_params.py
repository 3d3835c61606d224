"""Params of the KV write and of paged attention. See `params.py` and `codegen_templates/cpp/attention.h`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from .formats import C_TYPES, round_up
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
class PvPiece:
    """One column range of the value product and the micro-kernel for it, as rendered and as called."""

    column: int
    vectors: int
    call: str


@dataclass(frozen=True)
class AttentionMicroParams:
    """A micro-kernel of `mr` query rows by `nv` sixteen-lane vectors (keys for qk, value columns for pv)."""

    kind: str  # "qk" or "pv"
    mr: int
    nv: int

    @property
    def name(self) -> str:
        return f"{self.kind}_m{self.mr}_v{self.nv}"

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
        """Tokens of one work item: about sixteen query rows."""
        return max(1, 16 // self.group)

    @property
    def mr(self) -> int:
        return ROWS

    @property
    def nv(self) -> int:
        return self.vectors

    @property
    def scale_text(self) -> str:
        return f"{float(self.scale)!r}f"

    @property
    def softcap_text(self) -> str:
        return f"{float(self.softcap)!r}f"

    def pv_pieces(self, rows: int) -> tuple[PvPiece, ...]:
        """The value columns cut into pieces of at most `vectors` (one row: four) sixteen-lane vectors."""
        most = 4 if rows == 1 else self.vectors
        left, column, pieces = round_up(self.value_dim, 16) // 16, 0, []
        while left:
            take = next(n for n in (4, 2, 1) if n <= min(left, most))
            pieces.append(PvPiece(column, take, AttentionMicroParams("pv", rows, take).name))
            left, column = left - take, column + 16 * take
        return tuple(pieces)

    def micros(self) -> tuple[AttentionMicroParams, ...]:
        """Every micro-kernel that this kernel calls."""
        found = [AttentionMicroParams("qk", ROWS, self.vectors), AttentionMicroParams("qk", 1, 4)]
        for rows in (ROWS, 1):
            found += [AttentionMicroParams("pv", rows, piece.vectors) for piece in self.pv_pieces(rows)]
        return tuple(dict.fromkeys(found))

    def scratch_bytes(self) -> int:
        """Bytes of AttentionTile::Work and the row states (checked by the C++ side)."""
        rows, width = self.tile * self.group, round_up(self.value_dim, 16)
        work = rows * self.key_dim + KEYS * (self.key_dim + width + rows) + rows * width + rows * 17
        return round_up(4 * (work + rows * (width + 2)) + 64, 64)
