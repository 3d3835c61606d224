"""The ISA levels of the CPU backend, best first: compiler flags, required CPU flags and register blocking."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from ....runtime.format.isa import TILES, can_run, cpu_flags
from ....runtime.system import LINUX, MACOS, SYSTEMS
from ...errors import UsageError


class Block(NamedTuple):
    """A micro-kernel of a product: activation rows, weight tiles (each a stream of its own), and how many bytes ahead
    it prefetches in each stream; None: `prefetch` chooses by the number of streams. matrix: it multiplies with
    instructions whose operands are matrices of bytes (see kernels/matrix.py and amx.py)."""

    rows: int
    tiles: int
    ahead: int | None = None
    matrix: bool = False

    @property
    def prefetch(self) -> int:
        """Bytes to prefetch ahead. Four streams with little arithmetic keep the hardware prefetchers busy, so a short
        distance is best; fewer streams with more arithmetic between lines need a long one (measured on Zen 4)."""
        return self.ahead if self.ahead is not None else 256 if self.tiles >= 4 else 2048

    @property
    def name(self) -> str:
        """The name of the block's kernels in the source and in the tuner."""
        return f"m{self.rows}_n{self.tiles}" + ("" if self.ahead is None else f"_p{self.ahead}")


@dataclass(frozen=True)
class Isa:
    """One ISA level. Its blocks are sorted by rows. A block of m rows x n tiles needs m * n accumulators of sixteen
    lanes; what does not fit the registers (32 zmm, or 16 ymm of half the size) is spilled, which four streams of
    weights can be worth with few rows. The blocks of all levels were timed on Zen 4; `--tune` finds them for another
    machine."""

    name: str
    flags: tuple[str, ...]
    cpu_flags: tuple[str, ...]
    dense_blocks: tuple[Block, ...]
    quant_blocks: tuple[Block, ...]
    attention_vectors: int  # sixteen-lane columns per four rows or more in the attention micro-kernels
    attention_rows: int = 4  # query rows of the largest of them
    short_sums: bool = False  # products of bytes are summed as `Reader.without_quads` says: no instruction sums four
    pair_blocks: tuple[Block, ...] = ()  # for products of bytes that are multiplied in pairs of 16 bits
    nibble_blocks: tuple[Block, ...] = ()  # for products of 4-bit codes if short_sums
    matrix_rows: tuple[int, ...] = ()  # for products of bytes, if an instruction multiplies matrices of bytes
    float_sums: int = 4  # blocks of at most this many accumulators keep their float sums in registers, too
    tile_blocks: tuple[Block, ...] = ()  # for products of bytes by tiles of sixteen rows, if they cost less
    # (a header of codegen_templates/cpp, the level's own header that replaces it and may include it)
    headers: tuple[tuple[str, str], ...] = ()
    by_element: bool = False  # products of bytes can multiply every lane by the same four bytes of a vector, any four
    machine: str = "x86-64"
    system: str = LINUX

    @property
    def stem(self) -> str:
        """The name of its files, without their suffix."""
        return self.name if self.system == LINUX else f"{self.name}-{self.system}"

    @property
    def needs_zig(self) -> bool:
        """Whether only zig's clang can make the level's libraries here."""
        return self.machine != "x86-64" or self.system != LINUX

    def on(self, system: str) -> Isa:
        """The level for libraries of another operating system."""
        if system == LINUX:
            return self
        return replace(self, system=system, headers=(*self.headers, ("system_linux.h", f"system_{system}.h")))


def _blocks(*pairs: tuple[int, int]) -> tuple[Block, ...]:
    return tuple(Block(rows, tiles) for rows, tiles in pairs)


_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")

AVX512VNNI = Isa(
    "avx512vnni",
    (*_AVX512, "-mavx512vnni"),
    ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni"),
    _blocks((1, 4), (2, 4), (4, 4), (6, 4), (8, 2), (12, 2)),
    _blocks((1, 4), (2, 4), (3, 4), (4, 4), (5, 4), (6, 4), (8, 2), (10, 1), (12, 1), (14, 1), (16, 1)),
    4,
    float_sums=16,
)
# Xeons since Sapphire Rapids. Two tiles of weights times one or two of sixteen rows: eight tiles in all.
AMX = replace(
    AVX512VNNI,
    name="amx",
    flags=(*AVX512VNNI.flags, "-mamx-tile", "-mamx-int8"),
    cpu_flags=(*AVX512VNNI.cpu_flags, TILES, "amx_int8"),
    quant_blocks=AVX512VNNI.quant_blocks[:-1],
    tile_blocks=tuple(Block(rows, 2, matrix=True) for rows in (16, 32)),
    headers=(("panels.h", "panels_amx.h"),),
)
AVX512 = Isa(
    "avx512",
    _AVX512,
    ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512dq"),
    _blocks((1, 4), (2, 4), (4, 4), (6, 4), (8, 2), (12, 2)),
    _blocks((1, 4), (2, 4), (3, 4), (4, 4), (6, 2), (8, 2)),
    4,
)
# Intel's client CPUs since Alder Lake, without AVX-512. The blocks have the fewest instructions per product, with their
# accumulators in 16 registers; nobody has timed them yet.
AVXVNNI = Isa(
    "avxvnni",
    (*_AVX2, "-mavxvnni"),
    ("avx2", "fma", "f16c", "avx_vnni"),
    _blocks((1, 4), (2, 2), (4, 1), (6, 1)),
    _blocks((1, 4), (2, 2), (3, 2), (4, 1), (6, 1)),
    1,
    attention_rows=6,
    headers=(("dots_avx2.h", "dots_avxvnni.h"), ("dot_pairs_avx2.h", "dot_pairs_avxvnni.h")),
)
AVX2 = Isa(
    "avx2",
    _AVX2,
    ("avx2", "fma", "f16c"),
    _blocks((1, 4), (2, 2), (4, 1), (6, 1)),
    _blocks((1, 4), (2, 4), (3, 2), (4, 2), (6, 2), (8, 1)),
    1,
    attention_rows=6,
    short_sums=True,
    pair_blocks=_blocks((1, 4), (2, 2), (3, 1), (4, 1), (6, 1)),
    nibble_blocks=_blocks((1, 4), (2, 4), (3, 4), (4, 4), (6, 4), (8, 4)),
)

# NEON of arm64, where a vector of sixteen lanes takes four of 32 registers; blocks as for AVX-VNNI. Graviton 3,
# Ampere's later CPUs and Apple's M2 and newer have `i8mm`; Graviton 2, Raspberry Pi 5 and Apple's M1 have only
# `dotprod`. With i8mm many rows are multiplied by smmla: 12 rows x 8 of a tile's 16 take 24 registers for sums, 4 for
# codes.
_NEON = (
    ("immintrin.h", "neon.h"),
    *((f"{part}_avx2.h", f"{part}_neon.h") for part in ("nibbles", "dots", "dot_pairs")),
)
DOTPROD = Isa(
    "dotprod",
    ("v8_2a", "dotprod"),
    ("asimddp", "atomics"),
    _blocks((1, 4), (2, 2), (4, 1), (6, 1)),
    _blocks((1, 2), (2, 2), (3, 1), (4, 1), (6, 1)),
    1,
    headers=_NEON,
    by_element=True,
    machine="arm64",
)
I8MM = replace(
    DOTPROD,
    name="i8mm",
    flags=(*DOTPROD.flags, "i8mm"),
    cpu_flags=(*DOTPROD.cpu_flags, "i8mm"),
    matrix_rows=(4, 6, 8, 12, 16, 24),
)

ALL = (AMX, AVX512VNNI, AVX512, AVXVNNI, AVX2)
LEVELS = {"x86-64": ALL, "arm64": (I8MM, DOTPROD)}  # by machine, best first
# Macs have either architecture; macOS reports no VNNI on the last Intel Macs.
MAC_LEVELS = (AVX512, AVX2, I8MM, DOTPROD)


def find_isas(arch: str, asked: str | None, systems: str | None = None) -> tuple[Isa, ...]:
    """The levels of an architecture, or those that --isa names: levels, or machines for all of their levels, separated
    by commas. Each is returned once per system in `systems`, the text of --os, separated by commas (None: Linux). For
    Macs both architectures are meant unless --isa says otherwise. The best level of a machine comes first. UsageError
    for an unknown name."""
    wanted = {name.strip() for name in (systems or LINUX).split(",")}
    if unknown := sorted(wanted - {*SYSTEMS}):
        raise UsageError(f"--os {systems}: {unknown[0]!r} is unknown", f"choose from: {', '.join(SYSTEMS)}")
    levels = LEVELS[arch] if asked is None else _named(asked)
    others = tuple(isa for isa in levels if TILES not in isa.cpu_flags)  # only Linux can be asked to allow tiles
    if not others and wanted != {LINUX}:
        raise UsageError(f"--isa {asked}: on Linux alone", "name another level, or leave --os out")
    macs = MAC_LEVELS if asked is None and arch == "x86-64" else others
    of_system = {LINUX: levels, MACOS: macs}
    return tuple(isa.on(name) for name in SYSTEMS if name in wanted for isa in of_system.get(name, others))


def _named(asked: str) -> tuple[Isa, ...]:
    names, found = {name.strip() for name in asked.split(",")}, list[Isa]()
    for machine, levels in LEVELS.items():
        found += [isa for isa in levels if {machine, isa.name} & names]
    if unknown := sorted(names - {isa.name for isa in found} - {isa.machine for isa in found}):
        known = [*LEVELS, *(isa.name for levels in LEVELS.values() for isa in levels)]
        raise UsageError(f"--isa {asked}: {unknown[0]!r} is unknown", f"choose from: {', '.join(known)}")
    return tuple(found)


def host_isas() -> tuple[Isa, ...]:
    """The levels that this machine can run, best first."""
    flags = cpu_flags()
    return tuple(isa for levels in LEVELS.values() for isa in levels if can_run(isa.cpu_flags, flags))
