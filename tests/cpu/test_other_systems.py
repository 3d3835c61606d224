"""Libraries for macOS and Windows, compiled here: their format, their exports and imports, and which of them a machine
loads.

Where ICC_WINE names Debian's wine64 (`apt-get install --no-install-recommends wine64`: /usr/lib/wine/wine64), one for
Windows runs there, too.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import struct
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import icc
import numpy as np
import pefile
import pytest
from cpu_cases import small_products
from cpu_harness import Batch, Builder, Runner, flat_batch
from icc.compiler.backends.cpu import backend, toolchain
from icc.compiler.backends.cpu.build import build_libraries
from icc.compiler.backends.cpu.isa import ALL, AMX, AVX2, DOTPROD, I8MM, LEVELS, MAC_LEVELS, Isa, find_isas
from icc.compiler.errors import UsageError
from icc.compiler.options import CompileOptions
from icc.runtime.cli.commands import main
from icc.runtime.commands.doctor import diagnose
from icc.runtime.commands.inspect import describe_engine
from icc.runtime.errors import MissingIsaError
from icc.runtime.executor.cpu.library import IccBatch
from icc.runtime.format import cpuid
from icc.runtime.format.isa import cpu_flags, select_library
from icc.runtime.format.manifest import Library
from icc.runtime.system import LINUX, MACOS, SYSTEMS, WINDOWS
from macholib.mach_o import LC_CODE_SIGNATURE, LC_SEGMENT_64
from macholib.MachO import MachO
from macholib.SymbolTable import SymbolTable
from sizes import SOAK, soak

# a case of test_blake3.py
MESSAGE = bytes(i % 251 for i in range(1048577))
DIGEST = "2f053cd7472cf0cd2f9adaf45c1180255b91b9a865404a63671a0ee5f792ed33"
WINE = os.environ.get("ICC_WINE", "")
HERE = Path(__file__).parent
EXPORTS = {
    f"icc_{name}"
    for name in "abi_version blake3 create destroy inputs largest scratch section shared_touched step".split()
}
USUAL, RARE = (AVX2.on(WINDOWS), DOTPROD.on(MACOS)), (AVX2.on(MACOS), DOTPROD.on(WINDOWS))


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("others") / "kernels"
    build_libraries(small_products().program(), folder, [*USUAL, *(RARE if SOAK else ())], optimize="-O1")
    return folder


def path_of(isa: Isa, folder: Path) -> Path:
    return folder / f"{isa.stem}.{toolchain.SUFFIXES[isa.system]}"


def said(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("isa", [*USUAL, *soak(*RARE)], ids=lambda isa: isa.stem)
def test_a_library_is_of_its_system_exports_the_interface_and_needs_only_what_a_process_has(
    isa: Isa, built: Path
) -> None:
    path = str(path_of(isa, built))
    found: Any
    if isa.system == WINDOWS:
        found = pefile.PE(path)
        assert found.FILE_HEADER.TimeDateStamp == 0
        assert found.FILE_HEADER.Machine == {"x86-64": 0x8664, "arm64": 0xAA64}[isa.machine]
        exported = {entry.name.decode() for entry in found.DIRECTORY_ENTRY_EXPORT.symbols}
        needs = found.DIRECTORY_ENTRY_IMPORT
        imported = {entry.name.decode() for library in needs for entry in library.imports}
        wanted = r"KERNEL32\.dll|api-ms-win-(core-synch|crt-\w+)-l1-\d-0\.dll"
        assert all(re.fullmatch(wanted, library.dll.decode()) for library in needs)
        sections = {section.Name.rstrip(b"\0").decode() for section in found.sections}
    else:
        macho = MachO(path)
        [found] = macho.headers
        assert found.header.cputype == {"x86-64": 0x01000007, "arm64": 0x0100000C}[isa.machine]
        symbols = SymbolTable(macho)
        exported = {name[1:].decode() for _, name in symbols.extdefsyms if name.startswith(b"_icc_")}
        imported = {name.decode().removeprefix("_") for _, name in symbols.undefsyms}
        assert [name for _, _, name in found.walkRelocatables()] == ["/usr/lib/libSystem.B.dylib"]
        assert any(load.cmd == LC_CODE_SIGNATURE for load, _, _ in found.commands) == (isa.machine == "arm64")
        segments = [some for load, _, some in found.commands if load.cmd == LC_SEGMENT_64]
        sections = {section.sectname.rstrip(b"\0").decode() for some in segments for section in some}
    assert not sections & {".ctors", ".CRT", ".tls", "__mod_init_func", "__thread_vars"}  # never run here
    assert exported == EXPORTS
    assert imported <= toolchain.IMPORTS[isa.system], sorted(imported - toolchain.IMPORTS[isa.system])
    waits = {MACOS: {"__ulock_wait", "__ulock_wake"}, WINDOWS: {"WaitOnAddress", "WakeByAddressAll"}}
    assert waits[isa.system] <= imported


@pytest.mark.parametrize("isa", [USUAL[0], *soak(*USUAL[1:], *RARE)], ids=lambda isa: isa.stem)
def test_it_is_the_same_bytes_in_any_folder(isa: Isa, built: Path, tmp_path: Path) -> None:
    folder = tmp_path / "elsewhere" / "kernels"
    build_libraries(small_products().program(), folder, [isa], optimize="-O1")
    assert sorted(path.name for path in folder.iterdir()) == sorted((f"{isa.stem}.cpp", path_of(isa, folder).name))
    assert path_of(isa, folder).read_bytes() == path_of(isa, built).read_bytes()


@pytest.fixture(scope="module")
def engine(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny llama for AVX2 on Linux and Windows."""
    folder = tmp_path_factory.mktemp("systems")
    tiny.save_tiny(tiny.tiny_configs()["llama"], folder / "llama", dtype="float32")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "build_libraries", partial(build_libraries, optimize="-O1"))
        return icc.compile(
            folder / "llama", folder / "e", target="cpu", isa="avx2", os="windows, linux", quant="rtn4", max_seq_len=64
        )


def test_an_engine_lists_its_libraries_by_system(engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    libraries = json.loads((engine / "engine.json").read_text())["programs"]["main"]["libraries"]
    flags = {"cpu_flags": ["avx2", "fma", "f16c"]}
    assert libraries == [
        {"isa": "avx2", "path": "kernels/avx2.so", **flags},
        {"isa": "avx2", "path": "kernels/avx2-windows.dll", **flags, "system": "windows"},
    ]
    assert main(["verify", str(engine)]) == 0
    shown: Any = describe_engine(engine)["libraries"]
    assert [(x["isa"], x["system"], x["runs_here"]) for x in shown] == [("avx2", LINUX, True), ("avx2", WINDOWS, False)]
    [found] = [check.found for check in diagnose(engine).checks if "threads" in check.found]
    assert found.startswith("avx2, ") and found.endswith("; not here: avx2-windows")
    with icc.load(engine) as llm:
        assert llm.generate([[5, 6]], icc.SamplingParams(max_tokens=4, ignore_eos=True))[0].token_ids


ALL_BUT_AMX = tuple(isa for isa in ALL if isa is not AMX)  # AMX needs a permission that only Linux grants


@pytest.mark.parametrize(("system", "name"), [("linux", LINUX), ("darwin", MACOS), ("win32", WINDOWS)])
def test_the_loader_goes_by_system_machine_and_cpu(system: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    libraries = [
        Library(isa.name, isa.stem, list(isa.cpu_flags), isa.system)
        for isa in find_isas("x86-64", "x86-64,arm64", "linux,macos,windows")
    ]
    monkeypatch.setattr(sys, "platform", system)
    for isa in (*ALL_BUT_AMX, I8MM, DOTPROD):
        assert select_library(libraries, frozenset(isa.cpu_flags)).path == isa.on(name).stem
    others = [library for library in libraries if library.system != name]
    known = ", ".join(dict.fromkeys(library.system for library in others))
    message = f"this machine cannot run the engine: it has {name}, the engine's kernels are for {known}"
    with pytest.raises(MissingIsaError, match=message) as error:
        select_library(others, frozenset(AVX2.cpu_flags))
    assert error.value.hint == f"compile the model again with --os {name}"
    with pytest.raises(MissingIsaError, match=r"need asimddp atomics .*have none of them"):
        select_library([library for library in libraries if library.isa == "dotprod"], frozenset(AVX2.cpu_flags))


def test_systems_are_chosen_by_name() -> None:
    assert find_isas("x86-64", None, None) == find_isas("x86-64", None, "linux") == ALL
    assert find_isas("x86-64", None, "windows,linux") == (*ALL, *(isa.on(WINDOWS) for isa in ALL_BUT_AMX))
    assert find_isas("x86-64", None, "macos") == tuple(isa.on(MACOS) for isa in MAC_LEVELS)  # both machines
    assert find_isas("x86-64", "avx2", "macos") == (AVX2.on(MACOS),)
    with pytest.raises(UsageError, match="--isa amx: on Linux alone"):
        find_isas("x86-64", "amx", "windows,linux")
    assert find_isas("arm64", None, "macos") == tuple(isa.on(MACOS) for isa in LEVELS["arm64"])
    with pytest.raises(UsageError, match="--os linux,bsd: 'bsd' is unknown") as error:
        find_isas("x86-64", None, "linux,bsd")
    assert error.value.hint == f"choose from: {', '.join(SYSTEMS)}"
    refused: list[tuple[dict[str, Any], str]] = [
        ({"target": "native", "os": "macos"}, "--os macos: --target native is for this machine's CPU"),
        ({"target": "h100", "os": "macos"}, "--os macos: --target h100 is for a GPU"),
        ({"target": "cpu", "os": "windows", "tensor_parallel": 2}, "--os windows: several ranks run only on Linux"),
    ]
    for options, message in refused:
        with pytest.raises(UsageError, match=message):
            CompileOptions(Path("m"), Path("e"), **options)


def test_macos_says_what_a_cpu_has() -> None:
    def mac(*names: str) -> Any:
        return lambda name: int(name.removeprefix("hw.optional.") in names)

    assert cpuid.macos_flags("x86-64", mac("avx2_0", "fma", "f16c")) >= set(AVX2.cpu_flags)
    assert cpuid.macos_flags("x86-64", mac("avx1_0")) == frozenset()
    assert cpuid.macos_flags("arm64", mac()) == set(DOTPROD.cpu_flags)  # an M1 with its first macOS
    assert cpuid.macos_flags("arm64", mac("arm.FEAT_I8MM")) == set(I8MM.cpu_flags)


def test_windows_says_what_an_arm64_cpu_has(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel32 = SimpleNamespace(IsProcessorFeaturePresent=lambda number: number in (34, 43))
    monkeypatch.setattr(ctypes, "windll", SimpleNamespace(kernel32=kernel32), raising=False)
    assert cpuid.windows_flags("arm64") == set(DOTPROD.cpu_flags)


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="it runs there")
def test_an_x86_cpu_says_what_it_has_by_the_code_for_windows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine code, called with Windows' calling convention, finds the levels of /proc/cpuinfo."""
    (tmp_path / "a.c").write_text(
        "#include <sys/mman.h>\n#define WINDOWS __attribute__((ms_abi))\n"
        "void* allocate(void* at, unsigned long size, int kind, int mode) {\n"
        "    return mmap(0, size, 7, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);\n}\n"
        "void cpuid(void* code, void* out, unsigned leaf, unsigned sub) {\n"
        "    ((WINDOWS void (*)(void*, unsigned, unsigned))code)(out, leaf, sub);\n}\n"
        "unsigned xgetbv(void* code) { return ((WINDOWS unsigned (*)(void))code)(); }\n"
    )
    said("gcc", "-shared", "-fPIC", "-o", tmp_path / "a.so", tmp_path / "a.c")
    library = ctypes.CDLL(str(tmp_path / "a.so"))
    monkeypatch.setattr(
        ctypes, "windll", SimpleNamespace(kernel32=SimpleNamespace(VirtualAlloc=library.allocate)), raising=False
    )
    plain = ctypes.CFUNCTYPE

    def as_windows(result: Any, *arguments: Any) -> Any:
        call = library.cpuid if arguments else library.xgetbv
        call.restype, call.argtypes = result, (ctypes.c_void_p, *arguments)
        return lambda place: partial(call, place)

    monkeypatch.setattr(ctypes, "CFUNCTYPE", as_windows)
    found = cpuid.windows_flags("x86-64")
    monkeypatch.setattr(ctypes, "CFUNCTYPE", plain)
    known = {flag for isa in ALL for flag in isa.cpu_flags}
    assert found == cpu_flags() & known and "avx2" in found


def test_levels_need_registers_that_the_system_saves() -> None:
    has = {(0, 0): 7, (1, 0): 1 << 91 | 1 << 76 | 1 << 93, (7, 0): 1 | 1 << 37 | 1 << 48 | 1 << 75, (7, 1): 1 << 4}

    def flags(saved: int) -> frozenset[str]:
        return cpuid.x86_flags(lambda leaf, sub: has[leaf, sub], lambda: saved)

    assert flags(0xE7) == {"avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx_vnni"}
    assert flags(0x7) == {"avx2", "fma", "f16c", "avx_vnni"}
    assert flags(0x3) == frozenset()
    has[1, 0] = 1 << 76 | 1 << 93  # no xgetbv
    assert flags(0xE7) == frozenset()


def memory_image(builder: Builder, batch: Batch, arena: np.ndarray, steps: int, threads: int) -> tuple[bytes, int, int]:
    """The memory that windows_runner.c works on, and where the arena and the digests lie in it."""
    content, places = bytearray(120), list[int]()  # offsets in struct Memory

    def put(data: bytes) -> int:
        content.extend(bytes(-len(content) % 64))
        content.extend(data)
        return len(content) - len(data)

    def point(at: int, target: int) -> None:
        struct.pack_into("<q", content, at, target)
        places.append(at)

    weights = [put(packed.tobytes()) for packed in builder.packed]
    table = put(bytes(8 * len(weights)))
    for number, weight in enumerate(weights):
        point(table + 8 * number, weight)
    program, arrays = builder.program(), batch.arrays()
    lies = put(arena.tobytes())
    kv, blocks = put(bytes(64)), put(struct.pack("<q", 1))
    arrays["logits"] = np.zeros((batch.tokens, program.vocab_size), np.float32)
    raw = IccBatch(
        num_tokens=batch.tokens, num_seqs=1, num_logit_rows=len(arrays["logit_rows"]),
        max_blocks=arrays["block_tables"].shape[1],
    )  # fmt: skip
    step = put(bytes(raw))
    for name, array in arrays.items():
        if name != "parents":
            point(step + getattr(IccBatch, name).offset, put(array.tobytes()))
    message, following, digests = put(MESSAGE), put(bytes(8)), put(bytes(32))
    for number, target in enumerate((table, lies, kv, blocks, step, message)):
        point(40 + 8 * number, target)
    struct.pack_into("<qq", content, 88, len(MESSAGE), 4 << 20)
    point(104, following)
    point(112, digests)
    listed = put(np.array(places, np.int64).tobytes())
    struct.pack_into("<5q", content, 0, len(content), threads, steps, listed, len(places))
    return bytes(content), lies, digests


@pytest.mark.skipif(not WINE, reason="ICC_WINE names no wine64")
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_wine_runs_a_library_for_windows(built: Path, tmp_path: Path, threads: int) -> None:
    """Products and the digest are as on Linux; the threads run 200 steps together and sleep between them."""
    builder = small_products()
    build_libraries(builder.program(), tmp_path / "kernels", [AVX2], optimize="-O1")
    runner = Runner(tmp_path / "kernels/avx2.so", builder)
    floats = runner.arena[: runner.arena.size // 4 * 4].view(np.float32)
    floats[:] = np.random.default_rng(1).standard_normal(floats.size)
    image, arena, digests = memory_image(builder, flat_batch(3), runner.arena, 200, threads)
    runner.step(flat_batch(3), {})
    runner.close()
    (tmp_path / "memory.bin").write_bytes(image)
    (tmp_path / "kernels.dll").write_bytes(path_of(AVX2.on(WINDOWS), built).read_bytes())
    zig = [
        sys.executable,
        "-m",
        "ziglang",
        "cc",
        "-target",
        "x86_64-windows-gnu",
        "-O1",
        "-nostdlib",
        "-Wl,-e,mainCRTStartup",
    ]
    said(*zig, HERE / "windows_runner.c", "-lkernel32", "-o", tmp_path / "runner.exe")
    environment = os.environ | {"WINEDEBUG": "-all", "WINEDLLOVERRIDES": "mscoree,mshtml="}
    environment.setdefault("WINEPREFIX", str(tmp_path / "prefix"))
    done = subprocess.run([WINE, "runner.exe"], cwd=tmp_path, env=environment, check=False, timeout=300)
    assert done.returncode == 0
    result = (tmp_path / "result.bin").read_bytes()
    there = np.frombuffer(result, np.float32, floats.size, arena)
    assert np.any(there != np.frombuffer(image, np.float32, floats.size, arena))
    np.testing.assert_allclose(there, floats, rtol=1e-5, atol=1e-5)
    assert result[digests : digests + 32].hex() == DIGEST
