"""Engines of several targets: shared files, the target that a machine uses, and how commands treat them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import icc
import pytest
from icc.compiler.cli import main as icc_main
from icc.compiler.engine.joining import join_engines
from icc.compiler.errors import WriteError
from icc.compiler.packing import pack_engine, pack_layout, unpack_engine
from icc.compiler.signing import make_keys, sign_engine
from icc.runtime.choosing import of_this_machine
from icc.runtime.cli.commands import main
from icc.runtime.commands.doctor import diagnose
from icc.runtime.errors import DeviceError, EngineChangedError, EngineFormatError, SignatureError, UsageError
from icc.runtime.executor.cuda import compat
from icc.runtime.executor.cuda.driver import DeviceFacts
from icc.runtime.format.load import open_engine, read_manifest, read_targets
from icc.runtime.format.manifest import GpuFacts, Library
from icc.runtime.format.present import engine_name
from icc.runtime.options import LoadOptions

Make = Callable[..., Path]
PROMPT = ["-p", "abc", "--max-tokens", "4"]
H100 = DeviceFacts("NVIDIA H100 80GB HBM3", (9, 0), 12080, 70 << 30, 80 << 30)
GPUS = {
    "h100": {"backend": "cuda", "gpu": GpuFacts("sm_90", 12000)},
    "h200": {"backend": "cuda", "gpu": GpuFacts("sm_90", 12000)},
    "mi300x": {"backend": "hip", "gpu": GpuFacts("gfx942", 0)},
}


@pytest.fixture
def make_several(make_engine: Make, tmp_path: Path) -> Make:
    """Joins toy engines for the named targets; `changes` apply to the CPU's engine."""

    def make(*targets: str, embed: bool = False, name: str = "toy.engine", **changes: Any) -> Path:
        parts: dict[str, Path] = {}
        for target in targets:
            facts = {**GPUS[target], "libraries": []} if target in GPUS else changes
            parts[target] = make_engine(f"parts/{target}", embed=embed, target=target, **facts)
        (tmp_path / name).mkdir()
        join_engines(parts, tmp_path / name)
        shutil.rmtree(tmp_path / "parts")
        return tmp_path / name

    return make


@pytest.fixture
def several(make_several: Make) -> Path:
    return make_several("h100", "cpu", "mi300x")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Simulates a machine with these GPUs: lists of their facts, by the name of the back end."""

    def has(**gpus: list[DeviceFacts]) -> None:
        def open_gpu(backend: str, ordinal: int = 0) -> Any:
            if backend not in gpus:
                raise DeviceError(f"this machine has no driver for {backend}", "")
            if ordinal >= len(gpus[backend]):
                raise DeviceError(f"there is no GPU {ordinal}", "")
            return SimpleNamespace(facts=lambda: gpus[backend][ordinal], close=lambda: None)

        monkeypatch.setattr(compat, "open_gpu", open_gpu)

    has()
    return has


def taken(engine: Path, **options: Any) -> str:
    return Path(of_this_machine(LoadOptions(engine, **options)).path).name


def test_equal_tensors_and_files_are_stored_once(several: Path) -> None:
    targets = read_targets(several)
    assert targets is not None and list(targets.targets) == ["h100", "cpu", "mi300x"]
    places = [entry.files for entry in targets.targets.values()]
    assert {files["tokenizer/tokenizer.json"] for files in places} == {"tokenizer/tokenizer.json"}
    for target in targets.targets:
        manifest = read_manifest(several / target)
        assert manifest.target == target and manifest.main.shared == ["shared/h100+cpu+mi300x.safetensors"]
    assert len(list(several.rglob("*.safetensors"))) == 2  # an own one, too, without tensors: all three are alike
    with icc.load(several / "cpu") as llm:
        assert llm.generate([[5]], icc.SamplingParams(max_tokens=3))[0].token_ids == (6, 7, 8)


def test_other_tensors_stay_each_targets_own(make_several: Make) -> None:
    engine = make_several("h100", "cpu", "h200", rule=1)
    assert read_manifest(engine / "cpu").main.shared == []
    assert read_manifest(engine / "h200").main.shared == ["shared/h100+h200.safetensors"]
    with icc.load(engine) as llm, pytest.raises(UsageError, match="holds several targets: h100, cpu, h200"):
        assert llm.manifest.target == "cpu"
        open_engine(engine)


def test_a_machine_takes_its_gpus_target_else_its_cpus(several: Path, machine: Callable[..., None]) -> None:
    assert taken(several) == "cpu"
    machine(cuda=[H100])
    assert taken(several) == "h100" == taken(several, device=0)
    machine(hip=[DeviceFacts("AMD Instinct MI300X", (9, 4), 0, 1, 1)])
    assert taken(several) == "mi300x"
    machine(cuda=[DeviceFacts("NVIDIA A100", (8, 0), 12080, 1, 1)])
    assert taken(several) == "cpu"
    machine(cuda=[DeviceFacts("NVIDIA H100", (9, 0), 11040, 1, 1)])  # its driver is too old
    assert taken(several) == "cpu"


def test_of_two_targets_of_an_architecture_the_gpus_own_is_taken(
    make_several: Make, machine: Callable[..., None]
) -> None:
    engine = make_several("h100", "h200")
    machine(cuda=[H100, DeviceFacts("NVIDIA H200", (9, 0), 12080, 1, 1), DeviceFacts("GH200", (9, 0), 12080, 1, 1)])
    assert [taken(engine, device=number) for number in (0, 1, 2)] == ["h100", "h200", "h100"]


def test_what_is_asked_for_is_taken_or_refused(several: Path, machine: Callable[..., None]) -> None:
    machine(cuda=[H100])
    assert taken(several, target="cpu") == "cpu"
    with pytest.raises(UsageError, match="no such target") as error:
        taken(several, target="b200")
    assert error.value.hint == "it has: h100, cpu, mi300x"
    with pytest.raises(DeviceError, match=r"h100: there is no GPU 3; cpu: device = 3 is a GPU's; mi300x: .*hip"):
        taken(several, device=3)
    with pytest.raises(UsageError, match="is for cpu alone"):
        taken(several / "cpu", target="h100")
    assert taken(several / "cpu", target="cpu") == "cpu"
    with pytest.raises(UsageError, match="target = 5"):
        LoadOptions(several, target=5)  # type: ignore[arg-type]


def test_where_none_runs_all_reasons_are_told(make_several: Make, machine: Callable[..., None]) -> None:
    engine = make_several("h100", "cpu", libraries=[Library("level", "kernels/any.so", ["avx9"])])
    with pytest.raises(DeviceError, match=r"runs none .* h100: .*no driver for cuda; cpu: .*missing avx9"):
        icc.load(engine)
    found = diagnose(engine)
    assert [check.state for check in found.checks] == ["failed"] and found.exit_code == DeviceError.exit_code


def test_the_doctor_says_which_and_why(
    several: Path, machine: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", str(several)]) == 0
    said = capsys.readouterr().out
    assert "compiled for h100, cpu, mi300x" in said
    assert "target: cpu is taken, as this CPU has any; h100: this machine has no driver for cuda" in said
    assert "decode tokens/s are at most" in said
    machine(cuda=[H100])
    gpu = SimpleNamespace(facts=lambda: H100, bandwidth=lambda: 3350.0, close=lambda: None)
    found = diagnose(several, cuda=lambda backend: gpu)
    assert found.checks[0].found.startswith("h100 is taken, as its GPU is here: NVIDIA H100 80GB HBM3; cpu: ")


@pytest.mark.parametrize("form", ["engine", "icc"])
def test_every_command_takes_it_or_one_of_its_targets(
    form: str, several: Path, tmp_path: Path, machine: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    engine = several
    if form == "icc":
        pack_engine(several, engine := tmp_path / "toy.icc")

    def said(*command: str, code: int = 0) -> str:
        assert icc_main.run([*command], "icc") == code
        shown = capsys.readouterr()
        return shown.err if code else shown.out

    for path in (str(engine), f"{engine}/cpu"):
        assert said("run", path, *PROMPT) == "defg\n"
    assert said("run", str(engine), *PROMPT, "--target", "cpu") == "defg\n"
    assert "no driver for cuda" in said("run", str(engine), *PROMPT, "--target", "h100", code=DeviceError.exit_code)
    facts = json.loads(said("inspect", str(engine), "--json"))
    assert [one["target"] for one in facts["targets"].values()] == ["h100", "cpu", "mi300x"]
    assert 0 < facts["bytes_shared"] < facts["total_bytes"]
    assert "bytes_shared" in said("inspect", str(engine))
    rows = said("verify", str(engine)).splitlines()
    assert [row.partition(":")[0] for row in rows] == ["h100", "cpu", "mi300x"]
    assert list(json.loads(said("verify", str(engine), "--json"))["targets"]) == ["h100", "cpu", "mi300x"]
    assert "decode tok/s" in said(
        "bench", str(engine), "--batch-size", "1", "--prompt-tokens", "8", "--output-tokens", "2"
    )
    for command in (["inspect", "--memory"], ["report", "--html", "-"], ["tune"]):
        words = said(command[0], str(engine), *command[1:], code=UsageError.exit_code)
        assert f"holds several targets: h100, cpu, mi300x\nhint: name one of them: {engine}/h100" in words
    assert "weights" in said("inspect", f"{engine}/cpu", "--memory")
    assert "b200" in said("inspect", f"{engine}/b200", code=EngineFormatError.exit_code)


def test_the_engine_itself_runs_on_a_machine_without_icc(make_several: Make, tmp_path: Path) -> None:
    engine = make_several("cpu", "h100", embed=True)
    pack_engine(engine, tmp_path / "toy.icc")
    for path in (engine, tmp_path / "toy.icc"):
        command = [sys.executable, str(path)]
        done = subprocess.run([*command, "run", *PROMPT], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (0, "defg\n"), done.stderr
        told = subprocess.run([*command, "run", "--help"], capture_output=True, text=True, check=True).stdout
        assert "--target" in told and "--threads" in told and "--device" in told


def test_one_file_a_layout_and_back_are_the_same_bytes(several: Path, tmp_path: Path) -> None:
    pack_engine(several, tmp_path / "toy.icc")
    unpack_engine(tmp_path / "toy.icc", tmp_path / "again.engine")
    pack_layout(several, tmp_path / "layout")
    unpack_engine(tmp_path / "layout", tmp_path / "third.engine")

    def contents(root: Path) -> dict[str, bytes]:
        return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}

    assert contents(several) == contents(tmp_path / "again.engine") == contents(tmp_path / "third.engine")


def test_a_target_alone_becomes_an_engine_of_its_own(several: Path, tmp_path: Path) -> None:
    unpack_engine(several / "cpu", tmp_path / "cpu.engine")
    assert read_targets(tmp_path / "cpu.engine") is None
    pack_engine(several / "cpu", tmp_path / "cpu.icc")
    for path in (tmp_path / "cpu.engine", tmp_path / "cpu.icc"):
        with icc.load(path) as llm:
            assert llm.generate("abc", icc.SamplingParams(max_tokens=4))[0].text == "defg"
    with pytest.raises(WriteError, match="is within the engine"):
        pack_engine(several / "cpu", several / "cpu.icc")


def test_the_name_of_the_model_is_the_engines(several: Path, tmp_path: Path) -> None:
    pack_engine(several, tmp_path / "toy.icc")
    assert engine_name(several / "cpu") == engine_name(several) == engine_name(tmp_path / "toy.icc" / "cpu") == "toy"


@pytest.mark.parametrize("form", ["engine", "icc"])
def test_each_target_is_signed(form: str, several: Path, tmp_path: Path, machine: Callable[..., None]) -> None:
    key = make_keys(tmp_path / "key")
    engine = several
    if form == "icc":
        pack_engine(several, engine := tmp_path / "toy.icc")
    public = str(tmp_path / "key.pub")
    with pytest.raises(SignatureError, match="is not signed"):
        icc.load(engine, require_signature=public)
    sign_engine(engine, key)
    with icc.load(engine, require_signature=public) as llm:
        assert llm.manifest.target == "cpu"
    assert main(["verify", str(engine), "--key", public]) == 0
    assert main(["verify", f"{engine}/h100", "--key", public]) == 0
    if form == "engine":
        other = make_keys(tmp_path / "other")
        sign_engine(engine / "cpu", other)  # of one target only
        with pytest.raises(SignatureError, match=f"is by key {other.public.name}, not by"):
            icc.load(engine, require_signature=public)


@pytest.mark.parametrize("place", ["shared/h100+cpu+mi300x.safetensors", "cpu/engine.json", "engine.json"])
def test_a_change_shows(place: str, several: Path) -> None:
    raw = bytearray((several / place).read_bytes())
    raw[raw.rindex(b"6" if place.endswith("json") else b"\2")] ^= 1
    (several / place).write_bytes(raw)
    with pytest.raises(EngineFormatError):
        icc.load(several)
    assert main(["verify", str(several)]) in (EngineChangedError.exit_code, EngineFormatError.exit_code)


def test_what_belongs_to_no_target_is_found(several: Path) -> None:
    (several / "stray").write_text("")
    with pytest.raises(EngineFormatError, match="stray is not part of the engine"):
        icc.load(several)


def test_a_target_of_another_compile_is_found(several: Path, make_several: Make) -> None:
    other = make_several("h100", "cpu", "mi300x", name="other.engine", max_seq_len=32)
    shutil.copyfile(other / "cpu" / "engine.json", several / "cpu" / "engine.json")
    assert main(["verify", str(several)]) == EngineFormatError.exit_code
