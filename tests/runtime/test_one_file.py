"""One-file engines: they equal their directories, and a faulty file is refused in one line."""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from icc.compiler.cli import main as icc_main
from icc.compiler.engine import packing
from icc.compiler.errors import OutputExistsError, UsageError, WriteError
from icc.compiler.packing import pack_engine, pack_layout, unpack_engine
from icc.runtime.cli.commands import main
from icc.runtime.errors import EngineChangedError, EngineFormatError
from icc.runtime.format.load import open_engine, read_manifest
from icc.runtime.format.open_container import open_container
from icc.runtime.format.present import SHEBANG
from icc.runtime.loading import load

Make = Callable[..., Path]
PROMPT = ["-p", "abc", "--max-tokens", "4"]
PAGE = 4096


@pytest.fixture
def packed(make_engine: Make, tmp_path: Path) -> Path:
    """A toy engine as one file, beside its directory."""
    pack_engine(make_engine(), tmp_path / "toy.icc")
    return tmp_path / "toy.icc"


def contents(path: Path) -> dict[str, bytes]:
    container = open_container(path)
    return {name: container.read(name) for name in container.sizes()}


def with_bytecode(root: Path) -> Path:
    """The engine with the bytecode of its runtime in the manifest, as after a compile."""
    from icc.compiler.engine.directory import write_manifest  # imports torch

    manifest = msgspec.structs.replace(read_manifest(root), files={})
    (root / "engine.json").unlink()
    write_manifest(root, manifest)
    return root


def test_every_command_takes_it(packed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(packed.with_suffix(".engine"))

    def said(engine: str, *command: str) -> str:
        assert main([command[0], engine, *command[1:]]) == 0
        return capsys.readouterr().out.replace(engine, "ENGINE")

    for command in (["run", *PROMPT], ["inspect", "--json"], ["verify"], ["inspect"]):
        assert said(str(packed), *command) == said(folder, *command) != ""
    for command in (
        ["bench", "--batch-size", "1", "--prompt-tokens", "8", "--output-tokens", "2"],
        ["doctor", "--hashes"],
        ["inspect", "--memory"],
    ):
        assert said(str(packed), *command)
    text, page = packed.with_name("text"), packed.with_name("page.html")
    text.write_text("abcdefgh" * 8)
    assert said(str(packed), "eval", "--text", str(text)) == said(folder, "eval", "--text", str(text))
    said(str(packed), "report", "--html", str(page))
    assert "<style>" in page.read_text()
    assert "0 tokens" not in said(str(packed), "detect", "--key", "7", "abcdefg")


def test_weights_are_mapped_where_they_lie(packed: Path) -> None:
    engine = open_engine(packed)
    place = engine.weights.addresses(engine.program, {})[0]
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    spans = {line[-1]: [int(part, 16) for part in line[0].split("-")] for line in lines if line[-1].endswith("toy.icc")}
    begin, end = spans[str(packed)]
    assert begin <= place < end and place % 64 == 0
    with zipfile.ZipFile(packed) as archive:
        entry = archive.getinfo("weights.safetensors")
        assert (
            all(info.compress_type == zipfile.ZIP_STORED for info in archive.infolist()) and archive.testzip() is None
        )
    content = open_container(packed).read("weights.safetensors")
    start = packed.read_bytes().index(content)
    assert start % PAGE == 0 and start > entry.header_offset and content == engine.files.read("weights.safetensors")
    engine.close()


def test_python_runs_it(make_engine: Make, tmp_path: Path) -> None:
    """Without an installed icc, by its shebang too, and with the bytecode inside the file."""
    pack_engine(with_bytecode(make_engine(embed=True)), tmp_path / "own.icc")
    before = (tmp_path / "own.icc").read_bytes()
    found = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": ""}
    for command in ([sys.executable, "own.icc"], ["./own.icc"], [sys.executable, tmp_path / "own.icc"]):
        done = subprocess.run([*command, "run", *PROMPT], cwd=tmp_path, env=found, capture_output=True, text=True)
        assert done.stdout == "defg\n" and "first token" in done.stderr, done.stderr
    script = """
import runpy, sys
from importlib.machinery import SourceFileLoader
def refuse(self, data, path, **more):
    if "own.icc" in path: raise AssertionError(path)
    return compile(data, path, "exec", dont_inherit=True)
SourceFileLoader.source_to_code = refuse
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
    done = subprocess.run(
        [sys.executable, "-c", script, "own.icc", "run", *PROMPT], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stdout == "defg\n", done.stderr
    served = subprocess.run([sys.executable, "own.icc", "serve"], cwd=tmp_path, capture_output=True, text=True)
    assert served.returncode == 3 and "icc serve" in served.stderr
    without = "import sys, runpy; sys.modules['msgspec'] = None; sys.argv = sys.argv[1:]; "
    without += "runpy.run_path('own.icc', run_name='__main__')"
    bare = subprocess.run(
        [sys.executable, "-c", without, "own.icc", "run"], cwd=tmp_path, capture_output=True, text=True
    )
    assert bare.returncode == 3 and bare.stderr == (
        "error: this needs msgspec, which is not installed\nhint: pip install msgspec\n"
    )
    assert (tmp_path / "own.icc").read_bytes() == before and not (tmp_path / "__pycache__").exists()


def test_equal_engines_give_equal_files_and_come_back(packed: Path, tmp_path: Path) -> None:
    folder = packed.with_suffix(".engine")
    for file in folder.rglob("*"):
        os.utime(file, (1, 1))
    pack_engine(folder, tmp_path / "again.icc")
    assert (tmp_path / "again.icc").read_bytes() == packed.read_bytes()
    unpack_engine(packed, tmp_path / "back.engine")
    assert contents(tmp_path / "back.engine") == contents(folder) == contents(packed)
    pack_engine(packed, tmp_path / "third.icc")
    assert (tmp_path / "third.icc").read_bytes() == packed.read_bytes()
    assert os.access(packed, os.X_OK) and packed.read_bytes().startswith(SHEBANG)


def test_what_a_killed_writer_left_is_removed(make_engine: Make, tmp_path: Path) -> None:
    """Only for the same engine, with any characters in its name."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    left, others = (tmp_path / f".{name}.{ended.pid}.x.partial" for name in ("toy[12].icc", "toy1.icc"))
    left.mkdir()
    others.mkdir()
    pack_engine(make_engine(), tmp_path / "toy[12].icc")
    assert not left.exists() and others.exists()


def test_output_is_replaced_at_once_or_not_at_all(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, before = packed.with_suffix(".engine"), packed.read_bytes()
    with pytest.raises(OutputExistsError, match=r"toy\.icc exists"):
        pack_engine(folder, packed)
    (tmp_path / "notes.icc").write_text("mine")
    with pytest.raises(OutputExistsError, match="not an engine, so --force does not replace it"):
        pack_engine(folder, tmp_path / "notes.icc", force=True)
    with pytest.raises(UsageError, match=r"\.icc is the suffix"):
        unpack_engine(packed, tmp_path / "x.icc")
    with pytest.raises(UsageError, match=r"name ends in \.icc"):
        pack_engine(folder, folder, force=True)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched, pytest.raises(WriteError, match="the disk is full"):
        patched.setattr(packing, "_add", full)
        pack_engine(folder, packed, force=True)
    assert packed.read_bytes() == before
    for command in (["pack", folder, "--force"], ["unpack", packed, "--force"]):  # each over what the other has made
        with pytest.raises(SystemExit) as ended:
            icc_main(list(map(str, command)))
        assert ended.value.code == 0
    assert packed.read_bytes() == before and main(["run", str(folder), *PROMPT]) == 0
    unpack_engine(packed, tmp_path / "moved")
    os.replace(packed, tmp_path / "moved.icc")
    pack_engine(tmp_path / "moved", tmp_path / "moved.icc", force=True)
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]


def rewritten(packed: Path, change: Callable[[zipfile.ZipFile, str, bytes], None]) -> bytes:
    """The bytes of an archive whose entries `change` writes."""
    made = io.BytesIO()
    made.write(SHEBANG)
    with zipfile.ZipFile(made, "w") as archive:
        for name, content in contents(packed).items():
            change(archive, name, content)
    return made.getvalue()


def compressed(archive: zipfile.ZipFile, name: str, content: bytes) -> None:
    archive.writestr(name, content, zipfile.ZIP_DEFLATED if name == "program.json" else zipfile.ZIP_STORED)


def with_another(other: str) -> Callable[[zipfile.ZipFile, str, bytes], None]:
    def write(archive: zipfile.ZipFile, name: str, content: bytes) -> None:
        archive.writestr(name, content)
        if name == "engine.json":
            archive.writestr(other, b"x")

    return write


def without(other: str) -> Callable[[zipfile.ZipFile, str, bytes], None]:
    return lambda archive, name, content: None if name == other else archive.writestr(name, content)


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize(
    ("change", "says"),
    [
        (compressed, "'program.json' is compressed"),
        (with_another("../escaped"), "../escaped is not part of the engine"),
        (with_another("/etc/escaped"), "/etc/escaped is not part of the engine"),
        (with_another("tokenizer/"), "tokenizer/ is not part of the engine"),
        (with_another("engine.json"), "'engine.json' is in it twice"),
        (without("program.json"), "program.json is missing"),
        (without("engine.json"), "engine.json is missing"),
        (lambda archive, name, content: archive.writestr(name, content), "which is no multiple of 64"),
    ],
)
def test_archives_of_others_are_told(
    change: Callable[[zipfile.ZipFile, str, bytes], None], says: str, packed: Path, tmp_path: Path
) -> None:
    packed.write_bytes(rewritten(packed, change))
    with pytest.raises(EngineFormatError) as caught:
        open_engine(packed)
    assert says in caught.value.message and "\n" not in caught.value.message and caught.value.hint
    if "multiple" not in says:
        with pytest.raises(EngineFormatError):
            unpack_engine(packed, tmp_path / "out.engine")
        assert not (tmp_path / "out.engine").exists() and not (tmp_path.parent / "escaped").exists()


def at(raw: bytes, mark: bytes, offset: int, form: str, value: int) -> bytes:
    """The bytes of the archive with one field changed, in the last record with this mark."""
    made = bytearray(raw)
    struct.pack_into(form, made, raw.rindex(mark) + offset, value)
    return bytes(made)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda raw: raw[:-1], "is it cut off?"),
        (lambda raw: raw[: len(raw) // 2], "is it cut off?"),
        (lambda raw: raw[:40], "is it cut off?"),
        (lambda raw: raw + b"x", "is it cut off?"),
        (lambda raw: at(raw, b"PK\5\6", 10, "<H", 500), "directory"),
        (lambda raw: at(raw, b"PK\5\6", 16, "<L", 8), "directory is not where it should be"),
        (lambda raw: at(raw, b"PK\1\2", 8, "<H", 1), "is encrypted"),
        (lambda raw: at(raw, b"PK\1\2", 42, "<L", 23), "is not where its directory says"),
        (lambda raw: at(raw, b"PK\1\2", 42, "<L", 1 << 31), "directory"),
        (lambda raw: at(raw, b"PK\1\2", 24, "<L", 1 << 30), "is longer than the file"),
        (lambda raw: at(raw, b"PK\1\2", 28, "<H", 3), "directory"),
    ],
)
def test_damage_is_told(
    damage: Callable[[bytes], bytes], says: str, packed: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    packed.write_bytes(damage(packed.read_bytes()))
    assert main(["run", str(packed), *PROMPT]) == 20
    error = capsys.readouterr().err.splitlines()
    assert len(error) == 2 and says in error[0] and error[1].startswith("hint: ")


def test_an_entry_within_another_is_told(packed: Path) -> None:
    """Zip bombs are made of entries that share bytes."""
    raw = packed.read_bytes()
    with zipfile.ZipFile(packed) as archive:
        first, second = archive.infolist()[:2]
    longer = bytearray(raw)
    place = raw.index(b"PK\1\2")
    for offset in (20, 24):
        struct.pack_into("<L", longer, place + offset, second.header_offset - first.header_offset)
    packed.write_bytes(longer)
    with pytest.raises(EngineFormatError, match="overlaps another entry"):
        open_engine(packed)


def test_a_changed_byte_of_a_file_is_told(packed: Path) -> None:
    raw = packed.read_bytes()
    place = raw.index(open_container(packed).read("weights.safetensors")) + 100
    packed.write_bytes(raw[:place] + bytes([raw[place] ^ 1]) + raw[place + 1 :])
    with pytest.raises(EngineChangedError, match=r"weights\.safetensors has changed"):
        open_engine(packed)
    assert main(["verify", str(packed)]) == 32


def test_beyond_four_gigabytes(packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small archive written like a large one: sizes and offsets are in Zip64 fields."""
    monkeypatch.setattr(zipfile, "ZIP64_LIMIT", 10)
    pack_engine(packed.with_suffix(".engine"), tmp_path / "large.icc")
    raw = (tmp_path / "large.icc").read_bytes()
    assert b"PK\6\6" in raw and raw.index(open_container(packed).read("weights.safetensors")) % PAGE == 0
    assert contents(tmp_path / "large.icc") == contents(packed)
    with load(tmp_path / "large.icc") as llm:
        assert llm.generate(["abc"])[0].text
    place = raw.rindex(b"PK\6\7")
    (tmp_path / "large.icc").write_bytes(raw[: place + 8] + b"\0" * 8 + raw[place + 16 :])
    with pytest.raises(EngineFormatError, match="Zip64"):
        open_engine(tmp_path / "large.icc")
    sparse = tmp_path / "sparse"
    with sparse.open("wb") as file:
        file.truncate((4 << 30) + 1)
    assert packing.needs_late_python(sparse) and not packing.needs_late_python(packed)


def test_what_python_compiled_stays_outside(packed: Path, tmp_path: Path) -> None:
    """`__pycache__` in the directory is not part of the file, as it is not part of the engine."""
    folder = packed.with_suffix(".engine")
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "x.pyc").write_bytes(b"x")
    pack_engine(folder, tmp_path / "again.icc")
    assert (tmp_path / "again.icc").read_bytes() == packed.read_bytes()
    (folder / "more").write_text("x")
    with pytest.raises(EngineFormatError, match="more is not part of the engine"):
        pack_engine(folder, tmp_path / "more.icc")
    assert not (tmp_path / "more.icc").exists()


def test_the_manifest_is_the_directorys(packed: Path) -> None:
    manifest = json.loads(open_container(packed).read("engine.json"))
    assert (packed.with_suffix(".engine") / "engine.json").read_bytes() == open_container(packed).read("engine.json")
    assert sorted(open_container(packed).sizes()) == sorted([*manifest["files"], "engine.json"])


def test_an_oci_layout_holds_it(packed: Path, tmp_path: Path) -> None:
    """It follows the image specification; its layer is the file, byte for byte, and can be extracted."""
    layout = tmp_path / "model.oci"
    pack_layout(packed.with_suffix(".engine"), layout)
    assert json.loads((layout / "oci-layout").read_text()) == {"imageLayoutVersion": "1.0.0"}
    [found] = json.loads((layout / "index.json").read_text())["manifests"]

    def blob(descriptor: dict[str, Any]) -> bytes:
        algorithm, digest = descriptor["digest"].split(":")
        raw = (layout / "blobs" / algorithm / digest).read_bytes()
        assert hashlib.sha256(raw).hexdigest() == digest and len(raw) == descriptor["size"]
        return raw

    manifest = json.loads(blob(found))
    assert manifest["artifactType"] == found["artifactType"] == "application/vnd.icc.engine.v1"
    assert manifest["mediaType"] == found["mediaType"] == "application/vnd.oci.image.manifest.v1+json"
    assert blob(manifest["config"]) == b"{}" and manifest["config"]["mediaType"] == "application/vnd.oci.empty.v1+json"
    [layer] = manifest["layers"]
    assert blob(layer) == packed.read_bytes() and len(list((layout / "blobs" / "sha256").iterdir())) == 3
    assert layer["annotations"] == {"org.opencontainers.image.title": "model.oci.icc"}
    pack_engine(layout, tmp_path / "pulled.icc")
    assert (tmp_path / "pulled.icc").read_bytes() == packed.read_bytes()
    unpack_engine(layout, tmp_path / "pulled")
    assert contents(tmp_path / "pulled") == contents(packed)
    with load(layout / "blobs" / "sha256" / layer["digest"].split(":")[1]) as llm:
        assert llm.generate(["abc"])[0].text
    with pytest.raises(OutputExistsError, match=r"model\.oci exists"):
        pack_layout(packed, layout)
    pack_layout(packed, layout, force=True)
    assert json.loads((layout / "index.json").read_text())["manifests"] == [found]
    with pytest.raises(OutputExistsError, match="--force does not replace it"):
        pack_layout(packed, packed.with_suffix(".engine"), force=True)


def test_a_damaged_layout_is_told(packed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for change, says in (
        (lambda layout, blob: blob.write_bytes(blob.read_bytes() + b"x"), "has changed: its name is not its sha256"),
        (lambda layout, blob: blob.unlink(), "cannot be read"),
        (lambda layout, blob: (layout / "index.json").write_text("["), "index.json cannot be read"),
        (lambda layout, blob: (layout / "index.json").unlink(), "index.json cannot be read"),
        (lambda layout, blob: (layout / "index.json").write_text("[]"), "is no JSON object"),
        (
            lambda layout, blob: (layout / "index.json").write_text('{"manifests": [{"digest": "../x"}]}'),
            "without an engine",
        ),
        (lambda layout, blob: (layout / "index.json").write_text('{"manifests": 5}'), "without an engine"),
    ):
        layout = tmp_path / "model.oci"
        pack_layout(packed, layout)
        [blob] = [file for file in (layout / "blobs" / "sha256").iterdir() if file.stat().st_size > 5000]
        change(layout, blob)
        with pytest.raises(SystemExit) as ended:
            icc_main(["unpack", str(layout)])
        error = capsys.readouterr().err
        assert ended.value.code == 20 and says in error and len(error.splitlines()) == 2
        shutil.rmtree(layout)
