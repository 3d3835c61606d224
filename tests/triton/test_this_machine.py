"""`--target auto`: the GPU of this machine, as reported by its driver (here a fake one)."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_cuda import FakeDriver, FakeHip
from icc.compiler.options import CompileOptions
from icc.compiler.targets import TARGETS, explained, find_target
from icc.runtime import this_gpu
from icc.runtime.errors import DeviceError, IccError
from icc.runtime.executor.cuda.driver import Cuda
from icc.runtime.executor.hip.bindings import HipApi

NVIDIA = {
    "NVIDIA H100 80GB HBM3": ((9, 0), "h100"), "NVIDIA H100 PCIe": ((9, 0), "h100"), "NVIDIA H200": ((9, 0), "h200"),
    "NVIDIA A100-SXM4-80GB": ((8, 0), "a100"), "NVIDIA A10G": ((8, 6), "a10g"), "NVIDIA L4": ((8, 9), "l4"),
    "NVIDIA L40S": ((8, 9), "l40s"), "NVIDIA GeForce RTX 4060 Ti": ((8, 9), "rtx4060ti"),
    "NVIDIA GeForce RTX 5090": ((12, 0), "rtx5090"), "NVIDIA B200": ((10, 0), "b200"),
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": ((12, 0), "rtxpro6000"), "NVIDIA GB10": ((12, 1), "gb10"),
    "NVIDIA Thor": ((11, 0), "thor"),
}  # fmt: skip
AMD = {
    "AMD Instinct MI300X": ((9, 4), "mi300x"), "AMD Instinct MI355X OAM": ((9, 5), "mi355x"),
    "AMD Radeon RX 7900 XTX": ((11, 0), "rx7900xtx"), "AMD Radeon RX 9070 XT": ((12, 0), "rx9070xt"),
}  # fmt: skip


def machine(monkeypatch: pytest.MonkeyPatch, signs: Path, **drivers: FakeDriver | DeviceError) -> None:
    """Make this machine have the GPUs of these drivers; a DeviceError is raised when its driver is opened. signs: the
    path that indicates a GPU."""

    def open_gpu(backend: str) -> Cuda:
        found = drivers.get(backend, DeviceError("this machine has no driver", ""))
        if isinstance(found, DeviceError):
            raise found
        return Cuda(bindings=found if backend == "cuda" else HipApi(FakeHip(found)))

    monkeypatch.setattr(this_gpu, "open_gpu", open_gpu)
    monkeypatch.setattr(this_gpu, "SIGNS", {backend: signs / backend for backend in ("cuda", "hip")})


def chosen() -> str:
    """The target that `--target auto` chooses."""
    return CompileOptions(model=Path("m"), output=Path("o"), target="auto").target


@pytest.mark.parametrize("name", NVIDIA)
def test_the_target_of_a_gpu_is_found_by_its_name(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    capability, target = NVIDIA[name]
    driver = FakeDriver({}, capability, name=name)
    machine(monkeypatch, tmp_path, cuda=driver)
    assert chosen() == find_target("auto").name == target
    assert not +driver.live  # the device is released


@pytest.mark.parametrize("name", AMD)
def test_so_is_that_of_a_gpu_of_amd(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    capability, target = AMD[name]
    machine(monkeypatch, tmp_path, hip=FakeDriver({}, capability, name=name))
    assert chosen() == target


def test_a_machine_without_a_gpu_is_its_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, tmp_path)
    assert chosen() == "native" and TARGETS["native"].is_here
    assert "auto" in explained()


@pytest.mark.parametrize(
    ("name", "capability", "hint"),
    [
        ("NVIDIA L40", (8, 9), "rtx4090, rtx4060ti, l4, l40s"), ("NVIDIA GH200 480GB", (9, 0), "h100, h200"),
        ("Tesla V100", (7, 0), "there is none of its architecture"), ("NVIDIA H100", (8, 9), "rtx4090"),
    ],
)  # fmt: skip
def test_a_gpu_that_no_target_is_of_is_refused_in_a_line(
    name: str, capability: tuple[int, int], hint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(monkeypatch, tmp_path, cuda=FakeDriver({}, capability, name=name))
    with pytest.raises(IccError) as error:
        chosen()
    major, minor = capability
    assert error.value.message.endswith(f"GPU is {name} (sm_{major}{minor}), which no target is of")
    assert error.value.exit_code == 2 and hint in str(error.value.hint)


def test_a_gpu_that_cannot_be_used_is_not_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver shows it, but the runtime's bindings are not installed, or fail."""
    (tmp_path / "cuda").touch()
    machine(monkeypatch, tmp_path, cuda=DeviceError("cuda-bindings cannot be imported", "pip install"))
    with pytest.raises(IccError, match="cuda-bindings cannot be imported"):
        chosen()
