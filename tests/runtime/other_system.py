"""A process that behaves as on macOS or Windows: `python other_system.py darwin|win32 ENGINE [COMMAND]`.

Whatever the system lacks is removed before icc is imported: modules, functions of os, flags of mmap, files of the
kernel. Other packages are imported before that: they support these systems themselves.
"""

from __future__ import annotations

import asyncio  # noqa: F401
import ctypes
import importlib
import json
import mmap
import multiprocessing  # noqa: F401
import os
import signal
import socket
import subprocess  # noqa: F401
import sys
from typing import Any

for package in ("click", "minijinja", "msgspec", "numpy", "rich.console", "rich.progress", "tokenizers"):
    importlib.import_module(package)

SYSTEM, ENGINE, *COMMAND = sys.argv[1:]
# The results of cpuid by (leaf, subleaf): FMA, F16C and XGETBV; AVX2.
HASWELL = {(0, 0): 13, (1, 0): 1 << 76 | 1 << 93 | 1 << 91, (7, 0): 1 << 37}
NEITHER = ("sched_getaffinity", "sched_setaffinity", "memfd_create", "MFD_CLOEXEC", "MFD_ALLOW_SEALING")
LACKS: dict[str, dict[Any, tuple[str, ...]]] = {
    "darwin": {os: NEITHER, mmap: ("MADV_HUGEPAGE", "MAP_POPULATE"), socket: ()},
    "win32": {
        os: (*NEITHER, "fork", "uname", "sysconf", "geteuid", "getuid", "O_NOFOLLOW", "O_CLOEXEC", "O_DIRECTORY",
             "killpg", "O_NONBLOCK", "RTLD_NOW", "RTLD_LOCAL", "statvfs", "getloadavg", "fchmod", "chown", "setsid"),
        mmap: ("MAP_PRIVATE", "MAP_ANONYMOUS", "MAP_SHARED", "MADV_HUGEPAGE", "MAP_POPULATE", "PROT_READ"),
        socket: ("AF_UNIX", "send_fds", "recv_fds"),
        signal: ("SIGHUP", "SIGKILL", "SIGUSR1", "SIGALRM", "pthread_sigmask", "setitimer", "pthread_kill"),
    },
}  # fmt: skip
MODULES = {"darwin": (), "win32": ("fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "curses", "readline")}


def without(event: str, given: tuple[Any, ...]) -> None:
    """Hide /proc and /sys."""
    if event in ("open", "os.scandir", "os.listdir") and str(given[0]).startswith(("/proc/", "/sys/")):
        raise FileNotFoundError(2, "No such file or directory", given[0])


class Kernel32:
    """A kernel32 of a machine with 8 GiB."""

    @staticmethod
    def GlobalMemoryStatusEx(status: Any) -> int:  # noqa: N802
        assert ctypes.cast(status, ctypes.POINTER(ctypes.c_uint32))[0] == 64
        status[1] = 8 << 30
        return 1


for module, names in LACKS[SYSTEM].items():
    for name in names:
        if hasattr(module, name):
            delattr(module, name)
for name in MODULES[SYSTEM]:
    sys.modules[name] = None  # type: ignore[assignment]
if SYSTEM == "win32":
    plain, library = os.open, ctypes.CDLL
    os.supports_dir_fd.clear()

    def opened(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if dir_fd is not None:
            raise NotImplementedError("dir_fd")
        return plain(path, flags, mode)

    def loaded(name: str | None, *more: Any, **others: Any) -> ctypes.CDLL:
        if name is None:
            raise TypeError("there is no library of the whole process")
        return library(name, *more, **others)

    os.open, ctypes.CDLL = opened, loaded  # type: ignore[assignment,misc]
    ctypes.windll = type("WinDll", (), {"kernel32": Kernel32})  # type: ignore[attr-defined]
    os.environ["PROCESSOR_ARCHITECTURE"] = "AMD64"
sys.addaudithook(without)
sys.platform = SYSTEM

import icc  # noqa: E402
from icc.runtime import system  # noqa: E402
from icc.runtime.cli.commands import COMMANDS, main  # noqa: E402
from icc.runtime.executor.cpu.library import KernelLibrary  # noqa: E402
from icc.runtime.executor.cpu.memory import AnonymousMemory, available_bytes  # noqa: E402
from icc.runtime.format import cpuid  # noqa: E402
from icc.runtime.format.load import open_engine  # noqa: E402
from icc.runtime.llm import LLM  # noqa: E402
from icc.runtime.loop.fake import FakeExecutor  # noqa: E402
from icc.runtime.tokenizer import Tokenizer  # noqa: E402

NEEDS_MORE = ("serve", "batch", "bench serve")  # packages of the server
for name, command in COMMANDS.items():
    if name not in NEEDS_MORE:
        command.load()
assert system.machine() == "x86-64" and system.allowed_cores() == set(range(os.cpu_count() or 1))
assert available_bytes() > 1 << 20 and system.can_pin() is False
memory = AnonymousMemory(4 << 20)
assert not ctypes.string_at(memory.address, 64).strip(b"\0")
memory.close()
cpuid.machine_code = lambda: (lambda leaf, subleaf: HASWELL[leaf, subleaf], lambda: 7)
MAC = {"hw.optional.avx2_0", "hw.optional.fma", "hw.optional.f16c", "hw.physicalcpu"}
cpuid.mac_number = system.mac_number = lambda name: int(name in MAC)
if COMMAND:
    sys.exit(main([*COMMAND, ENGINE, "--ids", "97"]))
engine = open_engine(ENGINE)  # the fastest library for the CPU, built for this system
assert engine.library is not None
KernelLibrary(engine.files.read(engine.library.path), engine.library.path)
assert (SYSTEM == "win32") == (not hasattr(os, "fork")) and not hasattr(os, "memfd_create")
tokenizer_json = engine.tokenizer_json()
assert tokenizer_json is not None
executor = FakeExecutor(vocab_size=258, num_blocks=64, max_step_tokens=16)
with LLM(engine.manifest, executor, Tokenizer(tokenizer_json), engine) as llm:
    text = llm.generate("abc", icc.SamplingParams(max_tokens=4))[0].text
codes = [main([command, ENGINE]) for command in ("verify", "inspect")]
print(json.dumps({"text": text, "codes": codes, "library": engine.library.title}))
