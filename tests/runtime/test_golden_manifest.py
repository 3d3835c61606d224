"""engine.json of format version 1, as files: what an older icc wrote must still be read, and is still written.

After a change on purpose: ICC_UPDATE_GOLDEN=1 pytest tests/runtime/test_golden_manifest.py, and review the diff. A new
format version gets a golden file of its own; the old one stays.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
from icc.runtime.format.digest import encode_sealed
from icc.runtime.format.manifest import (
    FORMAT_VERSION,
    FileEntry,
    Library,
    Limits,
    Manifest,
    ModelFacts,
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
        libraries=[Library("avx2", "kernels/avx2.so", ["avx2", "fma", "f16c"])],
        weights_file="weights.safetensors",
        program_file="program.json",
        tokenizer_dir="tokenizer",
        files={"program.json": FileEntry(12, "0" * 63 + "1"), "kernels/avx2.so": FileEntry(34, "0" * 63 + "2")},
        kernel_abi=2,  # whatever it is by now: the form of the file is what is compared
    )


def test_the_manifest_is_written_as_before() -> None:
    written = encode_sealed(manifest())
    if os.environ.get("ICC_UPDATE_GOLDEN"):
        GOLDEN.write_bytes(written)
    assert written.decode() == GOLDEN.read_text()


def test_every_golden_manifest_is_read() -> None:
    for file in GOLDEN.parent.glob("engine.v*.json"):
        found = msgspec.json.decode(file.read_bytes(), type=Manifest)
        assert f"v{found.format_version}" == file.name.split(".")[1]
