"""The properties of a target for tilings and estimates of products, and what these share."""

from __future__ import annotations

from dataclasses import dataclass

from .....runtime.format.plan import COUNTERS
from .....runtime.format.roofline import Roofline
from ....targets import Target
from .choice import Config

LATENCY = 0.45e-6  # seconds from a memory request to its data, under load
LAUNCH = 1.0e-6  # seconds that each additional kernel costs
READ = 0.85  # share of the bandwidth that other kernels reach
INLINE = 1  # most rows that every program of a product of few rows quantizes to 8 bits itself
MERGED_ROWS = 64  # most rows of a tile whose splits the last program adds up


def whole_groups(level: int, n: int, warps: int) -> bool:
    """Whether matrix units run in parallel with the warps that unpack n columns: from sm_90 on, in tiles that give each
    warp its own columns; on sm_100 four warps unpack all columns."""
    if level >= 100:
        return n == 128 and warps == 4
    return level >= 90 and n >= 64 and warps % 4 == 0 and n >= 16 * warps


def merges(m: int, splits: int, tiles: int) -> bool:
    """Whether the program of a split tile that ends last adds up all sums, instead of a separate kernel: for tiles of
    few rows, which one program reads in less time than a launch takes. tiles: the number of output tiles; each has a
    counter, and all together one more."""
    return splits > 1 and m <= MERGED_ROWS and tiles < COUNTERS


def sums_of_steps(level: int) -> bool:
    """Whether products of 8-bit floats are added up step by step in float32: the matrix units of sm_89 and sm_90 keep
    13 bits of their sums (Zhang et al. 2024, SageAttention2; DeepSeek-V3's report, section 3.3.2)."""
    return level < 100


@dataclass(frozen=True)
class LinearTiling:
    """Blocks of m rows and n columns; k: one slice or step of K; splits: programs that share one tile's K.

    decode: whether the kernel for few rows runs, in which every warp takes its own slices of K. unpacked: whether codes
    are first unpacked to a 16-bit matrix in scratch, which the kernel for dense weights then reads. eight: whether rows
    are quantized to 8 bits in a product that uses 16 bits for few rows (see ProductFacts.many); if also unpacked, the
    matrix has 8-bit floats.
    """

    decode: int
    m: int
    n: int
    k: int
    warps: int
    stages: int
    splits: int = 1
    unpacked: int = 0
    eight: int = 0

    @staticmethod
    def of(config: Config) -> LinearTiling:
        """The tiling whose fields the tuner picked, by name."""
        return LinearTiling(**config)

    def merges(self, tiles: int) -> bool:
        """Whether the last program of a tile adds up the others' sums, see the function `merges`. tiles: the number of
        output tiles."""
        return merges(self.m, self.splits, tiles)


@dataclass(frozen=True)
class Machine:
    """A target's properties for the estimates."""

    target: Target

    @property
    def hip(self) -> bool:
        """Whether the GPU is AMD's."""
        return self.target.backend == "hip"

    @property
    def level(self) -> int:
        """Compute capability, 0 for HIP."""
        return self.target.level

    @property
    def read(self) -> Roofline:
        """The roofline of kernels that do not load ahead."""
        return self.target.roofline(memory=READ)
