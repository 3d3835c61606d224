"""How the C++ compiler of the CPU back end is called: g++, or the clang of PyPI's package `ziglang`."""

from __future__ import annotations

import struct
from pathlib import Path

from ....runtime.system import LINUX, MACOS, WINDOWS
from ..cxx import find_compiler, find_zig
from ..render import TEMPLATES
from .isa import Isa

# -ffp-contract=off: a compiler that fuses a*b+c here and not there would make a row's bits depend on its batch.
COMMON_FLAGS = (
    "-std=c++17", "-O3", "-fPIC", "-shared", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math",
    "-fno-exceptions", "-fno-rtti", "-fvisibility=hidden", "-fno-ident", "-w", "-pthread",
)  # fmt: skip
# For tests, and to build fast: checks are calls instead of inline code, without the checks of pointers that
# AddressSanitizer repeats when the pointer is used.
SANITIZER_FLAGS = (
    "-fno-sanitize-recover=all", "--param=asan-instrumentation-with-call-threshold=0",
    "-fno-sanitize=null,object-size,pointer-overflow", "-fno-sanitize-address-use-after-scope", "-g1",
    "-fno-omit-frame-pointer",
)  # fmt: skip
LINK_FLAGS = ("-static-libstdc++", "-static-libgcc", "-Wl,--build-id=none", "-Wl,-s", "-Wl,--as-needed")
# By system and machine: an old glibc, so that libraries call no function that a user's machine might lack; and the
# oldest macOS that CPython's installers run on.
ZIG_TARGETS = {
    (LINUX, "x86-64"): "x86_64-linux-gnu.2.17",
    (LINUX, "arm64"): "aarch64-linux-gnu.2.17",
    (MACOS, "x86-64"): "x86_64-macos.10.15",
    (MACOS, "arm64"): "aarch64-macos.11.0",
    (WINDOWS, "x86-64"): "x86_64-windows.win10-gnu",
    (WINDOWS, "arm64"): "aarch64-windows.win10-gnu",
}
ZIG_CPUS = {"x86-64": "x86_64", "arm64": "generic"}
ZIG_FLAGS = ("-fno-sanitize=all", "-fno-stack-protector")  # zig's defaults below its highest optimization
# The libraries that Windows libraries link to and that every process has: the kernel's, and parts of the C runtime.
WINDOWS_LIBRARIES = (
    "-lkernel32", "-lapi-ms-win-core-synch-l1-2-0",
    *(f"-lapi-ms-win-crt-{part}-l1-1-0" for part in ("heap", "math", "private", "string")),
)  # fmt: skip
SUFFIXES = {LINUX: "so", MACOS: "dylib", WINDOWS: "dll"}
# Functions that a library may import from its process: some of libc, expf of libm, and those that the system's header
# calls.
_LIBC = "calloc expf free malloc memcpy memmove memset "
_POSIX = f"{_LIBC} aligned_alloc pthread_create pthread_join sched_yield "
IMPORTS = {
    LINUX: frozenset(f"{_POSIX} madvise syscall".split()),
    MACOS: frozenset(
        f"{_POSIX} bzero __bzero memset_pattern16 pthread_attr_destroy pthread_attr_init pthread_attr_setstacksize"
        " sysconf __ulock_wait __ulock_wake dyld_stub_binder".split()
    ),
    WINDOWS: frozenset(
        f"{_LIBC} _aligned_free _aligned_malloc CloseHandle CreateThread GetActiveProcessorCount GetCurrentProcess"
        " GetProcessAffinityMask SwitchToThread WaitForSingleObject WaitOnAddress WakeByAddressAll".split()
    ),
}


def compile_commands(isa: Isa, source: str, output: str, sanitize: str | None, optimize: str) -> list[list[str]]:
    """The commands that make the library `output`, in order, with paths relative to their working directory. Files that
    they leave beside the library end in `.o`. sanitize: the argument of -fsanitize, None for none.

    zig links only the system's own libraries: it would first build its libc and libc++ for a minute, and kernels need
    neither.
    """
    compiler = find_zig() if isa.needs_zig else find_compiler()
    if len(compiler) > 1:  # the package
        return _zig_commands(compiler, isa, source, output, optimize)
    cmd = [*compiler, *COMMON_FLAGS, optimize, *isa.flags, f"-frandom-seed={isa.name}"]
    if sanitize:
        return [[*cmd, f"-fsanitize={sanitize}", *SANITIZER_FLAGS, source, "-o", output]]
    return [[*cmd, "-ffile-prefix-map=./=", *LINK_FLAGS, source, "-o", output]]


def _feature(flag: str) -> str:
    """zig's name of the feature that a flag of g++ turns on."""
    return flag.removeprefix("-m").replace("-", "_")


def _zig_commands(zig: list[str], isa: Isa, source: str, output: str, optimize: str) -> list[list[str]]:
    target = ("-target", ZIG_TARGETS[isa.system, isa.machine])
    machine = f"-mcpu={ZIG_CPUS[isa.machine]}" + "".join(f"+{_feature(flag)}" for flag in isa.flags)
    object_file = f"{isa.stem}.o"
    common = [flag for flag in COMMON_FLAGS if flag != "-shared"]
    flags = [*target, machine, *common, optimize, *ZIG_FLAGS, "-include", str(TEMPLATES / "cpp/clang.h")]
    link = [*zig, "cc", *target, "-nostdlib", "-shared", "-s", object_file, "-o", output]
    if isa.system == WINDOWS:
        link += WINDOWS_LIBRARIES
    return [[*zig, "c++", "-c", *flags, source, "-o", object_file], link]


def without_time(library: Path) -> None:
    """Clear the link time in the header of a Windows library; zig's linker always writes it."""
    content = bytearray(library.read_bytes())
    header = struct.unpack_from("<I", content, 0x3C)[0]  # "PE\0\0", two numbers of 16 bits, the time
    struct.pack_into("<I", content, header + 8, 0)
    library.write_bytes(content)
