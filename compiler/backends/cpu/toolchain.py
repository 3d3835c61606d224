"""How the C++ compiler of the CPU back end is called: g++, or the clang of PyPI's package `ziglang`."""

from __future__ import annotations

from ..cxx import find_compiler, find_zig
from ..render import TEMPLATES
from .isa import Isa

# -ffp-contract=off: a compiler that fuses a*b+c here and not there would make a row's bits depend on its batch.
COMMON_FLAGS = (
    "-std=c++17", "-O3", "-fPIC", "-shared", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math",
    "-fno-exceptions", "-fno-rtti", "-fvisibility=hidden", "-fno-ident", "-w", "-pthread",
)  # fmt: skip
# For tests, and so that they build fast: checks are calls instead of inline code, and without those of pointers that
# AddressSanitizer makes again when the pointer is used.
SANITIZER_FLAGS = (
    "-fno-sanitize-recover=all", "--param=asan-instrumentation-with-call-threshold=0",
    "-fno-sanitize=null,object-size,pointer-overflow", "-fno-sanitize-address-use-after-scope", "-g1",
    "-fno-omit-frame-pointer",
)  # fmt: skip
LINK_FLAGS = ("-static-libstdc++", "-static-libgcc", "-Wl,--build-id=none", "-Wl,-s", "-Wl,--as-needed")
# An old glibc, whose headers promise no function that a machine of today might lack.
ZIG_TARGETS = {"x86-64": "x86_64-linux-gnu.2.17", "arm64": "aarch64-linux-gnu.2.17"}
ZIG_CPUS = {"x86-64": "x86_64", "arm64": "generic"}
ZIG_FLAGS = ("-fno-sanitize=all", "-fno-stack-protector")  # what zig adds on its own when it does not optimize most
# What a library may take from the process that loads it; zig's link leaves it open: libc's, and libm's expf.
IMPORTS = frozenset(
    "aligned_alloc calloc expf free madvise malloc memcpy memmove memset pthread_create pthread_join sched_yield"
    " syscall".split()
)


def compile_commands(isa: Isa, source: str, output: str, sanitize: str | None, optimize: str) -> list[list[str]]:
    """The calls that make the library `output`, in order, with paths relative to the directory they run in. Files
    that they leave beside it end in `.o`.

    zig links without any library: its own libc and libc++ would be built for a minute first, and kernels need neither.
    """
    compiler = find_compiler() if isa.machine == "x86-64" else find_zig()
    if len(compiler) > 1:  # the package
        target = ("-target", ZIG_TARGETS[isa.machine])
        machine = f"-mcpu={ZIG_CPUS[isa.machine]}" + "".join(f"+{_feature(flag)}" for flag in isa.flags)
        object_file = f"{isa.name}.o"
        common = [flag for flag in COMMON_FLAGS if flag != "-shared"]
        flags = [*target, machine, *common, optimize, *ZIG_FLAGS, "-include", str(TEMPLATES / "cpp/clang.h")]
        return [
            [*compiler, "c++", "-c", *flags, source, "-o", object_file],
            [*compiler, "cc", *target, "-nostdlib", "-shared", "-s", object_file, "-o", output],
        ]
    cmd = [*compiler, *COMMON_FLAGS, optimize, *isa.flags, f"-frandom-seed={isa.name}"]
    if sanitize:
        return [[*cmd, f"-fsanitize={sanitize}", *SANITIZER_FLAGS, source, "-o", output]]
    return [[*cmd, "-ffile-prefix-map=./=", *LINK_FLAGS, source, "-o", output]]


def _feature(flag: str) -> str:
    """What zig calls the feature that a flag of g++ turns on."""
    return flag.removeprefix("-m").replace("-", "_")
