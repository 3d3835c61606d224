"""The features of a CPU on macOS and Windows, under Linux's names for them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import POINTER, c_size_t, c_uint32, c_void_p
from typing import Any

from ..errors import IccError
from ..system import mac_number

# By machine, sysctl's names (XNU, bsd/kern/kern_mib.c). All of Apple's own CPUs have atomics and dot products, which
# the first macOS for them did not report.
_SYSCTL = {
    "x86-64": {
        "avx2": "avx2_0",
        **{name: name for name in ("fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512dq")},
    },
    "arm64": {"i8mm": "arm.FEAT_I8MM"},
}
_APPLE = frozenset({"atomics", "asimddp"})
# arm64: the numbers of IsProcessorFeaturePresent (winnt.h).
_WINDOWS = {"atomics": 34, "asimddp": 43, "i8mm": 66}
# x86-64: leaf and part of what cpuid says (its four registers as one number), and bits, from Intel's manual, volume 2A.
_OSXSAVE, _FMA, _F16C = (64 + bit for bit in (27, 12, 29))  # leaf 1: ecx
_LEAF7 = {
    "avx2": 32 + 5, "avx512f": 32 + 16, "avx512dq": 32 + 17, "avx512bw": 32 + 30, "avx512vl": 32 + 31,
    "avx512_vnni": 64 + 11,
}  # fmt: skip
_AVX_STATE, _AVX512_STATE = 0x6, 0xE6  # bits of XCR0: the registers that the system saves
# void cpuid(uint32_t out[4], uint32_t leaf, uint32_t subleaf), and uint32_t xgetbv(), as Windows calls functions.
CPUID = bytes.fromhex("53 4989C9 89D0 4489C1 0FA2 418901 41895904 41894908 4189510C 5B C3")
XGETBV = bytes.fromhex("31C9 0F01D0 C3")

Cpuid = Callable[[int, int], int]


def macos_flags(machine: str, sysctl: Callable[[str], int] | None = None) -> frozenset[str]:
    """The features of a Mac's CPU. sysctl: gives the number of a name in hw.optional, 0 if there is none; None: ask
    this Mac."""
    read = sysctl or mac_number
    found = {flag for flag, name in _SYSCTL.get(machine, {}).items() if read(f"hw.optional.{name}")}
    return frozenset(found) | (_APPLE if machine == "arm64" else frozenset())


def windows_flags(machine: str) -> frozenset[str]:
    """The features of this CPU: on arm64 as Windows reports them; on x86-64 from cpuid, because Windows reports few
    features."""
    if machine == "arm64":
        has = _kernel32().IsProcessorFeaturePresent
        return frozenset(flag for flag, number in _WINDOWS.items() if has(number))
    return x86_flags(*machine_code()) if machine == "x86-64" else frozenset()


def x86_flags(cpuid: Cpuid, xgetbv: Callable[[], int]) -> frozenset[str]:
    """The features whose registers the system saves when it switches threads. cpuid: gives the four registers for a
    leaf and subleaf as one number, with eax in the lowest 32 bits."""
    most, one = cpuid(0, 0) & 0xFFFFFFFF, cpuid(1, 0)
    saved = xgetbv() if one >> _OSXSAVE & 1 else 0
    if most < 7 or saved & _AVX_STATE != _AVX_STATE:
        return frozenset()
    seven = cpuid(7, 0)
    found = {flag for flag, bit in _LEAF7.items() if seven >> bit & 1}
    found |= {flag for flag, bit in (("fma", _FMA), ("f16c", _F16C)) if one >> bit & 1}
    if seven & 0xFFFFFFFF and cpuid(7, 1) >> 4 & 1:
        found.add("avx_vnni")
    if saved & _AVX512_STATE != _AVX512_STATE:
        found -= {flag for flag in found if flag.startswith("avx512")}
    return frozenset(found)


def machine_code() -> tuple[Cpuid, Callable[[], int]]:
    """The instructions cpuid and xgetbv, which Python cannot call, as functions of machine code in memory. IccError if
    the system gives no executable memory."""
    allocate = _kernel32().VirtualAlloc
    allocate.restype, allocate.argtypes = c_void_p, (c_void_p, c_size_t, c_uint32, c_uint32)
    place = allocate(None, 4096, 0x3000, 0x40)  # MEM_COMMIT | MEM_RESERVE, PAGE_EXECUTE_READWRITE
    if not place:
        raise IccError("Windows gives no memory for the code that asks the CPU what it is")
    ctypes.memmove(place, CPUID + XGETBV, len(CPUID + XGETBV))
    ask = ctypes.CFUNCTYPE(None, POINTER(c_uint32), c_uint32, c_uint32)(place)

    def cpuid(leaf: int, subleaf: int) -> int:
        registers = (c_uint32 * 4)()
        ask(registers, leaf, subleaf)
        return int.from_bytes(bytes(registers), "little")

    return cpuid, ctypes.CFUNCTYPE(c_uint32)(place + len(CPUID))


def _kernel32() -> Any:
    return ctypes.windll.kernel32  # type: ignore[attr-defined]
