"""S3: the bytes that were hashed are the bytes that run, even if a file of the engine is replaced or changed in
between."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from icc.compiler.engine import digests
from icc.runtime.errors import EngineFormatError
from icc.runtime.format import files
from icc.runtime.format.digest import encode_sealed
from icc.runtime.format.files import EngineFiles
from icc.runtime.format.load import Engine, open_engine, read_manifest
from icc.runtime.format.manifest import FileEntry
from icc.runtime.llm import LLM
from icc.runtime.loading import load
from icc.runtime.requests.params import SamplingParams

Make = Callable[..., Path]
USED = ("kernels/any.so", "program.json", "tokenizer/tokenizer.json", "weights.safetensors")


@pytest.fixture
def swap_after_check(make_engine: Make, monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Replaces the used files of an engine as soon as all its files are hashed."""
    other, check = make_engine("other.engine", rule=1, abi=1), EngineFiles.finish
    for file in ("program.json", "tokenizer/tokenizer.json"):
        (other / file).write_text("{}")

    def arm(root: Path) -> None:
        def check_then_swap(self: EngineFiles) -> None:
            check(self)
            for file in USED:
                os.replace(other / file, root / file)

        monkeypatch.setattr(EngineFiles, "finish", check_then_swap)

    return arm


def test_a_file_that_is_replaced_after_it_was_hashed_is_not_used(
    make_engine: Make, swap_after_check: Callable[[Path], None]
) -> None:
    root = make_engine()
    swap_after_check(root)
    with load(root, threads=1) as llm:
        assert llm.generate(["abc"], SamplingParams(max_tokens=5))[0].text == "defgh"


def test_without_verification_the_files_are_used_as_they_are(
    make_engine: Make, swap_after_check: Callable[[Path], None]
) -> None:
    """The control: without verification, the replaced files are used."""
    root = make_engine()
    swap_after_check(root)
    with pytest.raises(EngineFormatError, match=r"kernels/any\.so"):
        load(root, verify=False)


def test_a_file_that_is_read_later_is_compared_again(make_engine: Make) -> None:
    root = make_engine()
    engine = open_engine(root)
    file = root / "kernels" / "future.so"  # read late, as a GPU executor reads its kernel objects
    content = file.read_bytes()
    assert engine.files.read("kernels/future.so") == content
    file.write_bytes(content[:-1] + b"x")
    with pytest.raises(EngineFormatError, match=r"kernels/future\.so has changed"):
        engine.files.read("kernels/future.so")
    engine.close()


@pytest.mark.parametrize(
    ("hash", "missing", "open_it"),
    [
        ("sha256", 0, open_engine),
        ("sha256", 1, load),
        ("blake3", 0, open_engine),
        ("blake3", 1, load),
        ("blake3", 0, load),
    ],
)
def test_a_mapped_file_is_compared_piece_by_piece(
    make_engine: Make,
    monkeypatch: pytest.MonkeyPatch,
    hash: str,
    missing: int,
    open_it: Callable[[Path], Engine | LLM],
) -> None:
    """For a change of any byte. If the manifest lacks a piece's digest, or no library computes them, the digest of the
    whole file decides."""
    root, weights = make_engine(), "weights.safetensors"
    for module in (files, digests):
        monkeypatch.setattr(module, "PIECE", 64)
    manifest = read_manifest(root)
    blake3 = digests.library_digest(root, manifest.main.libraries) if hash == "blake3" else None
    entry = digests.file_entry(root / weights, blake3)
    assert len(entry.pieces) == -(-entry.size // 64) > 2 and entry.hash == hash
    entry = FileEntry(entry.size, entry.sha256, entry.pieces[missing:], entry.hash)
    sealed = msgspec.structs.replace(manifest, files={**manifest.files, weights: entry})
    (root / "engine.json").write_bytes(encode_sealed(sealed))
    open_it(root).close()
    content = (root / weights).read_bytes()
    for at in range(len(content)):
        (root / weights).write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        with pytest.raises(EngineFormatError, match=r"weights\.safetensors has changed"):
            open_it(root)


def test_a_library_that_is_overwritten_runs_on(make_engine: Make) -> None:
    root = make_engine()
    library = root / "kernels" / "any.so"
    with load(root, threads=1) as llm:
        library.write_bytes(b"\0" * library.stat().st_size)
        assert llm.generate(["abc"], SamplingParams(max_tokens=5))[0].text == "defgh"


def test_no_link_is_followed(make_engine: Make, tmp_path: Path) -> None:
    root = make_engine()
    engine = open_engine(root)
    (tmp_path / "elsewhere").write_bytes((root / "kernels" / "future.so").read_bytes())
    (root / "kernels" / "future.so").unlink()
    (root / "kernels" / "future.so").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(EngineFormatError, match=r"kernels/future\.so cannot be read"):
        engine.files.read("kernels/future.so")
    engine.close()
