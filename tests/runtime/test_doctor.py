"""`icc doctor`: what this machine lacks for an engine, with the exit code that running it would have, and the expected
speed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from icc.runtime.cli.commands import main
from icc.runtime.commands import doctor
from icc.runtime.commands.doctor import Diagnosis, diagnose
from icc.runtime.errors import DeviceError
from icc.runtime.executor.cuda.driver import Cuda, DeviceFacts
from icc.runtime.format.footprint import footprint
from icc.runtime.format.load import read_manifest
from icc.runtime.format.manifest import GpuFacts, Library
from icc.runtime.format.programs import decode_program

Make = Callable[..., Path]
H100 = DeviceFacts("NVIDIA H100", (9, 0), 12080, 70 << 30, 80 << 30)


def states(found: Diagnosis) -> dict[str, str]:
    return {check.name: check.state for check in found.checks}


def gpu(facts: DeviceFacts = H100) -> Any:
    return lambda backend: SimpleNamespace(facts=lambda: facts, bandwidth=lambda: 3350.0, close=lambda: None)


@pytest.fixture
def gpu_engine(make_engine: Make) -> Path:
    """An engine for an H100."""
    needs = GpuFacts("sm_90", 12080)
    return make_engine(target="h100", backend="cuda", gpu=needs, libraries=[])


def test_an_engine_that_runs(make_engine: Make, capsys: pytest.CaptureFixture[str]) -> None:
    engine = make_engine()
    assert main(["doctor", str(engine), "--hashes", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["runs"] and {check["state"] for check in said["checks"]} <= {"ok", "warning"}
    expect = said["expect"]
    assert expect["bandwidth_gb_s"] > 0 and expect["kv_tokens"] > 0 and expect["longest_sequence"] > 0
    rates = expect["decode_tokens_per_s"]
    limit = expect["bandwidth_gb_s"] * 1.1e9 / expect["decode_bytes_per_step"]
    assert limit > rates["one_sequence"] > rates["one_full_sequence"] > 0
    assert main(["doctor"], engine=str(engine)) == 0
    assert "decode tokens/s are at most" in capsys.readouterr().out


def test_bandwidth_is_that_of_what_is_read_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The areas have the requested size, shared by the threads, within limits."""
    from icc.runtime.executor.cpu import bandwidth

    sizes: list[int] = []
    real = bandwidth.np.ones
    monkeypatch.setattr(bandwidth, "_SIZE", 8 << 20)
    monkeypatch.setattr(bandwidth.np, "ones", lambda count, dtype: (sizes.append(8 * count), real(count, dtype))[1])
    for nbytes in (None, 4 << 20, 1, 1 << 40):
        assert bandwidth.read_bandwidth(2, nbytes) > 0
    assert sizes == [8 << 20] * 2 + [2 << 20] * 2 + [1 << 20] * 2 + [8 << 20] * 2


def test_a_file_that_changed_shows_in_its_hash_only(make_engine: Make, capsys: pytest.CaptureFixture[str]) -> None:
    engine = make_engine()
    library = next(engine.glob("**/*.so"))
    raw = bytearray(library.read_bytes())
    raw[-1] ^= 1
    library.write_bytes(raw)
    assert states(diagnose(engine))["files"] == "ok"
    assert main(["doctor", str(engine), "--hashes"]) == 32
    shown = capsys.readouterr().out
    assert "FAILED  files" in shown and library.name in shown and "cannot run the engine" in shown
    (engine / "stray").write_text("")
    assert states(diagnose(engine))["files"] == "failed"


def test_instructions_that_are_missing(make_engine: Make) -> None:
    found = diagnose(make_engine(libraries=[Library("level", "kernels/any.so", ["avx9"])]))
    [check] = [check for check in found.checks if check.state == "failed"]
    assert check.name == "instruction set" and "missing avx9" in check.found
    assert found.exit_code == 22 and not found.expect


def test_memory_that_is_short(make_engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    from icc.runtime.executor.cpu import memory

    engine = make_engine()
    manifest = read_manifest(engine)
    needs = footprint(decode_program((engine / "program.json").read_bytes(), ""), manifest.limits, "cpu")
    short = needs.kv_batch - 64
    for module in (doctor, memory):
        monkeypatch.setattr(module, "available_bytes", lambda: max(int(short / 0.4) + 1, needs.fixed + short))
    assert states(diagnose(engine))["KV cache"] == "warning"
    monkeypatch.setattr(memory, "available_bytes", lambda: 100)
    assert states(found := diagnose(engine))["memory"] == "failed" and found.exit_code == 23


def test_no_tokenizer_and_no_server(make_engine: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    found = diagnose(make_engine(tokenizer_dir=None))
    assert states(found)["tokenizer"] == states(found)["server"] == "warning" and found.exit_code == 0


def test_gpus(gpu_engine: Path, make_engine: Make) -> None:
    found = diagnose(gpu_engine, cuda=gpu())
    assert found.exit_code == 0 and found.expect["bandwidth_gb_s"] == 3350
    assert found.expect["sequences_of_full_length"] >= 1

    def none(backend: str) -> Cuda:
        raise DeviceError("this machine has no CUDA driver")

    for cuda, code, words in (
        (none, 25, "no CUDA driver"),
        (gpu(replace(H100, capability=(8, 9), name="NVIDIA L4")), 25, "NVIDIA L4 (sm_89)"),
        (gpu(replace(H100, driver_version=12040)), 27, "CUDA 12.4"),
        (gpu(replace(H100, free_bytes=1 << 10)), 23, "GPU memory"),
    ):
        found = diagnose(gpu_engine, cuda=cuda)
        assert found.exit_code == code and not found.expect
        assert words in next(check.found for check in found.checks if check.state == "failed")
    hip = make_engine("hip.engine", target="mi300x", backend="hip", gpu=GpuFacts("gfx942", 0), libraries=[])
    [failed] = [check for check in diagnose(hip, cuda=gpu()).checks if check.state == "failed"]
    assert failed.exit_code == 25 and "was compiled for mi300x (gfx942), this GPU is NVIDIA H100" in failed.found
    found = diagnose(hip, cuda=gpu(replace(H100, capability=(9, 4), name="AMD Instinct MI300X")))
    assert found.exit_code == 0 and any("MI300X (gfx94x)" in check.found for check in found.checks)


def test_the_bandwidth_of_a_gpu() -> None:
    facts = {"CLOCK_RATE": 2619000, "BUS_WIDTH": 5120}  # an H100's
    device = object.__new__(Cuda)
    device.api, device._device = SimpleNamespace(CUdevice_attribute=_Names()), 0
    device.call = lambda name, kind, number: next(v for k, v in facts.items() if kind.endswith(k))  # type: ignore[method-assign]
    assert device.bandwidth() == pytest.approx(3352, abs=1)


class _Names:
    def __getattr__(self, name: str) -> str:
        return name


def test_what_is_no_engine(tmp_path: Path) -> None:
    assert main(["doctor", str(tmp_path)]) == 20
