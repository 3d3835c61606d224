"""A written engine for two GPUs, and its processes, over fake drivers whose kernels do nothing."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import icc
import pytest
from icc.runtime.errors import DeviceError, EngineFormatError
from icc.runtime.executor.cuda.driver import Cuda
from icc.runtime.executor.cuda.ranked import GpuRanks, RankedCudaDevice
from icc.runtime.executor.open import Resources, open_executor
from icc.runtime.format.load import open_engine
from icc.runtime.llm import LLM
from rank_double import DryDriver

pytestmark = pytest.mark.slow

PARAMS = icc.SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def engine(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tmp_path_factory.mktemp("model")
    config = tiny.tiny_configs()["llama"]
    config.num_hidden_layers = 1
    tiny.save_tiny(config, model, dtype="bfloat16")
    limits = {"max_seq_len": 32, "max_batch_size": 1, "max_step_tokens": 4}
    return icc.compile(model, model / "engine", target="h100", tensor_parallel=2, **limits)


@pytest.fixture(autouse=True)
def doubles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GpuRanks, "module", "rank_double")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))


def loaded(path: Path) -> LLM:
    """The engine loaded by `icc.load`, on GPU 0 of a machine with eight."""
    opened = open_engine(path)
    executor = open_executor(opened, resources=Resources(gpu=Cuda(0, DryDriver())))
    return LLM(opened.manifest, executor)


def device_of(llm: LLM) -> RankedCudaDevice:
    device = llm.executor.device  # type: ignore[attr-defined]
    assert isinstance(device, RankedCudaDevice) and device.group is not None
    return device


def test_kernels_are_shared_and_weights_are_not(engine: Path) -> None:
    opened = open_engine(engine)
    plan = opened.program.plan
    assert plan is not None and opened.manifest.ranks == 2
    assert {name.split("_")[1] for name in plan.objects if name.startswith("all_")} == {"reduce", "gather"}
    assert not any(fault.startswith("not shown") for found in plan.objects.values() for fault in found.faults)
    own, other = (engine / name for name in ("weights.safetensors", "weights-1.safetensors"))
    assert own.stat().st_size == other.stat().st_size and own.read_bytes() != other.read_bytes()
    opened.close()


def test_a_rank_that_dies_ends_requests_and_the_engine_is_loaded_again(engine: Path) -> None:
    with loaded(engine) as llm:
        [pid] = device_of(llm).group.pids  # type: ignore[union-attr]
        os.kill(pid, signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(DeviceError, match="rank 1 has ended with -9: its part of the model is gone"):
            while time.monotonic() < began + 60:
                llm.generate([[1, 5, 9]], PARAMS)
    assert not Path(f"/proc/{pid}").exists()
    with loaded(engine) as llm:
        [pid] = device_of(llm).group.pids  # type: ignore[union-attr]
        assert Path(f"/proc/{pid}").exists()
    assert not Path(f"/proc/{pid}").exists()


def test_what_a_rank_ended_with_is_told_though_its_socket_is_gone_first(
    engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = GpuRanks._watch

    def late(self: GpuRanks, *args: Any) -> None:
        os.waitid(os.P_PID, args[1].pid, os.WEXITED | os.WNOWAIT)
        time.sleep(0.3)
        watch(self, *args)

    monkeypatch.setattr(GpuRanks, "_watch", late)
    with loaded(engine) as llm:
        [pid] = device_of(llm).group.pids  # type: ignore[union-attr]
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        with pytest.raises(DeviceError, match="rank 1 has ended with -9"):
            llm.generate([[1, 5, 9]], PARAMS)


def test_a_rank_that_cannot_start_says_why(engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ICC_RANK_FAULT", "start")
    with pytest.raises(EngineFormatError, match="rank 1: GPU 1 is full") as raised:
        loaded(engine)
    assert raised.value.hint == "free some"
