"""Reads from a cubin's ELF sections how it must be launched, and checks that the executor does so.

`.nv.info.<kernel>` is a list of attributes: one byte of format, one of code, two of size, then, in format 4, that many
bytes. The codes are those that cuobjdump prints (EIATTR_*).
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass

from .....runtime.format.plan import HIDDEN_POINTERS
from ...errors import CodegenError, KernelRefused
from ..spec import LaunchSpec
from .sass import SassCode, disassemble

_KPARAM_INFO, _REQNTID, _CBANK_PARAM_SIZE = 0x17, 0x10, 0x19
_SIZED = 4  # the format of attributes whose value follows them
_SHARED = ".nv.shared."
_WAIT = 0x782E  # the low 16 of the 128 bits of ACQBULK without a predicate, on sm_90 and sm_100
# opcodes, the low 9 bits, of instructions that may not precede it: loads and stores of global memory, atomics,
# asynchronous and bulk copies, branches, calls and exits
_TOO_EARLY = frozenset({
    0x180, 0x181, 0x185, 0x186, 0x18A, 0x18B, 0x18C, 0x18D, 0x18E, 0x1A8, 0x1A9, 0x1AE, 0x1B4, 0x1B5, 0x1B6, 0x1BA,
    0x143, 0x144, 0x147, 0x149, 0x14A, 0x14D,
})  # fmt: skip
_GLOBAL = re.compile(r"(?:LD|ST|LDG|STG|LDGSTS|ATOM|ATOMG|RED|REDG|UBLK\w*|UTMA\w*|SU\w+|EXIT)(?:\.|$)")  # too early
_RESERVED_SHARED = 1024  # bytes of a block's shared memory that belong to the driver, from sm_90 on in the section


@dataclass(frozen=True)
class CubinFacts:
    """One kernel: its name, offset and size of each parameter in bytes, threads per block, and the bytes of shared
    memory that it uses in addition to the launch's."""

    entry: str
    parameters: tuple[tuple[int, int], ...]
    threads: int
    static_shared: int


def read_cubin(cubin: bytes) -> CubinFacts:
    """The facts of a cubin that holds one kernel. CodegenError if its parameters do not end at the size that it
    states."""
    sections = dict(_sections(cubin))
    (info,) = (name for name in sections if name.startswith(".nv.info."))
    entry = info.removeprefix(".nv.info.")
    parameters: dict[int, tuple[int, int]] = {}
    threads = total = 0
    for code, value in _attributes(sections[info][1]):
        if code == _KPARAM_INFO:
            _, ordinal, offset, bits = struct.unpack("<IHHI", value)
            parameters[ordinal] = offset, bits >> 18
        elif code == _REQNTID:
            x, y, z = struct.unpack("<III", value)
            threads = x * y * z
        elif code == _CBANK_PARAM_SIZE:
            (total,) = struct.unpack("<H", value)
    found = tuple(parameters[i] for i in range(len(parameters)))
    if sum(found[-1]) != total:
        raise CodegenError(f"cubin of {entry}: its parameters end at byte {sum(found[-1])}, it says {total}")
    size = sections[_SHARED + entry][0] if _SHARED + entry in sections else 0
    return CubinFacts(entry, found, threads, max(size - _RESERVED_SHARED, 0))


def waits_first(cubin: bytes) -> bool:
    """Whether a kernel waits for the one before it in all programs, before it touches global memory or ends.

    Most kernels wait before their first branch; those that allocate tensor memory do so first.
    """
    return _waits_at_once(cubin) or SassCode(disassemble(cubin)).always_behind("ACQBULK", _GLOBAL)


def _waits_at_once(cubin: bytes) -> bool:
    (name,) = (name for name, _ in _sections(cubin) if name.startswith(".text."))
    code = dict(_sections(cubin))[name][1]
    for at in range(0, len(code), 16):
        (word,) = struct.unpack_from("<H", code, at)
        if word == _WAIT:
            return True
        if word & 0x1FF in _TOO_EARLY:
            return False
    return False


def check_launch(key: str, cubin: bytes, spec: LaunchSpec, entry: str) -> None:
    """Raise CodegenError unless a cubin takes the parameters that the executor passes: 8 bytes per pointer and 4 per
    integer, each aligned to its size, then two pointers; 32 threads per warp; no shared memory except what the launch
    states. KernelRefused for a kernel that is launched before its predecessor has ended and does not wait for it."""
    expected, end = [], 0
    for size in (*(8 if arg.type.startswith("*") else 4 for arg in spec.args), *[8] * HIDDEN_POINTERS):
        end = -(-end // size) * size
        expected.append((end, size))
        end += size
    found, launched = read_cubin(cubin), CubinFacts(entry, tuple(expected), 32 * spec.num_warps, 0)
    if found != launched:
        raise CodegenError(
            f"kernel {key}: the object wants {found}, the runtime launches {launched}",
            "this version of Triton calls its kernels in another way; please report it",
        )
    if spec.dependent and not waits_first(cubin):
        raise KernelRefused(
            f"kernel {key} does not wait for the one before it before it touches memory",
            "this version of Triton orders instructions in another way; please report it",
        )


def _sections(elf: bytes) -> Iterator[tuple[str, tuple[int, bytes]]]:
    """Name, size and content of each section."""
    (table,) = struct.unpack_from("<Q", elf, 0x28)
    width, count, names = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", elf, table + i * width) for i in range(count)]
    strings = headers[names][4]
    for name, kind, _, _, offset, size in headers:
        start = strings + name
        nobits = kind == 8
        yield elf[start : elf.index(b"\0", start)].decode(), (size, b"" if nobits else elf[offset : offset + size])


def _attributes(info: bytes) -> Iterator[tuple[int, bytes]]:
    """Code and value of each attribute; a short value is the two bytes themselves."""
    at = 0
    while at < len(info):
        form, code, size = struct.unpack_from("<BBH", info, at)
        value = info[at + 4 : at + 4 + size] if form == _SIZED else info[at + 2 : at + 4]
        at += 4 + (size if form == _SIZED else 0)
        yield code, value
