"""`icc tune` over a fake driver: every choice of tilings is decided by measured time, and later compiles use it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from building import TARGET, build
from fake_cuda import FakeDriver
from icc.compiler.backends.triton.objects.compile import Compiled, spec_key
from icc.compiler.backends.triton.tiling.choice import Tuner
from icc.compiler.backends.triton.tiling.tuned import load_tuned, read_tuning
from icc.compiler.errors import UsageError
from icc.compiler.measure import gpu_tune as tuning
from icc.compiler.targets import TARGETS
from icc.runtime.executor.cuda.device import CudaDevice
from icc.runtime.executor.cuda.driver import Cuda
from icc.runtime.format.manifest import Limits


class _AnyKernel(dict[bytes, Any]):
    """A table of launch specs that records the kernels that the tuner compiles."""


@pytest.fixture
def tuned_file(tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    tiny.save_tiny(tiny.tiny_configs()["llama"], tmp_path / "model", "bfloat16")
    built = build(tmp_path / "model", "rtn4", Limits(max_seq_len=32, max_batch_size=1, max_step_tokens=2))
    plan = built.program.plan
    assert plan is not None
    table = _AnyKernel()
    for name in plan.objects:
        table[name.encode()] = built.specs[name]

    def pretend(specs: Any, *_: Any, refused: dict[str, str]) -> dict[str, Compiled]:
        found = {spec_key(spec): spec for spec in specs}
        table.update({key.encode(): spec for key, spec in found.items()})
        return {key: Compiled(spec.entry, key.encode(), 1024, 32, 0, 12000) for key, spec in found.items()}

    monkeypatch.setattr(tuning, "compile_specs", pretend)
    driver = FakeDriver(table, dry=True)
    monkeypatch.setattr(tuning, "CudaDevice", lambda engine: CudaDevice(engine, cuda=Cuda(bindings=driver)))
    raw = msgspec.json.encode(built.program)
    files = SimpleNamespace(read=lambda path: raw if path == "program.json" else Path(path).stem.encode())
    weights = SimpleNamespace(view=lambda name: built.packed[name])
    engine: Any = SimpleNamespace(
        name="main", manifest=built.manifest, program=built.program, weights=weights, files=files
    )
    file = tmp_path / "h100.json"
    found = tuning.tune(engine, file, lambda *_: None)
    assert found.tilings and read_tuning(file, TARGET) == found
    assert not driver.live and not driver.memory
    # for the fake driver, the tiling with the fewest warps is fastest
    for choice in tuning.find_choices(engine, TARGET):
        assert found.tilings[choice.key]["warps"] == min(c["warps"] for c in choice.candidates), choice.key
        own = Tuner(TARGET, found.tilings)
        assert own.pick(choice.key, choice.candidates, lambda config: -config["warps"]) == found.tilings[choice.key]
    return file


def test_tuned_tilings_are_measured_written_and_read(tuned_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ICC_TUNING", str(tuned_file))
    assert load_tuned(TARGET)
    with pytest.raises(UsageError, match="is for target 'h100', not 'a100'"):
        load_tuned(TARGETS["a100"])
    tuned_file.write_text("{")
    with pytest.raises(UsageError, match="tuning file"):
        load_tuned(TARGET)
