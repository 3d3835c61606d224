"""`icc compile` for every named GPU target, on a machine without a GPU: objects of the right architecture."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from icc.compiler.backends.triton.kernels.table import TRITON_KERNELS
from icc.compiler.backends.triton.objects.compile import compile_specs
from icc.compiler.backends.triton.spec import Shape
from icc.compiler.backends.triton.tiling.choice import Tuner
from icc.compiler.cli import main
from icc.compiler.program.steps.rowwise import Softmax
from icc.compiler.targets import TARGETS
from icc.runtime.cli.commands import main as runtime_main
from icc.runtime.format.load import open_engine
from icc.runtime.format.manifest import Limits
from icc.runtime.format.operands import BufferOperand
from icc.runtime.format.programs import decode_program
from icc.runtime.report.facts import read_facts
from icc.runtime.report.page import report_page
from sizes import soak

pytestmark = pytest.mark.slow

GPUS = [name for name, target in TARGETS.items() if target.backend != "cpu"]
ALL = [(name, quant) for name in GPUS for quant in ("rtn4", "none")]
USUAL = [("h100", "rtn4"), ("mi300x", "none"), ("rtx5090", "rtn4")]
EM_CUDA, EM_AMDGPU = 190, 224
AMD = {0x4C: "gfx942", 0x4F: "gfx950", 0x41: "gfx1100", 0x4E: "gfx1201"}  # LLVM's EF_AMDGPU_MACH
SMALL = ("--max-seq-len", "32", "--max-batch-size", "2", "--max-step-tokens", "4")


def architecture(binary: bytes) -> str:
    """The architecture in the ELF header of a cubin or hsaco."""
    assert binary[:4] == b"\x7fELF"
    abi, machine, flags = binary[8], *struct.unpack_from("<H", binary, 18), *struct.unpack_from("<I", binary, 48)
    if machine == EM_CUDA:  # version 8 of the ABI (sm_100) has the SM's number one byte higher
        return f"sm_{flags & 0xFF if abi < 8 else flags >> 8 & 0xFF}"
    assert machine == EM_AMDGPU
    return AMD[flags & 0xFF]


@pytest.mark.parametrize(("target", "quant"), [*USUAL, *soak(*(pair for pair in ALL if pair not in USUAL))])
def test_every_target_compiles(target: str, quant: str, compiled: Callable[..., Any], tmp_path: Path) -> None:
    engine = tmp_path / "e"
    args = ["compile", str(compiled("llama", dtype="bfloat16").checkpoint), "-o", str(engine), "--target", target]
    result = CliRunner().invoke(main, [*args, "--quant", quant, *SMALL])
    assert result.exit_code == 0, result.output
    plan = decode_program((engine / "program.json").read_bytes(), "program.json").plan
    assert plan is not None and plan.objects
    for found in plan.objects.values():
        assert architecture((engine / found.file).read_bytes()) == TARGETS[target].arch
        assert (engine / found.file).with_suffix(".py").is_file()
        assert not any(fault.startswith("not shown") for fault in found.faults), (found.file, found.faults)
        assert found.registers > 0 and found.shared_bytes <= TARGETS[target].shared_memory_kib * 1024
    decoding = {launch.object for p in plan.phases if p.decode for many in p.launches.values() for launch in many}
    assert all(plan.objects[name].spill_bytes == 0 for name in decoding)
    resources = json.loads((engine / "report.json").read_text())["objects"]
    assert {row["object"] for row in resources} == set(plan.objects)
    assert "Kernel objects" in report_page(read_facts(engine))


@pytest.mark.parametrize("target", GPUS)
def test_every_target_has_its_assembler(target: str) -> None:
    """One small kernel for each target, because a whole engine takes long."""
    found = TARGETS[target]
    x, y = (BufferOperand(name, "bf16", 256) for name in "xy")
    kernel = TRITON_KERNELS.find(step := Softmax(kernel="softmax_0", x=x, y=y, outer=2, n=128))(step)
    specs = kernel.launches(Shape(1, True), Limits(32, 2, 16), Tuner(found))
    [compiled] = compile_specs(specs, found).values()
    assert architecture(compiled.binary) == found.arch and compiled.spill_bytes == 0


def test_a_gpu_engine_is_refused_here_in_words_and_can_be_inspected(
    compiled: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = compiled("llama", dtype="bfloat16").checkpoint
    for name in ("a", "b"):
        args = ["compile", str(checkpoint), "-o", str(tmp_path / name), "--target", "h100", "--quant", "rtn4", *SMALL]
        assert CliRunner().invoke(main, args).exit_code == 0
    assert runtime_main(["inspect", str(tmp_path / "a")]) == 0
    shown = capsys.readouterr().out
    assert "sm_90" in shown and "registers" in shown and "decode up to 2" in shown
    assert runtime_main(["run", str(tmp_path / "a"), "--ids", "1,2"]) == 25
    refusal = capsys.readouterr().err
    assert "error:" in refusal and "hint:" in refusal and "Traceback" not in refusal

    left, right = (open_engine(tmp_path / name) for name in ("a", "b"))
    assert left.manifest == right.manifest, "the same inputs give the same bytes"
