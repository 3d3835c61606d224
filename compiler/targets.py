"""The targets that icc can compile for, and the figures that a roofline needs."""

from __future__ import annotations

from dataclasses import dataclass

from ..runtime import extensions
from ..runtime.format.roofline import Roofline
from .errors import ExtensionError, UsageError

GROUP = "icc.targets"  # entry points of other packages
AUTO = "auto"  # the target of this machine
FLOAT8_LEVEL = 89  # the least compute capability with instructions for e4m3
SCALED_LEVEL = 100  # that of GPUs whose matrix units scale blocks of 32 (sm_12x has other instructions for it)
_LEVELS = {"x86-64": "AVX2, AVX-VNNI, AVX-512, AVX-512-VNNI and AMX", "arm64": "NEON with dot products, and with i8mm"}


@dataclass(frozen=True)
class Target:
    """One machine. Bandwidth in GB/s, dense peaks in TFLOP/s and TOP/s, peak_i8 also for 8-bit floats if there are
    instructions for them; on GPUs, per multiprocessor: the shared memory that one thread block may take, and the most
    resident warps. is_here: whether it is this machine, so that steps can be timed. memory_gib: a GPU's memory, as its
    driver reports it. link: GB/s that a GPU sends to others, as its maker states it (half of the sum of both
    directions); for CPUs the rate at which two ranks add up 32 MB in shared memory (benchmarks/rank_sums.py).
    sees_others: whether its kernels can read, write and use atomics in the memory of others, as over NVLink and
    Infinity Fabric, so that ranks need no communicator.
    """

    name: str
    backend: str  # "cpu", "cuda" or "hip"
    arch: str
    bandwidth: float
    peak_f16: float
    peak_i8: float
    shared_memory_kib: int = 0
    multiprocessors: int = 0
    max_warps: int = 0
    is_here: bool = False
    memory_gib: float = 0.0
    link: float = 0.0
    sees_others: bool = False

    @property
    def summary(self) -> str:
        """The help text of the target."""
        if self.backend == "cpu":
            levels = "this machine's instructions only" if self.is_here else f"{_LEVELS[self.arch]} in one engine"
            return f"{self.arch} CPUs: {levels}"
        maker = "AMD" if self.backend == "hip" else "NVIDIA"
        return f"{maker} GPU, {self.arch}, {self.bandwidth:g} GB/s, {self.peak_f16:g} TFLOP/s in half precision"

    def roofline(self, eight: bool = False, share: float = 1.0, memory: float = 1.0) -> Roofline:
        """The roofline of its memory and its arithmetic, in half precision or in 8 bits. share, memory: the shares of
        the peak rate and of the bandwidth that are reached."""
        return Roofline(self.bandwidth * (1e9 * memory), (self.peak_i8 if eight else self.peak_f16) * 1e12 * share)

    @property
    def level(self) -> int:
        """The compute capability whose matrix instructions it has, 90 for sm_90; 0 for targets other than CUDA.

        sm_120 and sm_121 multiply like sm_89, by warps: they have neither tensor memory nor instructions of a warp
        group.
        """
        if self.backend != "cuda":
            return 0
        number = int(self.arch.removeprefix("sm_"))
        return FLOAT8_LEVEL if number >= 120 else number

    @property
    def capability(self) -> tuple[int, int]:
        """Major and minor, as drivers report them; (9, 4) for gfx942, (0, 0) for CPUs."""
        if self.backend == "hip":
            return int(self.arch[3:-2]), int(self.arch[-2])
        return divmod(int(self.arch[3:]), 10) if self.backend == "cuda" else (0, 0)

    @property
    def float8(self) -> bool:
        """Whether matrix units multiply 8-bit floats (e4m3) directly."""
        return self.level >= FLOAT8_LEVEL

    @property
    def warp_size(self) -> int:
        """Threads per warp (wavefront)."""
        return 64 if self.backend == "hip" and not self.rdna else 32

    @property
    def dependent_launch(self) -> bool:
        """Whether a kernel may begin before its predecessor has ended, and wait for it itself."""
        return self.backend == "cuda" and int(self.arch.removeprefix("sm_")) >= 90

    @property
    def registers(self) -> int:
        """32-bit registers of a multiprocessor."""
        if self.backend == "hip":
            return 98304 if self.rdna else 131072
        return 65536

    @property
    def rdna(self) -> bool:
        """Whether it is one of AMD's Radeon GPUs: warps of 32 threads, and WMMA in place of MFMA."""
        return self.backend == "hip" and not self.arch.startswith("gfx9")

    @property
    def fragment_registers(self) -> int:
        """32-bit registers per thread of an operand of WMMA, 16 x 16 values of 16 bits: on gfx11 both halves of a warp
        hold all of it."""
        return 8 if self.arch.startswith("gfx11") else 4

    @property
    def subnormals(self) -> bool:
        """Whether matrix units keep f16 numbers below 2^-14, as those of NVIDIA and MI300 do; RDNA's were not tried."""
        return not self.rdna

    @property
    def reserved_shared(self) -> int:
        """Bytes of shared memory that the driver takes per thread block."""
        return 1024 if self.backend == "cuda" else 0


# The figures of CPU targets are those of a machine with this many cores and AVX-512 VNNI: a CPU engine's roofline is
# relative to them. Those of arm64 are computed, for Neoverse V1 at 2.6 GHz with four pipes of 128 bits; its bandwidth
# is that of `cpu`.
CPU_CORES = 2
# Bandwidths and dense peaks are from the makers' sheets (NVIDIA's data sheets and architecture white papers, AMD's
# product pages; AMD's compute units and shared memory from ROCm's "AMD GPU specifications"). For rtx3090, rtxpro6000
# and gb10, multiprocessors and bandwidths are those that reviews and Hot Chips' report of GB10 repeat, and matrix rates
# follow from them. Those of rtx4060ti and thor were not looked up (thor's name and multiprocessors are as a user's
# device reports).
_TABLE = (
    Target("cpu", "cpu", "x86-64", 22.0, 0.3, 1.2, link=3.8),
    Target("arm64", "cpu", "arm64", 22.0, 0.16, 0.66, link=3.8),
    Target("native", "cpu", "x86-64", 22.0, 0.3, 1.2, is_here=True, link=3.8),
    Target("a100", "cuda", "sm_80", 2039.0, 312.0, 624.0, 163, 108, 64, memory_gib=80.0, link=300.0, sees_others=True),
    Target("a10g", "cuda", "sm_86", 600.0, 70.0, 140.0, 99, 80, 48, memory_gib=22.5, link=32.0),
    Target("rtx4090", "cuda", "sm_89", 1008.0, 165.0, 330.0, 99, 128, 48, memory_gib=24.0, link=32.0),
    # for GeForce cards with sums in float32, at which they have half of the rate
    Target("rtx3090", "cuda", "sm_86", 936.0, 71.0, 284.0, 99, 82, 48, memory_gib=24.0, link=32.0),
    Target("rtx4060ti", "cuda", "sm_89", 288.0, 44.0, 88.0, 99, 34, 48, memory_gib=16.0, link=16.0),
    Target("rtx5090", "cuda", "sm_120", 1792.0, 209.5, 419.0, 99, 170, 48, memory_gib=31.8, link=64.0),
    Target("rtxpro6000", "cuda", "sm_120", 1792.0, 503.8, 1007.6, 99, 188, 48, memory_gib=95.6, link=64.0),
    Target("gb10", "cuda", "sm_121", 273.0, 125.0, 250.0, 99, 48, 48, memory_gib=119.0, link=25.0),
    Target("thor", "cuda", "sm_110", 273.0, 258.0, 517.0, 227, 20, 48, memory_gib=122.0, link=12.5),
    Target("l4", "cuda", "sm_89", 300.0, 121.0, 242.0, 99, 58, 48, memory_gib=22.5, link=32.0),
    Target("l40s", "cuda", "sm_89", 864.0, 362.0, 733.0, 99, 142, 48, memory_gib=45.0, link=32.0),
    Target("h100", "cuda", "sm_90", 3350.0, 989.0, 1979.0, 227, 132, 64, memory_gib=79.6, link=450.0, sees_others=True),
    Target(
        "h200", "cuda", "sm_90", 4800.0, 989.0, 1979.0, 227, 132, 64, memory_gib=140.4, link=450.0, sees_others=True
    ),
    Target(
        "b200", "cuda", "sm_100", 8000.0, 2250.0, 4500.0, 227, 148, 64, memory_gib=179.1, link=900.0, sees_others=True
    ),
    # the 8-bit rate is that of FP8: INT8 is far slower
    Target(
        "b300", "cuda", "sm_103", 8000.0, 2250.0, 4500.0, 227, 148, 64, memory_gib=268.0, link=900.0, sees_others=True
    ),
    Target(
        "mi300x", "hip", "gfx942", 5300.0, 1307.0, 2615.0, 64, 304, 32, memory_gib=192.0, link=448.0, sees_others=True
    ),
    Target(
        "mi325x", "hip", "gfx942", 6000.0, 1307.0, 2615.0, 64, 304, 32, memory_gib=256.0, link=448.0, sees_others=True
    ),
    Target(
        "mi355x", "hip", "gfx950", 8000.0, 2517.0, 5033.0, 160, 256, 32, memory_gib=288.0, link=537.0, sees_others=True
    ),
    Target("rx7900xtx", "hip", "gfx1100", 960.0, 122.8, 122.8, 64, 96, 32, memory_gib=24.0, link=32.0),
    Target("rx9070xt", "hip", "gfx1201", 640.0, 194.6, 389.3, 64, 64, 32, memory_gib=16.0, link=64.0),
)
TARGETS = {target.name: target for target in _TABLE}


def find_target(name: str) -> Target:
    """The target of that name, or of this machine; UsageError if there is none, ExtensionError if a package's entry is
    not a Target."""
    if name == AUTO:
        return this_machine()
    if name in TARGETS:
        return TARGETS[name]
    found = extensions.load(GROUP, name)
    if found is None:
        known = sorted({AUTO, *TARGETS, *extensions.names(GROUP)})
        raise UsageError(f"unknown target {name!r}", f"targets: {', '.join(known)}")
    if not isinstance(found, Target):
        raise ExtensionError(f"{GROUP} {name!r} is not a Target but {found!r}")
    return found


def this_machine() -> Target:
    """The target of the first GPU, or "native" if there is none. UsageError for a GPU without a target; DeviceError if
    a driver has found one that cannot be used."""
    from ..runtime.this_gpu import gpu_here, target_named

    device = gpu_here()
    if device is None:
        return TARGETS["native"]
    alike = [t for t in _TABLE if t.backend == device.backend and t.capability == device.capability]
    if named := target_named(device.name, [target.name for target in alike]):
        return TARGETS[named]
    names = ", ".join(target.name for target in alike)
    prefix, (major, minor) = "gfx" if device.backend == "hip" else "sm_", device.capability
    raise UsageError(
        f"--target {AUTO}: this machine's GPU is {device.name} ({prefix}{major}{minor}), which no target is of",
        f"a target of its architecture may run on it: {names}" if names else "there is none of its architecture",
    )


def explained() -> dict[str, str]:
    """The targets and their help texts, with those of other packages."""
    others = {name: "of another package" for name in extensions.names(GROUP)}
    here = {AUTO: "what this machine has: its GPU, else native"}
    return {**here, **{name: target.summary for name, target in TARGETS.items()}, **others}
