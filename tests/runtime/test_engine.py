"""Engine directories: a toy one runs; a changed one is refused with a message, before any of its code is loaded."""

from __future__ import annotations

import json
import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from icc.runtime.errors import (
    CapacityError,
    EngineFormatError,
    EngineVersionError,
    IccError,
    MissingIsaError,
    UsageError,
)
from icc.runtime.executor.cpu.library import KernelLibrary
from icc.runtime.executor.cpu.memory import choose_blocks
from icc.runtime.format.digest import digest_of
from icc.runtime.format.isa import cpu_flags, select_library
from icc.runtime.format.load import open_engine, read_manifest
from icc.runtime.format.manifest import KERNEL_ABI, FileEntry, Manifest
from icc.runtime.loading import load
from icc.runtime.requests.params import SamplingParams

Make = Callable[..., Path]
Seal = Callable[[Path, Manifest], None]


def test_a_toy_engine_generates(make_engine: Make) -> None:
    with load(make_engine(), threads=1) as llm:
        first, second = llm.generate(["abc", "mn"], SamplingParams(max_tokens=5))
        assert (first.text, second.text) == ("defgh", "opqrs")
        assert llm.logits([1, 2, 3] * 10).argmax(1).tolist() == [2, 3, 4] * 10
    llm.close()


def test_the_library_reads_contexts_through_block_tables(make_engine: Make) -> None:
    """With too little memory for all, requests are preempted, and still give the same tokens."""
    root = make_engine(rule=1)
    prompts = [[seed, *range(20)] for seed in range(6)]
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    with load(root) as llm:
        plenty = llm.generate(prompts, params)
    with load(root, kv_bytes=64 * 18) as llm:
        assert llm.executor.groups[0].num_blocks == 18
        assert llm.generate(prompts, params) == plenty


def test_compiling_again_over_a_loaded_engine_loads_the_new_library(make_engine: Make) -> None:
    """The dynamic loader caches libraries by path; the content must decide."""
    first = make_engine("first.engine")
    other = make_engine("other.engine", abi=1)
    with load(first):
        shutil.rmtree(first)
        os.rename(other, first)
        with pytest.raises(EngineFormatError, match=f"interface version 1, this runtime needs {KERNEL_ABI['cpu']}"):
            load(first)


def set_field(root: Path, path: str, value: object) -> None:
    """Change one field of engine.json, and leave the digest empty. value: None removes the field."""
    facts = json.loads((root / "engine.json").read_text())
    facts["digest"] = ""
    *parents, last = path.split(".")
    target = facts
    for name in parents:
        target = target[name]
    if value is None:
        del target[last]
    else:
        target[last] = value
    (root / "engine.json").write_text(json.dumps(facts))


@pytest.mark.parametrize(
    ("path", "value", "error", "message"),
    [
        ("format_version", 1, EngineVersionError, "version 1 is not supported: this runtime reads version 2 and 3"),
        ("format_version", "1", EngineVersionError, "version '1' is not supported"),
        ("format_version", None, EngineFormatError, "field `format_version` is missing"),
        ("model.vocab_size", None, EngineFormatError, "engine.json: .*missing required field `vocab_size`.*model"),
        ("model.colour", "red", EngineFormatError, "engine.json: .*unknown field `colour`.*model"),
        ("limits.max_seq_len", "64", EngineFormatError, r"engine.json: .*limits.max_seq_len"),
        ("limits.max_seq_len", 0, EngineFormatError, "limits must be at least 1"),
        ("model.vocab_size", 300, EngineFormatError, "program.json: vocab_size is 258, engine.json says 300"),
        (
            "programs.main.weights",
            "../weights.safetensors",
            EngineFormatError,
            "'../weights.safetensors' is used but not listed",
        ),
        ("tokenizer_dir", "/etc", EngineFormatError, "'/etc' does not stay inside"),
    ],
)
def test_a_wrong_manifest_is_refused_by_field(
    make_engine: Make, path: str, value: object, error: type[IccError], message: str
) -> None:
    root = make_engine()
    set_field(root, path, value)
    with pytest.raises(error, match=message):
        open_engine(root)


def test_a_future_version_is_told_even_if_its_fields_are_unknown(make_engine: Make) -> None:
    root = make_engine()
    (root / "engine.json").write_text('{"format_version": 9, "everything": "else"}')
    with pytest.raises(EngineVersionError, match="version 9") as caught:
        open_engine(root)
    assert caught.value.exit_code == 21 and caught.value.hint


@pytest.mark.parametrize(
    "path", ["../out", "/abs", "a/../../out", "kernels/./any.so", "kernels//any.so", "", ".", "a\\b", "a\0b"]
)
def test_listed_paths_stay_inside(make_engine: Make, toy_manifest: Callable[..., Manifest], path: str) -> None:
    root = make_engine()
    manifest = read_manifest(root)
    files = {**manifest.files, path: FileEntry(0, "0" * 64)}
    (root / "engine.json").write_bytes(msgspec.json.encode(msgspec.structs.replace(manifest, files=files, digest="")))
    with pytest.raises(EngineFormatError, match="does not stay inside the engine directory"):
        open_engine(root)


@pytest.mark.parametrize(
    "file", ["weights.safetensors", "program.json", "kernels/any.so", "kernels/future.so", "tokenizer/tokenizer.json"]
)
def test_a_changed_missing_or_foreign_file_is_named(make_engine: Make, tmp_path: Path, file: str) -> None:
    root = make_engine()
    good = (root / file).read_bytes()

    def refused(message: str) -> None:
        with pytest.raises(EngineFormatError, match=message):
            open_engine(root)

    for position in (0, len(good) // 2, len(good) - 1):
        (root / file).write_bytes(good[:position] + bytes([good[position] ^ 1]) + good[position + 1 :])
        refused(f"{file} has changed")
    (root / file).write_bytes(good[:-1])
    refused(f"{file} has {len(good) - 1} bytes, engine.json says {len(good)}")
    (root / file).unlink()
    refused(f"{file} is missing")
    (tmp_path / "elsewhere").write_bytes(good)
    (root / file).symlink_to(tmp_path / "elsewhere")
    refused(f"{file} is not a plain file")
    (root / file).unlink()
    (root / file).write_bytes(good)
    (root / (file + ".more")).write_bytes(good)
    refused(f"{file}.more is not part of the engine")
    (root / (file + ".more")).unlink()
    open_engine(root).close()


def test_the_bytes_of_the_manifest_are_under_its_seal(make_engine: Make) -> None:
    root = make_engine()
    good = (root / "engine.json").read_bytes()
    for position in range(0, len(good), 2):
        for flip in (0x01,) if position % 8 else (0x01, 0xFF):
            (root / "engine.json").write_bytes(good[:position] + bytes([good[position] ^ flip]) + good[position + 1 :])
            with pytest.raises(EngineFormatError):
                read_manifest(root)
    for length in range(0, len(good) - 1, 7):
        (root / "engine.json").write_bytes(good[:length])
        with pytest.raises(EngineFormatError):
            read_manifest(root)


def test_the_seal_is_of_the_bytes(make_engine: Make) -> None:
    raw = (make_engine() / "engine.json").read_bytes()
    digest = json.loads(raw)["digest"]
    assert digest_of(raw, digest) == digest


def test_without_verification_only_names_and_sizes_are_checked(make_engine: Make) -> None:
    root = make_engine()
    file = root / "tokenizer" / "tokenizer.json"
    file.write_bytes(file.read_bytes().replace(b"<bos>", b"<BOS>"))
    load(root, verify=False).close()
    file.write_bytes(file.read_bytes() + b" ")
    with pytest.raises(EngineFormatError, match="bytes"):
        load(root, verify=False)


@pytest.mark.parametrize("name", ["missing", "file", "empty", "checkpoint"])
def test_what_is_no_engine_is_told(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "config.json").write_text("{}")
    says = {
        "missing": "does not exist",
        "file": "is not a directory",
        "empty": "no engine.json",
        "checkpoint": "no engine",
    }
    with pytest.raises(EngineFormatError, match=says[name]) as caught:
        load(tmp_path / name)
    assert ("icc compile` it first" in caught.value.hint) == (name == "checkpoint")


@pytest.mark.parametrize("raw", [b"", b"[1]", b"\xff\xfe", b"nonsense", b"[" * 100_000, b'{"format_version":'])
def test_a_manifest_that_is_not_json_is_refused(make_engine: Make, raw: bytes) -> None:
    root = make_engine()
    (root / "engine.json").write_bytes(raw)
    with pytest.raises(EngineFormatError, match=r"engine\.json: "):
        open_engine(root)


def weights_header(root: Path, change: Callable[[dict[str, dict[str, object]]], object]) -> None:
    """Rewrite the header of the weights file in place; the file keeps its length."""
    file = root / "weights.safetensors"
    raw = file.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])
    change(header)
    encoded = json.dumps(header).encode()
    assert len(encoded) <= size
    file.write_bytes(raw[:8] + encoded.ljust(size) + raw[8 + size :])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda h: h["config"].update(data_offsets=[0, 65]), "not a byte range"),
        (lambda h: h["config"].update(data_offsets=[-1, 63]), "not a byte range"),
        (lambda h: h["config"].update(shape=[63]), "not a byte range"),
        (lambda h: h["config"].update(dtype="F4"), "not a byte range"),
        (lambda h: h["config"].update(data_offsets=[1, 64], shape=[63]), "not aligned"),
        (lambda h: h["config"].update(shape=[0], data_offsets=[0, 0]), "there are bytes after its tensors"),
        (lambda h: h.update(x=h.pop("config")), "weight 'config' is missing"),
        (lambda h: h["config"].update(dtype=8), "header is not valid"),
    ],
)
def test_a_damaged_weights_file_is_refused(make_engine: Make, change: Callable[..., object], message: str) -> None:
    root = make_engine()
    weights_header(root, change)
    with pytest.raises(EngineFormatError, match=message):
        load(root, verify=False)


def test_a_header_longer_than_the_weights_file_is_refused(make_engine: Make) -> None:
    root = make_engine()
    file = root / "weights.safetensors"
    file.write_bytes((2**62).to_bytes(8, "little") + file.read_bytes()[8:])
    with pytest.raises(EngineFormatError, match="header is longer than the file"):
        load(root, verify=False)


def test_a_library_that_is_none_is_refused(make_engine: Make) -> None:
    root = make_engine()
    file = root / "kernels" / "any.so"
    file.write_bytes(b"x" * file.stat().st_size)
    with pytest.raises(EngineFormatError, match=r"any\.so is not a kernel library"):
        load(root, verify=False)


def test_a_library_that_cannot_be_copied_is_not_called_none() -> None:
    """A limit on the size of files also applies to files in memory."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, hard))
    try:
        with pytest.raises(IccError, match=r"avx2\.so is loaded from a copy of 2 KiB, .* too large") as found:
            KernelLibrary(b"x" * 2048, "kernels/avx2.so")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not isinstance(found.value, EngineFormatError) and "ulimit -f" in found.value.hint


def test_the_best_library_that_the_machine_can_run_is_taken(toy_manifest: Callable[..., Manifest]) -> None:
    libraries = toy_manifest().main.libraries
    assert select_library(libraries, frozenset()).isa == "any"
    assert select_library(libraries, frozenset({"a_flag_that_no_cpu_has"})).isa == "future"
    assert select_library(libraries, frozenset({"a_flag_that_no_cpu_has"}), isa="any").isa == "any"
    with pytest.raises(UsageError, match="no library for isa 'x'"):
        select_library(libraries, frozenset(), isa="x")
    with pytest.raises(MissingIsaError, match=r"need a_flag_that_no_cpu_has .*have none of them"):
        select_library(libraries, frozenset(), isa="future")
    with pytest.raises(MissingIsaError, match="need a_flag_that_no_cpu_has"):
        select_library(libraries[:1], frozenset())
    assert "fpu" in cpu_flags()


def test_the_library_can_be_chosen_by_the_environment(make_engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ICC_ISA", "future")
    with pytest.raises(MissingIsaError, match="level future"):
        load(make_engine())


def test_a_gpu_engine_without_a_launch_plan_is_refused(make_engine: Make) -> None:
    with pytest.raises(EngineFormatError, match="launch plan"):
        load(make_engine(backend="cuda", target="h100"))


def test_the_kv_cache_fits_its_budget_or_one_sequence_is_refused(toy_manifest: Callable[..., Manifest]) -> None:
    from icc.runtime.format.kv import KVGroup, KVLayer, KVLayout

    kv, limits = KVLayout((KVGroup(4, "f32", {0: KVLayer(1, 1, 1)}),)), toy_manifest().limits
    assert choose_blocks(kv, limits).num_blocks == (16 * 4,)
    assert choose_blocks(kv, limits, 20 * 64 + 63).num_blocks == (20,)
    with pytest.raises(CapacityError, match="one sequence of 64 tokens") as error:
        choose_blocks(kv, limits, 16 * 64 - 1)
    assert "--kv-mib" in error.value.hint and "kv_bytes" in error.value.hint  # for the command line, and for Python


@pytest.mark.parametrize("threads", [0, -1, 100_000])
def test_silly_thread_counts_are_refused(make_engine: Make, threads: int) -> None:
    with pytest.raises(UsageError, match="threads"):
        load(make_engine(), threads=threads)
