"""A layer of Llama 70B for eight H100, compiled here; only in `make soak`, because it draws 2.7 GB of random
weights."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest
from icc.runtime.format.load import open_engine
from sizes import soak

ROOT = Path(__file__).resolve().parents[2]
LIMITS = ["--max-seq-len", "4096", "--max-batch-size", "8", "--max-step-tokens", "512"]


@pytest.mark.parametrize("shape", [*soak("llama-70b-layer")])
def test_a_layer_of_70b_compiles_for_eight_gpus(shape: str, tmp_path: Path) -> None:
    """Each file has an eighth, kernels have no access outside their buffers, and no process takes 4.5 GiB."""
    model, engine = tmp_path / "model", tmp_path / "engine"
    subprocess.run([sys.executable, ROOT / "benchmarks" / "make_model.py", shape, model], check=True)
    options = ["--target", "h100", "--tensor-parallel", "8", *LIMITS]
    subprocess.run([sys.executable, "-m", "icc", "compile", model, "-o", engine, *options], check=True)
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss < 4.5 * 2**20  # KiB, the largest process's
    whole = (model / "model.safetensors").stat().st_size
    parts = [file.stat().st_size for file in engine.glob("weights*.safetensors")]
    assert len(parts) == 8 and all(part < 1.01 * whole / 8 + (1 << 20) for part in parts)
    opened = open_engine(engine, verify=False)
    plan = opened.program.plan
    assert opened.manifest.ranks == 8 and plan is not None
    for found in plan.objects.values():
        assert not any(fault.startswith("not shown") for fault in found.faults), (found.file, found.faults)
    opened.close()
