"""RELIABILITY R11: an engine that does not fit this machine or this icc is refused before its weights are read. The
message says what is needed, what there is and what to do; each cause has an exit code of its own."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from icc.runtime import loading
from icc.runtime.errors import DeviceError, DriverError, IccError
from icc.runtime.executor.cuda.compat import check_device
from icc.runtime.executor.cuda.driver import DeviceFacts
from icc.runtime.format.folder import Folder
from icc.runtime.format.manifest import KERNEL_ABI, GpuFacts
from icc.runtime.format.present import MANIFEST_FILE
from sizes import soak

Make = Callable[..., Path]


def edit(root: Path, file: str, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a JSON file of an engine consistently: sizes and digests are updated."""
    content = json.loads((root / file).read_text())
    change(content)
    (root / file).write_text(json.dumps(content))
    if file != "engine.json":
        raw = (root / file).read_bytes()
        entry = {"size": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
        edit(root, "engine.json", lambda facts: facts["files"].update({file: entry}) or facts.update(digest=""))
    elif file == "engine.json":
        content["digest"] = ""
        (root / file).write_text(json.dumps(content))


def no_isa(facts: dict[str, Any]) -> None:
    for library in facts["programs"]["main"]["libraries"]:
        library["cpu_flags"] = ["avx9000"]


def other_tokenizer(root: Path) -> None:
    file = root / "tokenizer" / "tokenizer.json"
    file.write_bytes(file.read_bytes().replace(b"<bos>", b"<sos>"))


MATRIX: list[tuple[str, int, str, Callable[[Path], object]]] = [
    ("format version", 21, r"version 7 is not supported: this runtime reads version 2 and 3",
     lambda root: edit(root, "engine.json", lambda facts: facts.update(format_version=7))),
    ("kernel interface", 26, f"the engine has kernel interface version 99, this runtime needs {KERNEL_ABI['cpu']}",
     lambda root: edit(root, "engine.json", lambda facts: facts.update(kernel_abi=99))),
    ("isa", 22, r"need avx9000 .*have none of them",
     lambda root: edit(root, "engine.json", no_isa)),
    ("page size", 28, r"keeps 0 tokens in a KV block, this runtime can keep 1 to 4096",
     lambda root: edit(root, "program.json", lambda program: program["kv"]["groups"][0].update(block_size=0))),
    ("dtype", 28, r"KV cache is of type 'f8e4m3', this runtime has f32, f16, bf16, i8",
     lambda root: edit(root, "program.json", lambda program: program["kv"]["groups"][0].update(dtype="f8e4m3"))),
    ("tokenizer", 32, r"tokenizer/tokenizer.json has changed: its sha256 is not the one in", other_tokenizer),
    ("missing field", 29, r"missing required field `vocab_size`",
     lambda root: edit(root, "engine.json", lambda facts: facts["model"].pop("vocab_size"))),
    ("future field", 29, r"unknown field `experts`",
     lambda root: edit(root, "engine.json", lambda facts: facts["model"].update(experts=8))),
]  # fmt: skip


@pytest.mark.parametrize(("cause", "code", "message", "change"), MATRIX, ids=[row[0] for row in MATRIX])
def test_a_mismatch_is_told_in_words(
    cause: str, code: int, message: str, change: Callable[[Path], object], make_engine: Make
) -> None:
    root = make_engine()
    change(root)
    with pytest.raises(IccError, match=message) as caught:
        loading.load(root)
    assert caught.value.exit_code == code and caught.value.hint and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("cause", "change"),
    [(row[0], row[3]) for row in MATRIX if row[0] != "tokenizer"],
    ids=lambda value: str(value)[:12],
)
def test_nothing_is_hashed_before(
    cause: str, change: Callable[[Path], object], make_engine: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokenizer is one of the files that all cores hash in parallel. All other causes are found before that; and
    all but those of the KV cache, which program.json describes, before any file but engine.json is opened."""
    root = make_engine()
    change(root)
    read = Folder.read

    def read_manifest(self: Folder, name: str) -> bytes:
        return read(self, name) if name == MANIFEST_FILE else pytest.fail(f"{name} is opened")

    monkeypatch.setattr(Folder, "map", lambda self, name: pytest.fail(f"{name} is mapped"))
    if cause not in ("page size", "dtype"):
        monkeypatch.setattr(Folder, "read", read_manifest)
        monkeypatch.setattr(Folder, "reading", lambda self: pytest.fail("files are opened"))
    with pytest.raises(IccError):
        loading.load(root)


@pytest.mark.parametrize(("command", "row"), [("run", 2), ("serve", 4), *soak(("run", 0), ("run", 6))])
def test_the_command_says_it_in_one_line_with_the_code(command: str, row: int, make_engine: Make) -> None:
    root = make_engine(f"{command}{row}.engine")
    _, code, _, change = MATRIX[row]
    change(root)
    options = ["-p", "a"] if command == "run" else ["--port", "0"]
    line = [sys.executable, "-m", "icc.compiler.cli", command, str(root), *options]
    done = subprocess.run(line, capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr and len(done.stderr.strip().splitlines()) <= 2, done.stderr


def test_kernels_of_another_interface_than_the_manifest_states(make_engine: Make) -> None:
    """The library itself has the version, so that engines whose manifest does not state it yet are refused, too."""
    words = rf"any\.so has kernel interface version 1, this runtime needs {KERNEL_ABI['cpu']}"
    with pytest.raises(IccError, match=words) as caught:
        loading.load(make_engine(abi=1, kernel_abi=0))
    assert caught.value.exit_code == 26 and caught.value.hint


def test_the_manifest_states_the_interface_of_the_kernels() -> None:
    header = (Path(__file__).parents[2] / "codegen_templates" / "cpp" / "abi.h").read_text()
    assert f"#define ICC_ABI_VERSION {KERNEL_ABI['cpu']}\n" in header


def test_another_gpu_and_an_older_driver() -> None:
    device = DeviceFacts("L4", (8, 9), 12040, 24 << 30, 20 << 30)
    with pytest.raises(DeviceError, match=r"h100 \(sm_90\), this GPU is L4 \(sm_89\)") as gpu:
        check_device("h100", GpuFacts("sm_90", 12000), device)
    with pytest.raises(DriverError, match=r"driver supports CUDA 12.4, the engine needs 12.8") as driver:
        check_device("l4", GpuFacts("sm_89", 12080), device)
    for target, arch, found, name in (  # within one major capability, and for AMD
        ("a100", "sm_80", (8, 9), "sm_89"), ("a10g", "sm_86", (8, 9), "sm_89"), ("h100", "sm_90", (10, 0), "sm_100"),
        ("mi300x", "gfx942", (9, 5), "gfx95x"),
    ):  # fmt: skip
        with pytest.raises(DeviceError, match=rf"compiled for {target} \({arch}\), this GPU is X \({name}\)") as other:
            check_device(target, GpuFacts(arch, 0), DeviceFacts("X", found, 13000, 24 << 30, 20 << 30))
        assert "\n" not in other.value.message
    check_device("a100", GpuFacts("sm_80", 0), DeviceFacts("A100", (8, 0), 13000, 80 << 30, 80 << 30))
    assert (gpu.value.exit_code, driver.value.exit_code) == (25, 27) and gpu.value.hint and driver.value.hint
