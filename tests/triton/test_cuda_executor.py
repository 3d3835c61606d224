"""The CUDA executor over a fake driver: graphs, padding, overlap, refusals; nothing leaks."""

from __future__ import annotations

import re
import tarfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from fake_cuda import FakeDriver, FakeHip, OnDisk
from icc import SamplingParams
from icc.runtime.errors import CapacityError, DeviceError
from icc.runtime.executor.cuda.device import CudaDevice
from icc.runtime.executor.cuda.driver import Cuda
from icc.runtime.executor.hip.bindings import HipApi
from icc.runtime.executor.player import Player
from icc.runtime.llm import LLM
from icc.runtime.opening import begin
from icc.runtime.options import LoadOptions
from sizes import size_of

pytestmark = pytest.mark.slow


def bindings_of(driver: FakeDriver, maker: str) -> Any:
    """The driver itself, or wrapped in the API of HIP."""
    return driver if maker == "cuda" else HipApi(FakeHip(driver))


PROMPTS = [[5, 9, 23, 7, 11], [8, 3], [5, 9, 23, 7, 11, 40, 41, 42, 43, 44, 45, 46], [77]]


def test_the_same_tokens_as_interpreted_and_nothing_leaks(on_disk: OnDisk) -> None:
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    with on_disk.memory.llm() as llm:
        expected = [c.token_ids for c in llm.generate(PROMPTS, params)]
    executor, driver = on_disk.executor()
    driver.calls.clear()
    with LLM(on_disk.engine.manifest, executor) as llm:
        found = [c.token_ids for c in llm.generate(PROMPTS, params)]
    assert found == expected
    there, back = (driver.calls.count(f"cuMemcpy{way}Async") for way in ("HtoD", "DtoH"))
    assert 0 < back <= there, "one copy there and one back per step"
    assert driver.graph_launches > 0 and driver.eager_launches > 0
    assert driver.dependent == {True}
    assert not driver.live and not driver.memory


def test_the_same_under_the_names_of_hip(on_disk: OnDisk) -> None:
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    with on_disk.memory.llm() as llm:
        expected = [c.token_ids for c in llm.generate(PROMPTS[:2], params)]
    driver = FakeDriver(on_disk.table)
    executor = Player(CudaDevice(on_disk.engine, cuda=Cuda(bindings=HipApi(FakeHip(driver)))))
    with LLM(on_disk.engine.manifest, executor) as llm:
        assert [c.token_ids for c in llm.generate(PROMPTS[:2], params)] == expected
    assert driver.graph_launches > 0 and driver.eager_launches > 0 and not driver.live and not driver.memory
    there, back = (driver.calls.count(f"cuMemcpy{way}Async") for way in ("HtoD", "DtoH"))
    assert 0 < back <= there, "one copy there and one back per step"
    assert driver.dependent == {False}
    driver = FakeDriver(on_disk.table)
    driver.fail = "cuMemAlloc"
    with pytest.raises(DeviceError, match=r"hipMalloc failed: an illegal") as found:
        CudaDevice(on_disk.engine, cuda=Cuda(bindings=HipApi(FakeHip(driver))))
    assert "rocm-smi" in found.value.hint and not driver.live


@pytest.mark.parametrize("maker", ["cuda", "hip"])
def test_beams_copy_blocks_within_the_device(maker: str, on_disk: OnDisk) -> None:
    params = SamplingParams(beams=3, n=2, max_tokens=3, ignore_eos=True)
    with on_disk.memory.llm() as llm:
        expected = [(c.token_ids, c.score) for c in llm.generate(PROMPTS[:1], params)]
    driver = FakeDriver(on_disk.table)
    executor = Player(CudaDevice(on_disk.engine, cuda=Cuda(bindings=bindings_of(driver, maker))))
    with LLM(on_disk.engine.manifest, executor) as llm:
        assert [(c.token_ids, c.score) for c in llm.generate(PROMPTS[:1], params)] == expected
    assert driver.calls.count("cuMemcpyDtoDAsync") >= 2
    assert not driver.live and not driver.memory


def test_logits_come_back_whatever_the_number_of_rows(on_disk: OnDisk) -> None:
    with on_disk.memory.llm() as llm:
        expected = llm.logits(PROMPTS[2])
    executor, _ = on_disk.executor()
    with LLM(on_disk.engine.manifest, executor) as llm:
        np.testing.assert_array_equal(llm.logits(PROMPTS[2]), expected)


def test_a_seed_decides_and_the_host_samples_what_the_device_cannot(on_disk: OnDisk) -> None:
    warm = SamplingParams(max_tokens=4, temperature=1.0, seed=7, ignore_eos=True, logprobs=2)
    penalized = SamplingParams(max_tokens=4, temperature=0.0, presence_penalty=0.5, ignore_eos=True)
    executor, _ = on_disk.executor()
    with LLM(on_disk.engine.manifest, executor) as llm:
        alone = llm.generate([PROMPTS[0]], warm)[0]
        beside = llm.generate([PROMPTS[1], PROMPTS[0]], [penalized, warm])
    assert beside[1].token_ids == alone.token_ids and alone.logprobs is not None
    assert all(len(entry.top) == 2 for entry in alone.logprobs)
    assert len(beside[0].token_ids) == 4


@pytest.mark.parametrize(
    ("driver", "error", "words"),
    [
        ({"capability": (8, 0)}, DeviceError, r"h100 \(sm_90\).*Fake GPU \(sm_80\)"),
        ({"capability": (10, 0)}, DeviceError, "sm_100"),
        ({"version": 11040}, DeviceError, r"supports CUDA 11\.4.*needs 12\.0"),
        ({"free": 10 << 10}, CapacityError, "GiB of GPU memory.*free of 16.00 GiB"),
        ({"count": 0}, DeviceError, "has no GPU"),
    ],
)
@pytest.mark.parametrize("maker", ["cuda", "hip"])
def test_what_cannot_run_is_refused_before_weights_are_read(
    maker: str, on_disk: OnDisk, driver: dict[str, Any], error: type[Exception], words: str
) -> None:
    fake = FakeDriver(on_disk.table, **driver)
    engine = SimpleNamespace(**{**vars(on_disk.engine), "weights": None})
    with pytest.raises(error, match=words):
        Player(CudaDevice(engine, cuda=Cuda(bindings=bindings_of(fake, maker))))
    assert not fake.live and not fake.memory


def test_a_driver_failure_names_the_call(on_disk: OnDisk) -> None:
    executor, driver = on_disk.executor()
    driver.fail = "cuGraphLaunch"
    with LLM(on_disk.engine.manifest, executor) as llm, pytest.raises(DeviceError, match=r"cuGraphLaunch.*illegal"):
        llm.generate([PROMPTS[3]], SamplingParams(max_tokens=4, ignore_eos=True))


@pytest.mark.parametrize("maker", ["cuda", "hip"])
def test_whichever_call_fails_everything_is_released(maker: str, on_disk: OnDisk) -> None:
    """Kernels do nothing here; only an object whose own release failed may be left."""
    params = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)

    def use(driver: FakeDriver) -> None:
        executor = Player(CudaDevice(on_disk.engine, cuda=Cuda(bindings=bindings_of(driver, maker))))
        with LLM(on_disk.engine.manifest, executor) as llm:
            llm.generate(PROMPTS[:2], params)

    whole = FakeDriver(on_disk.table, dry=True)
    use(whole)
    assert not whole.live and not whole.memory and not whole.queue
    every = size_of("driver_fault_every")
    for number in sorted({*range(0, len(whole.calls), every), len(whole.calls) - 1}):
        driver = FakeDriver(on_disk.table, dry=True)
        driver.fail_at = number
        with suppress(DeviceError):  # a step that fails once is retried
            use(driver)
        left = sum(driver.live.values()) + len(driver.memory)
        freeing = re.search("Free|Destroy|Unload|Release", whole.calls[number]) is not None
        assert left == freeing, f"call {number}, {whole.calls[number]}: {dict(driver.live)}, {len(driver.memory)} left"


@pytest.mark.parametrize("ordinal", [None, 0, 1, 2])
def test_a_gpu_is_chosen_by_its_number(ordinal: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake, asked = FakeDriver({}, count=2), []
    archive = Path(__file__).parents[1] / "runtime" / "golden" / "engines.v2.tar.xz"
    with tarfile.open(archive) as stream:
        stream.extractall(tmp_path, filter="data")
    fake.cuDeviceGet = lambda number: (0, asked.append(number) or number)  # type: ignore[method-assign]
    monkeypatch.setattr("icc.runtime.executor.cuda.driver.load_bindings", lambda: fake)
    options = LoadOptions(tmp_path / "h100.engine", device=ordinal)
    if ordinal == 2:
        with pytest.raises(DeviceError, match="there is no GPU 2"):
            begin(options)
        return
    begun = begin(options)
    assert begun.gpu is not None and asked == [ordinal or 0]
    begun.gpu.close()
    begun.opening.drop()
    assert not fake.live


def test_without_a_driver_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Callable[..., Any]:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr("importlib.import_module", missing)
    with pytest.raises(DeviceError, match="cuda-bindings cannot be imported"):
        Cuda()
