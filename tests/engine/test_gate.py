"""--gate measures the built engine before it is written; canary prompts detect a machine on which its answers are
wrong."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import icc
import msgspec
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from icc.compiler import calibration, gates
from icc.compiler.cli import main
from icc.compiler.engine import directory
from icc.compiler.engine.digests import file_entry
from icc.compiler.errors import GateError, UsageError
from icc.compiler.gates import Gate, parse_gates
from icc.compiler.measure.gate import Loss
from icc.runtime.answers import deviation
from icc.runtime.commands.inspect import describe_engine
from icc.runtime.errors import WrongAnswersError
from icc.runtime.format.canaries import Canary
from icc.runtime.format.load import read_manifest


def test_conditions_are_read() -> None:
    assert parse_gates(["ppl=2%", "kl=0.01,ppl=0.5"]) == (Gate("ppl", 0.02), Gate("kl", 0.01), Gate("ppl", 0.5))
    assert [str(gate) for gate in parse_gates(["ppl=2%,kl=0.01"])] == ["ppl=2%", "kl=0.01"]


@pytest.mark.parametrize("text", ["", "ppl", "ppl=", "ppl=-1%", "kl=2%", "speed=3", "ppl=nan", "kl=inf", "ppl=2%%"])
def test_what_is_no_condition_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not a condition"):
        parse_gates([text])


def test_two_is_not_taken_for_two_percent() -> None:
    with pytest.raises(UsageError, match="would let perplexity rise by 200 %") as caught:
        parse_gates(["ppl=2"])
    assert caught.value.hint == "for 2 %: --gate ppl=2%; if it is meant: --gate ppl=200%"


def test_the_loss_is_what_textbooks_say() -> None:
    rows, other = torch.randn(2, 5, 11, generator=torch.Generator().manual_seed(0)).unbind()
    ids, loss = [3, 1, 4, 1, 5], Loss()
    loss.add(ids, rows[:2], other[:2])
    loss.add(ids, rows[2:], other[2:], start=2)
    p, q = rows.log_softmax(-1), other.log_softmax(-1)
    kl = torch.nn.functional.kl_div(q, p, reduction="batchmean", log_target=True)
    assert loss.mean_kl == pytest.approx(float(kl), rel=1e-5)
    nll = [torch.nn.functional.cross_entropy(x[:-1], torch.tensor(ids[1:])).item() for x in (rows, other)]
    assert loss.increase == pytest.approx(math.exp(nll[1] - nll[0]) - 1, rel=1e-5)


@pytest.fixture(scope="module")
def model(compiled: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny llama with a tokenizer of single letters."""
    from tokenizers import Tokenizer, models

    folder = tmp_path_factory.mktemp("gate") / "model"
    shutil.copytree(compiled("llama").checkpoint, folder)
    letters = {chr(32 + i): i for i in range(95)}
    Tokenizer(models.BPE(letters, [])).save(str(folder / "tokenizer.json"))
    return folder


def test_the_bundled_text_is_not_what_calibration_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    count = 90_000
    for module in (gates, calibration):
        monkeypatch.setattr(module, "tokenize", lambda text, file: list(range(count)))
    found = gates.gate_sequences(None, Path("tokenizer.json"), count, 1, 4096)
    assert all(window[0] == 1 and len(window) == 512 for window in found) and len(found) == 7
    read = {
        token for ids in calibration.load_calibration(None, Path("tokenizer.json"), count).sequences for token in ids
    }
    assert not read & {token for window in found for token in window[1:]}
    whole = gates.gate_sequences(calibration.DEFAULT_TEXT, Path("tokenizer.json"), count, None, 64)
    assert [token for window in whole for token in window] == list(range(count)) and max(map(len, whole)) == 64


def test_an_engine_that_loses_too_much_is_not_written(model: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 4)
    arguments = ["compile", model, "-o", tmp_path / "e.engine", "--target", "native", "--quant", "rtn4"]
    arguments += ["--gate", "kl=0.00001", "--gate-text", text]
    result = CliRunner().invoke(main, [str(a) for a in arguments])
    assert result.exit_code == GateError.exit_code, result.output
    [line] = [line for line in result.output.splitlines() if line.startswith("error:")]
    assert "--gate kl=1e-05: the mean KL divergence per token is 0." in line and "proj.weight" in line
    assert "hint: --keep 'model." in result.output and "Traceback" not in result.output
    assert [p.name for p in tmp_path.iterdir()] == ["text.txt"]


def test_what_an_engine_loses_is_in_its_manifest(model: Path, tmp_path: Path) -> None:
    engine = icc.compile(model, tmp_path / "e.engine", target="native", quant="rtn4", gate=("ppl=200%", "kl=3"))
    facts = describe_engine(engine)["gate"]
    assert facts == msgspec.to_builtins(read_manifest(engine).gate)
    assert facts["asked"] == ["ppl=200%", "kl=3"] and facts["text"] == "bundled" and facts["tokens"] > 700  # type: ignore[index]
    assert 0 < facts["kl"] < 3  # type: ignore[index]
    increase = facts["perplexity"] / facts["reference_perplexity"] - 1  # type: ignore[index]
    assert increase == pytest.approx(facts["perplexity_increase"], abs=1e-4)  # type: ignore[index]
    with icc.load(engine, threads=1, verify_answers=True) as llm:
        assert llm.generate("abc", icc.SamplingParams(max_tokens=2))


def test_gates_that_nothing_can_be_measured_for(model: Path, tmp_path: Path) -> None:
    for options, words in (
        ({"gate": ("ppl=2%",), "target": "mi300x"}, "cannot run on this machine"),
        ({"gate": ("ppl=2%",), "task": "embed"}, "makes none"),
        ({"gate_text": model / "tokenizer.json"}, "--gate-text is for --gate"),
    ):
        with pytest.raises(UsageError, match=words):
            icc.compile(model, tmp_path / "e.engine", **options)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def broken(compiled: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An engine with the wrong weights for its kernels, though every hash is right."""
    engine = tmp_path_factory.mktemp("broken") / "e.engine"
    shutil.copytree(compiled("llama", quant="rtn4").engine, engine)
    manifest = read_manifest(engine)
    file = engine / manifest.main.weights
    content = bytearray(file.read_bytes())
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    begin, end = next(v["data_offsets"] for name, v in header.items() if "layers.1.mlp.down_proj" in name)
    codes = np.frombuffer(content, np.uint8)[8 + size + begin : 8 + size + end]
    codes[len(codes) // 2 :] ^= 0x44
    file.write_bytes(content)
    files = {**manifest.files, manifest.main.weights: file_entry(file)}
    directory.seal(engine, msgspec.structs.replace(manifest, files=files))
    return engine


def test_kernels_that_answer_wrongly_are_refused_at_load(broken: Path, compiled: Callable[..., Any]) -> None:
    with icc.load(broken, threads=1):
        pass  # loads if the check is not requested
    with pytest.raises(WrongAnswersError, match="wrong answers on this machine: canary prompt 0") as caught:
        icc.load(broken, threads=1, verify_answers=True)
    assert caught.value.exit_code == 46 and not caught.value.found <= caught.value.allowed
    icc.load(compiled("llama", quant="rtn4").engine, threads=1, verify_answers=True).close()


def test_a_server_with_such_kernels_never_gets_ready(broken: Path) -> None:
    command = [sys.executable, "-m", "icc", "serve", str(broken), "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == WrongAnswersError.exit_code, done.stderr
    assert "error: the engine gives wrong answers on this machine" in done.stderr


def test_one_position_that_is_off_is_no_wrong_kernel_but_numbers_that_are_none_are() -> None:
    wanted = np.arange(32.0, dtype=np.float32).reshape(4, 8)
    canary = Canary([1, 2, 3, 4], [0, 1, 2, 3], [list(range(8))] * 4, wanted.tolist())
    assert deviation(wanted, canary) == 0
    off = wanted.copy()
    off[2] = off[2, ::-1]
    assert deviation(off, canary) == 0
    off[1:] = off[1:, ::-1]
    assert deviation(off, canary) > 0.5
    off[0, 0] = np.nan
    assert math.isnan(deviation(off, canary))
