"""engine.json of every format version, as files: the current one is written unchanged, the previous one is read, older
ones are refused with a message.

After a change on purpose: ICC_UPDATE_GOLDEN=1 pytest tests/runtime/test_golden_manifest.py, and review the diff. A new
format version gets a golden file of its own; the old one stays. Version 2: program.json holds typed steps. Version 3:
an engine has programs by name.
"""

from __future__ import annotations

import os
from pathlib import Path
from unittest.mock import ANY

import msgspec
import pytest
from icc.runtime.errors import EngineFormatError, EngineVersionError
from icc.runtime.format.digest import encode_sealed
from icc.runtime.format.load import read_manifest
from icc.runtime.format.manifest import (
    FORMAT_VERSION,
    READ_VERSIONS,
    FileEntry,
    Library,
    Limits,
    Manifest,
    ModelFacts,
    ProgramEntry,
    QuantFacts,
    SamplingDefaults,
)

GOLDEN = Path(__file__).parent / "golden" / f"engine.v{FORMAT_VERSION}.json"


def manifest() -> Manifest:
    return Manifest(
        format_version=FORMAT_VERSION,
        icc_version="0.1.0",
        target="cpu",
        backend="cpu",
        model=ModelFacts("LlamaForCausalLM", 4096, 256, 6, 5770496, 1024, 0, [0], None),
        quantization=QuantFacts("awq4", 8.627, ["model.layers.0.mlp.down_proj.weight: kept by --keep *down*"]),
        limits=Limits(1024, 16, 512),
        sampling=SamplingDefaults(temperature=0.8, top_p=0.95),
        programs={
            "main": ProgramEntry(
                "program.json", "weights.safetensors", [Library("avx2", "kernels/avx2.so", ["avx2", "fma", "f16c"])]
            ),
            "draft": ProgramEntry("draft/program.json", "draft/weights.safetensors", rank=1),
        },
        tokenizer_dir="tokenizer",
        files={"program.json": FileEntry(12, "0" * 63 + "1"), "kernels/avx2.so": FileEntry(34, "0" * 63 + "2")},
        kernel_abi=2,  # any value: the form of the file is compared
    )


def test_the_manifest_is_written_as_before() -> None:
    written = encode_sealed(manifest())
    if os.environ.get("ICC_UPDATE_GOLDEN"):
        GOLDEN.write_bytes(written)
    assert written.decode() == GOLDEN.read_text()


@pytest.mark.parametrize("file", sorted(GOLDEN.parent.glob("engine.v*.json")), ids=lambda file: file.stem)
def test_a_manifest_is_read_if_it_is_of_a_version_that_is(file: Path, tmp_path: Path) -> None:
    version = int(file.name.split(".")[1].removeprefix("v"))
    facts = msgspec.json.decode(file.read_bytes())
    assert facts["format_version"] == version
    names = {"weights.safetensors", "draft/program.json", "draft/weights.safetensors"}
    listed = msgspec.to_builtins(FileEntry(1, "0" * 64))
    facts["files"] |= dict.fromkeys(names, listed)
    (tmp_path / "engine.json").write_bytes(msgspec.json.encode(facts | {"digest": ""}))
    if version not in READ_VERSIONS:
        with pytest.raises(EngineVersionError, match=f"version {version} is not supported: .* reads version 2 and 3"):
            read_manifest(tmp_path)
        return
    found, now = read_manifest(tmp_path), manifest()
    assert found.main == now.main and found.model == now.model and found.format_version == version
    if version == FORMAT_VERSION:
        assert msgspec.json.decode(file.read_bytes(), type=Manifest) == msgspec.structs.replace(now, digest=ANY)


def test_a_program_that_is_not_there_or_runs_beside_others_is_refused() -> None:
    with pytest.raises(EngineFormatError, match="the engine has no program 'vision'"):
        manifest().program("vision")
    with pytest.raises(EngineFormatError, match="program 'draft' is for rank 1 of several"):
        manifest().program("draft")
