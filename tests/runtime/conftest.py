"""Toy engines: real engine directories around a model of a few lines, so that no compiler is needed."""

from __future__ import annotations

import hashlib
import json
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tokenizers
from icc.runtime.format.digest import encode_sealed
from icc.runtime.format.kv import KVGroup, KVLayer, KVLayout
from icc.runtime.format.manifest import (
    FORMAT_VERSION,
    KERNEL_ABI,
    FileEntry,
    Library,
    Limits,
    Manifest,
    ModelFacts,
    ProgramEntry,
    QuantFacts,
    SamplingDefaults,
)
from icc.runtime.format.program import Program, Step, WeightEntry
from icc.runtime.llm import LLM
from icc.runtime.loop.fake import FakeDevice, FakeExecutor, FakePipeline, context_hash
from icc.runtime.speculate.speculator import Speculator
from icc.runtime.tokenizer import Tokenizer

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(HERE))
VOCAB = 258  # 256 bytes, <bos>, <eos>


def toy_manifest(**changes: Any) -> Manifest:
    """A manifest without files; `changes` replace its fields, or those of its model and limits."""
    model = {
        "architecture": "Toy",
        "vocab_size": VOCAB,
        "hidden_size": 1,
        "num_layers": 1,
        "num_parameters": 2,
        "max_seq_len": 64,
        "bos_token_id": None,
        "eos_token_ids": [257],
        "pad_token_id": None,
    }
    limits = {"max_seq_len": 64, "max_batch_size": 4, "max_step_tokens": 16}
    for part in (model, limits):
        part.update({name: changes.pop(name) for name in list(changes) if name in part})
    limits["max_seq_len"] = model["max_seq_len"] = changes.pop("max_seq_len", model["max_seq_len"])
    libraries = [
        Library("future", "kernels/future.so", ["a_flag_that_no_cpu_has"]),
        Library("any", "kernels/any.so", []),
    ]
    libraries = changes.pop("libraries", libraries)
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        icc_version="0.1.0",
        target="cpu",
        backend="cpu",
        model=ModelFacts(**model),
        quantization=QuantFacts("none", 32.0, []),
        limits=Limits(**limits),
        sampling=SamplingDefaults(),
        programs={"main": ProgramEntry("program.json", "weights.safetensors", libraries)},
        tokenizer_dir="tokenizer",
        files={},
        kernel_abi=KERNEL_ABI[changes.get("backend", "cpu")],
    )
    return msgspec.structs.replace(manifest, **changes)


def toy_program(samples: bool = True) -> Program:
    return Program(
        kernels={"toy": "toy"},
        steps=(Step(kernel="toy"),),
        buffers=[],
        weights={"config": WeightEntry("i32", [2], 64)},
        kv=KVLayout((KVGroup(4, "f32", {0: KVLayer(1, 1, 1)}),)),
        arena_bytes_per_token=4,
        vocab_size=VOCAB,
        samples=samples,
    )


def byte_tokenizer() -> tokenizers.Tokenizer:
    """One token per byte: byte b has id b; then <bos> and <eos>."""
    alphabet = _byte_alphabet()
    model = tokenizers.models.BPE(vocab={alphabet[byte]: byte for byte in range(256)}, merges=[])
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<bos>", "<eos>"])
    return tokenizer


def _byte_alphabet() -> list[str]:
    """The printable characters that GPT-2 uses for bytes, by byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    return [table[byte] for byte in range(256)]


def write_weights(file: Path, rule: int) -> None:
    data = struct.pack("<2i", rule, VOCAB).ljust(64, b"\0")
    header = json.dumps({"config": {"dtype": "U8", "shape": [64], "data_offsets": [0, 64]}}).encode()
    header = header.ljust(-(-(8 + len(header)) // 64) * 64 - 8)
    file.write_bytes(len(header).to_bytes(8, "little") + header + data)


def seal(root: Path, manifest: Manifest) -> None:
    """Write or rewrite engine.json, with the digests of the files that are there."""
    files = {
        path.relative_to(root).as_posix(): FileEntry(path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest())
        for path in sorted(root.rglob("*"))
        if path.is_file() and path.name != "engine.json" and "__pycache__" not in path.parts
    }
    (root / "engine.json").write_bytes(encode_sealed(msgspec.structs.replace(manifest, files=files)))


@pytest.fixture(scope="session")
def toy_library(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Builds the toy kernels for an ABI version."""
    folder = tmp_path_factory.mktemp("toy")

    def build(abi: int = KERNEL_ABI["cpu"]) -> Path:
        library = folder / f"toy{abi}.so"
        if not library.exists():
            include = ROOT / "codegen_templates" / "cpp"
            command = ["g++", "-std=c++17", "-O1", "-mavx2", "-Wall", "-Werror", "-shared", "-fPIC", f"-DTOY_ABI={abi}"]
            subprocess.run([*command, f"-I{include}", str(HERE / "toy_kernels.cpp"), "-o", str(library)], check=True)
        return library

    return build


@pytest.fixture(scope="session")
def write_engine(toy_library: Callable[[int], Path]) -> Callable[..., Path]:
    """Write a toy engine to a path; rule 0 counts upwards, rule 1 hashes the context.

    tokenizer_files: more files of the tokenizer, by name. Other arguments change the manifest.
    """

    def write(
        root: Path,
        rule: int = 0,
        abi: int = KERNEL_ABI["cpu"],
        embed: bool = False,
        tokenizer_files: dict[str, str] | None = None,
        **changes: Any,
    ) -> Path:
        (root / "kernels").mkdir(parents=True)
        (root / "tokenizer").mkdir()
        shutil.copy(toy_library(abi), root / "kernels" / "any.so")
        shutil.copy(toy_library(abi), root / "kernels" / "future.so")
        write_weights(root / "weights.safetensors", rule)
        (root / "program.json").write_bytes(msgspec.json.encode(toy_program("embedding" not in changes)))
        byte_tokenizer().save(str(root / "tokenizer" / "tokenizer.json"))
        for name, text in (tokenizer_files or {}).items():
            (root / "tokenizer" / name).write_text(text)
        if embed:
            from icc.compiler.engine.directory import copy_runtime  # imports torch

            copy_runtime(root)
        seal(root, toy_manifest(**changes))
        return root

    return write


@pytest.fixture
def make_engine(tmp_path: Path, write_engine: Callable[..., Path]) -> Callable[..., Path]:
    """Like `write_engine`, in the test's own directory."""
    return lambda name="toy.engine", **changes: write_engine(tmp_path / name, **changes)


@pytest.fixture(name="toy_manifest")
def toy_manifest_fixture() -> Callable[..., Manifest]:
    return toy_manifest


@pytest.fixture(name="seal")
def seal_fixture() -> Callable[[Path, Manifest], None]:
    return seal


@pytest.fixture
def byte_tokenizer_file(tmp_path: Path) -> Path:
    file = tmp_path / "tokenizer.json"
    byte_tokenizer().save(str(file))
    return file


@pytest.fixture(params=[FakeExecutor, FakeDevice, FakePipeline])
def make_llm(request: Any, toy_manifest: Callable[..., Manifest], byte_tokenizer_file: Path) -> Callable[..., LLM]:
    """An LLM over a fake; `drafter` None decodes plainly."""

    def make(drafter: Any = None, adaptive: bool = False, **executor: Any) -> LLM:
        executor = {"vocab_size": VOCAB, "rule": context_hash, "num_blocks": 200, "max_step_tokens": 64, **executor}
        executor.setdefault("max_logit_rows", 64)
        tokenizer = Tokenizer(byte_tokenizer_file.read_bytes())
        speculator = None if drafter is None else Speculator(drafter, adaptive=adaptive)
        return LLM(toy_manifest(), request.param(**executor), tokenizer, speculator=speculator)

    return make
