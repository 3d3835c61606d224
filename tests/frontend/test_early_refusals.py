"""Paths that are no checkpoints, and options or config.json that rule a compile out, are refused before torch is
imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from icc.compiler.errors import OutOfMemory, UnsupportedModel
from icc.compiler.frontend.source.families import families
from icc.compiler.frontend.source.identify import find_checkpoint
from icc.compiler.frontend.source.refuse import check_head

SAMPLE = Path(__file__).parents[2] / "samples" / "pystd"
LLAMA = {"model_type": "llama", "hidden_size": 64}
# runs all cases in one process: exit code and output of each, and the heavy modules that it imported
RUN = """
import json, sys
from click.testing import CliRunner
from icc.compiler.cli import main
found = {}
for name, arguments in json.loads(sys.stdin.read()).items():
    result = CliRunner().invoke(main, arguments)
    found[name] = [result.exit_code, result.output, sorted({"torch", "transformers"} & sys.modules.keys())]
print(json.dumps(found))
"""


def config(path: Path, **facts: Any) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(facts))
    return path


def holding(path: Path, **files: str) -> Path:
    path.mkdir()
    for name, text in files.items():
        (path / name.replace("__", "/").replace("_dot_", ".")).write_text(text)
    return path


def refused(cases: dict[str, list[Any]]) -> dict[str, tuple[int, str]]:
    """Exit code and output of `icc compile` by case; none of them may have imported torch or transformers."""
    commands = {name: ["compile", *map(str, arguments)] for name, arguments in cases.items()}
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", RUN], input=json.dumps(commands), capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    for name, (_, output, imported) in found.items():
        assert not imported, (name, imported)
        assert "Traceback" not in output and output.startswith("error: "), (name, output)
        assert len(output.splitlines()) <= 2, (name, output)
    return {name: (code, output) for name, (code, output, _) in found.items()}


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    lora = holding(
        tmp_path / "lora",
        adapter_config_dot_json='{"peft_type": "LORA", "base_model_name_or_path": "meta/base"}',
        adapter_model_dot_safetensors="",
    )
    (tmp_path / "m.gguf").write_bytes(b"GGUF\3\0\0\0")
    (tmp_path / "renamed").write_bytes(b"GGUF\3\0\0\0")
    (tmp_path / "inner").mkdir()
    config(tmp_path / "inner" / "model", **LLAMA)
    (tmp_path / "exported").mkdir()
    config(tmp_path / "exported" / "onnx", **LLAMA)
    expected: dict[str, tuple[Path | str, int, tuple[str, ...]]] = {
        "absent": (tmp_path / "absent", 10, ("does not exist", "ORG/NAME")),
        "hub": ("some-org/some-model", 40, ("some-org/some-model", "HF_HUB_OFFLINE", "hf download")),
        "empty": (holding(tmp_path / "empty"), 10, ("is empty",)),
        "hidden": (holding(tmp_path / "hidden", _dot_git="x"), 10, ("is empty",)),
        "lora": (lora, 12, ("LORA adapter", "meta/base", "icc compile BASE --lora")),
        "lora and config": (config(tmp_path / "lora2", **LLAMA), 10, ("no model.safetensors",)),
        "onnx file": (tmp_path / "a.onnx", 10, ("not an ONNX file",)),
        "onnx": (holding(tmp_path / "onnx", model_dot_onnx=""), 10, ("not an ONNX file", "model.onnx")),
        "gguf": (tmp_path / "m.gguf", 10, ("truncated", "m.gguf")),
        "gguf by its first bytes": (tmp_path / "renamed", 10, ("truncated", "renamed")),
        "several": (holding(tmp_path / "several", a_dot_gguf="", b_dot_gguf=""), 10, ("2 GGUF models", "give one")),
        "projector": (holding(tmp_path / "p", mmproj_dot_gguf=""), 12, ("mmproj.gguf", "no checkpoint")),
        "beside others": (
            holding(tmp_path / "beside", a_dot_gguf="", a_mmproj_dot_gguf="", imatrix_a_dot_gguf=""),
            10,
            ("a.gguf is",),
        ),
        "pickle": (tmp_path / "b.bin", 10, ("pickle",)),
        "one shard": (tmp_path / "c.safetensors", 10, ("one file of a checkpoint", str(tmp_path))),
        "text": (tmp_path / "notes.txt", 10, ("is a file",)),
        "archive": (tmp_path / "model.tar.gz", 10, ("archive", "unpack")),
        "engine": (holding(tmp_path / "e", engine_dot_json="{}"), 10, ("is an engine", "icc run")),
        "no config": (holding(tmp_path / "nc", model_dot_safetensors=""), 10, ("no config.json",)),
        "one level too high": (tmp_path / "inner", 10, ("did you mean", "inner/model")),
        "broken": (holding(tmp_path / "broken", config_dot_json='{"a": '), 10, ("not valid JSON",)),
        "array": (holding(tmp_path / "array", config_dot_json="[1]"), 10, ("not a JSON object",)),
        "no type": (config(tmp_path / "untyped", hidden_size=1), 12, ("names no model_type",)),
        "no weights": (config(tmp_path / "weightless", **LLAMA), 10, ("no model.safetensors",)),
    }
    for name in ("a.onnx", "b.bin", "c.safetensors", "notes.txt", "model.tar.gz"):
        (tmp_path / name).write_text("x")
    found = refused({name: [model, "-o", tmp_path / "out"] for name, (model, _, _) in expected.items()})
    for name, (_, code, words) in expected.items():
        assert found[name][0] == code and all(word in found[name][1] for word in words), (name, found[name])
    assert not (tmp_path / "out").exists()


def test_what_config_json_speaks_against(tmp_path: Path) -> None:
    quantized = {"quant_method": "quanto"}
    expected: dict[str, tuple[dict[str, Any], int, tuple[str, ...]]] = {
        "encoder": ({"model_type": "distilbert"}, 12, ("distilbert", "encoder", "--task embed")),
        "encoder with a causal class": ({"model_type": "bert"}, 12, ("bert", "bidirectional encoder")),
        "encoder-decoder": ({"model_type": "t5"}, 12, ("t5", "encoder-decoder")),
        "by its flag": ({"model_type": "bart", "is_encoder_decoder": True}, 12, ("encoder-decoder",)),
        "vision": ({"model_type": "vit"}, 12, ("not a causal language model",)),
        "unknown": ({"model_type": "no_such_type"}, 12, ("no_such_type", "pip install -U")),
        "own code": ({"model_type": "own", "auto_map": {"AutoConfig": "own.C"}}, 12, ("code of its own",)),
        "quantized": ({**LLAMA, "quantization_config": quantized}, 12, ("already quantized (quanto)", "GPTQ")),
        "of other bits": (
            {**LLAMA, "quantization_config": {"quant_method": "gptq", "bits": 5}},
            12,
            ("already quantized (gptq)",),
        ),
        "within": ({**LLAMA, "text_config": {"quantization_config": quantized}}, 12, ("already quantized",)),
        "mlx": ({**LLAMA, "quantization": {"bits": 4, "group_size": 64, "mode": "nvfp4"}}, 12, ("(mlx nvfp4)",)),
        "no head": (
            {**LLAMA, "architectures": ["LlamaForSequenceClassification"], "tie_word_embeddings": False},
            12,
            ("no LM head", "--task embed"),
        ),
    }
    models = {name: config(tmp_path / name, **facts) for name, (facts, _, _) in expected.items()}
    found = refused({name: [model, "-o", tmp_path / "out"] for name, model in models.items()})
    for name, (_, code, words) in expected.items():
        assert found[name][0] == code and all(word in found[name][1] for word in words), (name, found[name])


def test_what_options_speak_against(tmp_path: Path) -> None:
    bare = config(tmp_path / "bare", **LLAMA, max_position_embeddings=77)
    (bare / "model.safetensors").write_bytes(b"")
    (tmp_path / "latin").write_bytes(b"\xe9t\xe9")
    (tmp_path / "blank").write_text(" \n")
    (tmp_path / "file").write_text("")
    out = ["-o", tmp_path / "out"]
    expected: dict[str, tuple[list[Any], int, tuple[str, ...]]] = {
        "explain": ([SAMPLE, *out, "--explain", "fuse-everything"], 2, ("fuse-everything", "known:")),
        "calibration for none": ([SAMPLE, *out, "--calib", tmp_path / "file"], 2, ("--quant none", "awq4")),
        "rotation for none": ([SAMPLE, *out, "--rotate"], 2, ("--rotate evens out", "leave --rotate out")),
        "kept for none": ([SAMPLE, *out, "--keep", "*"], 2, ("--keep leaves layers unquantized",)),
        "head for none": ([SAMPLE, *out, "--quant-head", "4bit"], 2, ("--quant-head 4bit is for models",)),
        "calibration for rtn": ([SAMPLE, *out, "--quant", "rtn4", "--calib", "x"], 2, ("--quant rtn4",)),
        "no text": ([SAMPLE, *out, "--quant", "awq4", "--calib", tmp_path / "x"], 2, ("no such file",)),
        "not UTF-8": ([SAMPLE, *out, "--quant", "gptq4", "--calib", tmp_path / "latin"], 2, ("not UTF-8",)),
        "blank": ([SAMPLE, *out, "--quant", "gptq4", "--calib", tmp_path / "blank"], 2, ("is empty",)),
        "no tokenizer": ([bare, *out, "--quant", "awq4", "--calib", tmp_path / "x"], 2, ("no tokenizer.json",)),
        "length": ([bare, *out, "--max-seq-len", "78"], 14, ("--max-seq-len 78", "77")),
        "read-only": ([SAMPLE, "-o", "/proc/e.engine"], 16, ("cannot write into /proc",)),
        "no directory": ([SAMPLE, "-o", tmp_path / "a" / "b"], 16, ("is not a directory",)),
        "taken": ([SAMPLE, "-o", tmp_path / "file"], 15, ("exists",)),
        "heads": ([SAMPLE, *out, "--spec", f"medusa:{tmp_path / 'x'}"], 10, ("medusa", "train-heads")),
        "dump": ([SAMPLE, *out, "--dump-passes", tmp_path / "file"], 2, ("--dump-passes",)),
        "target": ([SAMPLE, *out, "--target", "h1000"], 2, ("h1000", "targets:")),
    }
    found = refused({name: arguments for name, (arguments, _, _) in expected.items()})
    for name, (_, code, words) in expected.items():
        assert found[name][0] == code and all(word in found[name][1] for word in words), (name, found[name])


def test_the_tables_of_transformers_are_read_as_it_has_them() -> None:
    from transformers.models.auto import modeling_auto

    found = families()
    assert found is not None
    assert found.causal == dict(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    assert found.masked == frozenset(modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES)
    rewriting = dict(modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES)
    assert found.seq2seq == {kind for kind, name in rewriting.items() if found.causal.get(kind) != name}
    assert found.seq2seq < set(rewriting)  # some are decoders with another input


def test_a_checkpoint_is_also_its_config_json() -> None:
    assert find_checkpoint(SAMPLE / "config.json") == find_checkpoint(SAMPLE)


def test_a_model_that_is_called_by_its_head_has_one(tmp_path: Path) -> None:
    check_head(tmp_path, {"architectures": ["GPT2LMHeadModel"], "tie_word_embeddings": False})
    with pytest.raises(UnsupportedModel, match="no LM head"):
        check_head(tmp_path, {"architectures": ["GPT2Model"], "tie_word_embeddings": False})


def test_a_missing_tokenizer_is_told(tmp_path: Path) -> None:
    from icc.compiler.options import CompileOptions
    from icc.compiler.request import check

    model = config(tmp_path / "m", **LLAMA)
    (model / "model.safetensors").write_bytes(b"")
    [warning] = check(CompileOptions(model=model, output=tmp_path / "e")).warnings
    assert "no tokenizer.json" in warning
    (model / "tokenizer.model").write_bytes(b"")  # the frontend tries to convert it
    assert check(CompileOptions(model=model, output=tmp_path / "e")).warnings == ()
    assert check(CompileOptions(model=SAMPLE, output=tmp_path / "e")).warnings == ()


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes")])
def test_memory_that_runs_out_is_called_so(error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import icc
    from transformers import AutoModelForCausalLM

    def exhausted(*args: object, **kwargs: object) -> None:
        raise error

    where = AutoModelForCausalLM if isinstance(error, MemoryError) else icc.compiler.tracing
    name = "from_config" if isinstance(error, MemoryError) else "load_graph"
    monkeypatch.setattr(where, name, exhausted)
    with pytest.raises(OutOfMemory, match=r"memory.*trace"):
        icc.compile(SAMPLE, tmp_path / "e")
    assert not list(tmp_path.iterdir())


def test_a_cache_of_two_bits_says_what_it_costs(tmp_path: Path) -> None:
    from icc.compiler.options import CompileOptions
    from icc.compiler.request import check

    found = check(CompileOptions(Path(SAMPLE), tmp_path / "e", target="native", kv_cache="int2"))
    assert any("int2 loses much" in warning for warning in found.warnings)
