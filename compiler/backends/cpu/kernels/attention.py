"""The KV write and paged attention. See also `codegen_templates/cpp/attention.h`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, TypeVar

from ....kv_formats import find_kv_format
from ....ops.selecting import LEFT_OUT
from ....program.steps.attention import Attention, ChooseKeys, KvWrite
from ..layouts.elements import round_up
from .base import KernelParams
from .caches import CPU_CACHES

KEYS = 64  # keys of one chunk, as in attention.h
PARTIAL_BYTES = 8 << 20  # partial outputs when a long context is split over threads
C = TypeVar("C", KvWrite, Attention, ChooseKeys)


@dataclass(frozen=True)
class CacheParams(KernelParams[C]):
    """Parameters that the KV write and attention share."""

    @classmethod
    def refusal(cls, step: C) -> str:
        if reason := CPU_CACHES.refusal(step.cache, step.kv):
            return reason
        bits = find_kv_format(step.cache).numbers.bits
        if CPU_CACHES.find(step.cache).header and bits != 8:
            return f"KV format {step.cache!r} has elements of {bits} bits, and a type of a package one of 8"
        if step.block_size % 16:
            return f"blocks of {step.block_size} tokens: must be a multiple of 16"
        return super().refusal(step)

    @property
    def headers(self) -> tuple[str, ...]:
        header = CPU_CACHES.find(self.step.cache).header
        return (header,) if header else ()

    @property
    def ctype(self) -> str:
        """The C++ type of an element of the cache."""
        return CPU_CACHES.find(self.step.cache).ctype

    @property
    def integer(self) -> bool:
        """Whether queries and keys are multiplied as integers."""
        return CPU_CACHES.find(self.step.cache).integer

    @property
    def mixed(self) -> bool:
        """Whether the cache's vectors are multiplied by a Hadamard matrix before they are rounded; see kv.h."""
        return find_kv_format(self.step.cache).mixed


def _interleaved(step: KvWrite | Attention) -> str:
    return "true" if step.rotary.style == "interleaved" else "false"


@dataclass(frozen=True)
class KvWriteParams(CacheParams[KvWrite]):
    """Rotates k and stores k and v at slot_mapping."""

    template: ClassVar[str] = "cpp/attention/kv_write.cpp.jinja"

    @property
    def interleaved(self) -> str:
        """Whether rotary embedding turns neighbouring pairs of a vector, as C++: "true" or "false"."""
        return _interleaved(self.step)


@dataclass(frozen=True)
class ChooseKeysParams(CacheParams[ChooseKeys]):
    """Work items are (token, segment of its context); then tokens."""

    template: ClassVar[str] = "cpp/attention/choose_keys.cpp.jinja"

    @property
    def headers(self) -> tuple[str, ...]:
        return ("choose.h", *super().headers)

    @property
    def left_out(self) -> str:
        """The value that marks a key as not to be read."""
        return f"{LEFT_OUT}f"

    @property
    def scratch_bytes(self) -> int:
        """Bytes of the queries in the form that meets keys, of one chunk's keys as floats, and of a row of scores in
        which the limit is found."""
        kv = self.step.kv
        return round_up(4 * (self.step.heads * kv.key_dim + 16 * (kv.key_dim + 1) + self.step.width) + 128, 64)


@dataclass(frozen=True)
class AttentionMicroParams:
    """A micro-kernel of `mr` query rows by `nv` sixteen-lane vectors: keys for qk, value columns for pv, whose last
    vector has `last` columns. `integer`: for integer codes of any size."""

    kind: str  # "qk" or "pv"
    mr: int
    nv: int
    last: int = 16
    integer: bool = False

    @property
    def name(self) -> str:
        """The C++ function's name, which spells the fields: qk_i8_m2_v4, with `_l<last>` if the last vector is
        short."""
        kind = f"{self.kind}_i8" if self.integer else self.kind
        return f"{kind}_m{self.mr}_v{self.nv}" + (f"_l{self.last}" if self.last < 16 else "")

    @property
    def template(self) -> str:
        """The template of the product of `kind`, relative to codegen_templates."""
        return f"cpp/attention/micro_{self.kind}.cpp.jinja"


@dataclass(frozen=True)
class AttentionParams(CacheParams[Attention]):
    """Work items are tiles of tokens of one sequence and KV head."""

    template: ClassVar[str] = "cpp/attention/attention.cpp.jinja"

    @property
    def headers(self) -> tuple[str, ...]:
        return (*(("evict.h",) if self.step.evicts else ()), *super().headers)

    @property
    def interleaved(self) -> str:
        """Whether rotary embedding turns neighbouring pairs of a vector, as C++: "true" or "false"."""
        return _interleaved(self.step)

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.step.group

    @property
    def tile(self) -> int:
        """Tokens of one work item: at least sixteen query rows, in whole blocks of the widest micro-kernel (with many
        heads the rest of a block is a small part); more if the values of each chunk are copied first."""
        fewest = -(-(64 if self.step.kv.shared else 16) // self.group)
        most = self.row_blocks[0] if self.group <= 16 else 4
        return next(t for t in range(fewest, fewest + most) if t * self.group % most == 0)

    @property
    def row_blocks(self) -> tuple[int, ...]:
        """Query rows of the micro-kernels, most first."""
        return tuple(rows for rows in (6, 4, 3, 2, 1) if rows <= self.isa.attention_rows)

    @property
    def scale_text(self) -> str:
        """The factor of the scores, as a C++ float."""
        return f"{float(self.step.scale)!r}f"

    @property
    def softcap_text(self) -> str:
        """The bound c of c tanh(x / c) for the scores, as a C++ float; 0 for none."""
        return f"{float(self.step.softcap)!r}f"

    def _vectors(self, rows: int) -> int:
        """Vectors per row that the registers can hold if `rows` rows are computed at once."""
        most = self.isa.attention_vectors
        return most if rows >= 4 else min(4, most * 4 // rows)

    def qk(self, rows: int) -> AttentionMicroParams:
        """The score kernel for `rows` rows."""
        return AttentionMicroParams("qk", rows, self._vectors(rows), integer=self.integer)

    def pv(self, rows: int) -> tuple[tuple[int, AttentionMicroParams], ...]:
        """(first column, kernel) of each part that the value columns are divided into."""
        total, pieces, done = round_up(self.step.kv.value_dim, 16) // 16, [], 0
        while done < total:
            take = next(n for n in (4, 2, 1) if n <= min(total - done, self._vectors(rows)))
            last = self.step.kv.value_dim - 16 * (total - 1) if done + take == total else 16
            pieces.append((16 * done, AttentionMicroParams("pv", rows, take, last, self.integer)))
            done += take
        return tuple(pieces)

    def micros(self) -> tuple[AttentionMicroParams, ...]:
        """Every micro-kernel that this kernel calls."""
        found = [m for rows in self.row_blocks for m in (self.qk(rows), *(piece for _, piece in self.pv(rows)))]
        return tuple(dict.fromkeys(found))

    @property
    def shared_bytes(self) -> int:
        return PARTIAL_BYTES

    @property
    def partials(self) -> tuple[int, int]:
        """KV heads, and bytes of the partial outputs of one tile and segment."""
        return self.step.kv.kv_heads, 4 * self.tile * self.group * (round_up(self.step.kv.value_dim, 16) + 2)

    @property
    def scratch_bytes(self) -> int:
        """Bytes of AttentionTile::Work and the row states (checked by the C++ side)."""
        rows, width = self.tile * self.group, round_up(self.step.kv.value_dim, 16)
        per_row = self.step.kv.key_dim + 1 + KEYS + KEYS // 2 + width + 20  # the half: 16-bit weights of an int8 cache
        per_row += 2 * sum(rows is not None for rows in (self.step.row_bias, self.step.key_bias))  # a pointer each
        copied = KEYS * (self.step.kv.key_dim + self.step.kv.value_dim + 2)
        return round_up(4 * (rows * (per_row + width + 2) + copied) + 256, 64)
