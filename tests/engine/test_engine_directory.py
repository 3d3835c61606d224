"""The engine directory: equal inputs give equal bytes, failures leave nothing, other machines get a reason."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import icc
import numpy as np
import pytest
from cpu_levels import runnable_amx
from icc.compiler.engine.manifest import end_token_ids
from icc.compiler.errors import OutputExistsError, TensorError, UsageError
from icc.compiler.generation import sampling_defaults
from icc.runtime.errors import EngineFormatError, MissingIsaError

pytestmark = pytest.mark.slow


def files(root: Path) -> dict[str, bytes]:
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


def icc_command(*args: object) -> list[str]:
    return [sys.executable, "-m", "icc.compiler.cli", *map(str, args)]


def test_same_inputs_give_the_same_bytes_and_progress_is_told(
    compiled: Callable[..., Any], tmp_path: Path, compiler_runs: None, caplog: pytest.LogCaptureFixture
) -> None:
    first = compiled("llama", quant="rtn4")
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(first.checkpoint, elsewhere)
    told: list[icc.CompileProgress] = []
    with caplog.at_level("INFO", "icc.compile"):
        second = icc.compile(elsewhere, tmp_path / "again.engine", target="native", quant="rtn4", progress=told.append)
    assert files(first.engine) == files(second)
    stages = ["trace", "optimize", "quantize", "answers", "lower", "kernels", "weights", "engine"]
    assert list(dict.fromkeys(now.stage for now in told)) == stages
    assert [text.split()[0] for text in caplog.messages if " took " in text] == stages
    weights = [now.share for now in told if now.stage == "weights" and now.share is not None]
    assert len(weights) > 5 and weights == sorted(weights) and weights[0] == 0 and weights[-1] < 1


def test_what_ends_a_text_is_also_what_the_tokenizer_calls_so(tmp_path: Path) -> None:
    """A fine-tuned model usually has its end of turn in tokenizer_config.json alone."""
    config, generation = {"eos_token_id": 5}, {"eos_token_id": [3, 4]}
    assert end_token_ids(tmp_path, config, {}) == [5] and end_token_ids(tmp_path, config, generation) == [3, 4]
    tokens = [{"id": 4, "content": "</s>"}, {"id": 9, "content": "<|im_end|>"}]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": tokens}))
    for name, expected in (
        ("<|im_end|>", [3, 4, 9]),
        ({"content": "</s>"}, [3, 4]),
        ("unknown", [3, 4]),
        (None, [3, 4]),
    ):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": name}))
        assert end_token_ids(tmp_path, config, generation) == expected


@pytest.mark.parametrize(
    ("generation", "alone", "in_conversations"),
    [
        ({}, None, 1.0),
        ({"temperature": 0.4}, None, 1.0),  # transformers is greedy here, and warns
        ({"do_sample": False}, 0.0, 0.0),
        ({"do_sample": True}, 1.0, 1.0),
        ({"do_sample": True, "temperature": 0.4, "top_k": 5}, 0.4, 0.4),
    ],
)
def test_what_the_checkpoint_says_of_sampling(
    generation: dict[str, Any], alone: float | None, in_conversations: float
) -> None:
    found = sampling_defaults(generation)
    assert (found.temperature, found.of_conversations().temperature) == (alone, in_conversations)
    assert found.top_k == found.of_conversations().top_k == generation.get("top_k")


def test_every_isa_level_runs_and_agrees(compiled: Callable[..., Any]) -> None:
    engine = compiled("llama", quant="rtn4", target="cpu").engine
    ids = list(range(3, 40))
    from icc.runtime.format.isa import cpu_flags
    from icc.runtime.format.load import read_manifest

    runnable = [lib.isa for lib in read_manifest(engine).main.libraries if set(lib.cpu_flags) <= set(cpu_flags())]
    assert "avx2" in runnable
    found = []
    for isa in runnable:
        with icc.load(engine, isa=isa) as llm:
            found.append(llm.logits(ids))
    assert all(np.abs(f - found[0]).max() <= 1e-4 * np.abs(found[0]).max() for f in found)
    with pytest.raises((MissingIsaError, UsageError)):
        icc.load(engine, isa="sse2")


def test_avx_vnni_is_named_where_the_cpu_has_it(compiled: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its library loads on any machine; Intel's client CPUs run it."""
    from icc.runtime.commands import doctor, inspect

    engine, flags = compiled("llama", quant="rtn4", target="cpu").engine, frozenset(("avx2", "fma", "f16c", "avx_vnni"))
    monkeypatch.setattr(doctor, "cpu_flags", lambda: flags)
    monkeypatch.setattr(inspect, "cpu_flags", lambda: flags)
    said = [check.found for check in doctor.diagnose(engine).checks]
    assert any(text.startswith("avxvnni, ") and text.endswith("not here: amx, avx512vnni, avx512") for text in said), (
        said
    )
    shown: Any = inspect.describe_engine(engine)["libraries"]
    here = {library["isa"]: library["runs_here"] for library in shown}
    assert here == {"amx": False, "avx512vnni": False, "avx512": False, "avxvnni": True, "avx2": True}


@pytest.mark.parametrize("allowed", [True, False])
def test_amx_is_named_where_the_system_allows_it(
    compiled: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, allowed: bool
) -> None:
    """Its library also loads on any machine; if the system refuses tiles, the next level runs and a line says why."""
    from icc.compiler.backends.cpu.isa import AMX
    from icc.runtime.commands import doctor, inspect
    from icc.runtime.format import isa

    engine, flags = compiled("llama", quant="rtn4", target="cpu").engine, frozenset(AMX.cpu_flags)
    monkeypatch.setattr(doctor, "cpu_flags", lambda: flags)
    monkeypatch.setattr(inspect, "cpu_flags", lambda: flags)
    monkeypatch.setattr(isa, "_tiles_allowed", lambda: allowed)
    said = [check.found for check in doctor.diagnose(engine).checks]
    refused = "" if allowed else "amx (the system refuses tile data), "
    best, end = "amx" if allowed else "avx512vnni", f"; not here: {refused}avxvnni"
    assert any(text.startswith(f"{best}, ") and text.endswith(end) for text in said), said
    shown: Any = inspect.describe_engine(engine)["libraries"]
    here = {library["isa"]: library["runs_here"] for library in shown}
    assert here == {"amx": allowed, "avx512vnni": True, "avx512": True, "avxvnni": False, "avx2": True}


def test_amx_gives_the_bits_and_tokens_of_avx512_vnni(
    compiled: Callable[..., Any], compiler_runs: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both levels run with the same model of their instructions, in one engine, and share its weights."""
    from icc.compiler.backends.cpu import backend

    found = runnable_amx()
    level = replace(found, quant_blocks=found.quant_blocks[:1], dense_blocks=found.dense_blocks[:1])
    by_vectors = replace(level, name="avx512vnni", tile_blocks=(), headers=level.headers[1:])
    monkeypatch.setattr(backend, "find_isas", lambda *asked: (level, by_vectors))
    engine = icc.compile(compiled("llama", quant="rtn4").checkpoint, tmp_path / "e", target="cpu", quant="rtn4")
    sources = {name: (engine / "kernels" / f"{name}.cpp").read_text() for name in ("amx", "avx512vnni")}
    assert "TilesInUse use(QUANT_Q4" in sources["amx"] and "TilesInUse" not in sources["avx512vnni"]
    found = []
    for isa in (None, "avx512vnni"):  # None: the best level, here AMX
        with icc.load(engine, isa=isa) as llm:
            [completion] = llm.generate(
                [list(range(3, 43))], icc.SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
            )
            found.append((llm.engine.library.isa, llm.logits(list(range(3, 43))), completion.token_ids))
    assert [isa for isa, *_ in found] == ["amx", "avx512vnni"]
    assert np.array_equal(found[0][1].view(np.uint8), found[1][1].view(np.uint8)) and found[0][2] == found[1][2]


def test_embedded_runtime_needs_no_icc(compiled: Callable[..., Any]) -> None:
    engine = compiled("llama", quant="rtn4").engine
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, str(engine), "run", "--ids", "5,6,7", "--max-tokens", "4", "--json"],
        capture_output=True, text=True, env=environment, cwd="/", check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert '"token_ids"' in done.stdout


def test_starting_an_engine_compiles_none_of_its_sources(compiled: Callable[..., Any], tmp_path: Path) -> None:
    """Their bytecode lies beside them; a changed source is compiled again instead of being ignored."""
    engine = tmp_path / "copy.engine"
    shutil.copytree(compiled("llama", quant="rtn4").engine, engine)
    script = """if True:
        import sys
        sys.addaudithook(lambda event, args: event == "compile" and print(args[1]))
        sys.dont_write_bytecode = True
        sys.path.insert(0, sys.argv[1])
        import runtime.cli.commands, runtime.loading, runtime.executor.cpu.device
    """

    def sources() -> list[str]:
        command = [sys.executable, "-c", script, str(engine)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
        return [line for line in done.stdout.splitlines() if line.startswith(str(engine))]

    assert sources() == []
    changed = engine / "runtime" / "requests" / "params.py"
    changed.write_text(changed.read_text() + "\n")
    assert sources() == [str(changed)]
    with pytest.raises(EngineFormatError, match=r"params\.py has "):
        icc.load(engine)


def test_an_existing_engine_is_kept_without_force(compiled: Callable[..., Any], tmp_path: Path) -> None:
    found = compiled("llama")
    checkpoint, out = found.checkpoint, tmp_path / "e.engine"
    shutil.copytree(found.engine, out)
    before = files(out)
    with pytest.raises(OutputExistsError, match="exists"):
        icc.compile(checkpoint, out, target="native")
    icc.compile(checkpoint, out, target="native", force=True)
    assert files(out) == before
    precious = tmp_path / "precious"
    precious.mkdir()
    with pytest.raises(OutputExistsError, match="not an engine"):
        icc.compile(checkpoint, precious, force=True)


def test_a_failed_compile_leaves_nothing(tiny: Any, tmp_path: Path) -> None:
    model = tmp_path / "model"
    tiny.save_tiny(tiny.tiny_configs()["llama"], model)
    _poison(model / "model.safetensors", "model.layers.1.mlp.down_proj.weight")
    with pytest.raises(TensorError, match=r"model\.layers\.1\.mlp\.down_proj\.weight.*NaN"):
        icc.compile(model, tmp_path / "e.engine", target="native")
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def _poison(file: Path, name: str) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(file)
    tensors[name][0, 0] = float("nan")
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.soak
def test_a_full_disk_is_said_in_words(compiled: Callable[..., Any], tmp_path: Path) -> None:
    """RLIMIT_FSIZE stands for a full disk: the write fails with EFBIG in the middle of the weights."""
    checkpoint = compiled("llama").checkpoint
    out = tmp_path / "e.engine"
    script = "ulimit -f 150; trap '' XFSZ; exec \"$@\""
    done = subprocess.run(
        ["bash", "-c", script, "icc", *icc_command("compile", checkpoint, "-o", out, "--target", "native")],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode in (16, 31), done.stderr
    assert "error:" in done.stderr and "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_killed_compile_keeps_the_old_engine(
    compiled: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiler_runs: None
) -> None:
    found = compiled("llama")
    checkpoint, out = found.checkpoint, tmp_path / "e.engine"
    shutil.copytree(found.engine, out)
    before = files(out)
    process = subprocess.Popen(
        icc_command("compile", checkpoint, "-o", out, "--target", "native", "--force"), stderr=subprocess.DEVNULL
    )
    while process.poll() is None and not list(tmp_path.glob(".e.engine.*")):
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert files(out) == before
    monkeypatch.undo()  # no slow compiler from here on
    icc.compile(checkpoint, out, target="native", force=True)
    assert [p.name for p in tmp_path.iterdir()] == ["e.engine"], "what the killed compile left is gone"


def test_a_changed_file_is_refused(compiled: Callable[..., Any], tmp_path: Path) -> None:
    engine = tmp_path / "e.engine"
    shutil.copytree(compiled("llama").engine, engine)
    weights = bytearray((engine / "weights.safetensors").read_bytes())
    weights[-1] ^= 1
    (engine / "weights.safetensors").write_bytes(weights)
    with pytest.raises(EngineFormatError, match=r"weights\.safetensors has changed"):
        icc.load(engine)
