"""`--quant auto`: an engine within the given bytes, whose kernels agree with the reference interpreter."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import icc
import pytest
import torch
from click.testing import CliRunner
from icc.compiler.backends.registry import backend_for
from icc.compiler.cli import main
from icc.compiler.errors import UsageError
from icc.compiler.frontend.load import load_graph
from icc.compiler.graph.interpret import interpret
from icc.compiler.graph.together import MODEL, run_together
from icc.compiler.options import CompileOptions
from icc.compiler.sizes import read_size
from icc.compiler.sizing import auto_passes
from icc.compiler.targets import TARGETS
from icc.compiler.weights.handles import derive
from icc.passes import pipelines
from icc.passes.base import PassContext
from icc.passes.manager import run_passes
from icc.passes.quantize import auto
from icc.passes.quantize.auto import QuantizeAuto

FEW: Any = {"calib_sequences": 4, "calib_length": 32}


def test_the_weights_fit_and_the_kernels_are_right(
    compiled: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a model with biases whose head is also its embedding."""
    monkeypatch.setattr(auto, "PALETTE", (("n", 3, 32), ("s", 6, 32)))  # every format needs kernels to be compiled
    model = compiled("llama-mqa_tied_biases_llama3", max_step_tokens=16).checkpoint
    engine = icc.compile(model, tmp_path / "e", target="native", quant="auto", size=100_000, **FEW)
    report = json.loads((engine / "report.json").read_text())
    found = report["allocation"]
    assert report["weight_bytes"] <= found["bytes"] <= found["budget"] == 100_000
    assert found["bytes"] > 80_000
    names = {choice["name"]: choice["format"] for choice in found["choices"]}
    assert "model.embed_tokens.weight" in names or "lm_head.weight" in names
    assert len(set(names.values())) > 1 and not {"q4g32", "q8g64"} & set(names.values())
    assert {row["method"] for row in report["quantization"]} == {"auto"}
    with icc.load(engine, threads=1, verify_answers=True) as llm:  # against the stored weights in float32
        assert len(llm.generate([[1, 5, 9]], icc.SamplingParams(max_tokens=4))[0].token_ids) == 4


def test_more_bytes_lose_less(compiled: Callable[..., Any]) -> None:
    graph = load_graph(compiled("llama").checkpoint)
    run_passes(graph, pipelines.canonicalize(), PassContext())
    sequences = [[(7 * i + 3 * j) % 120 for i in range(32)] for j in range(4)]
    wanted, errors = interpret(graph, sequences[0]), []
    for budget in (45_000, 80_000, 160_000, 1 << 30):
        copy, context = graph.copy(), PassContext()
        run_passes(copy, [QuantizeAuto(sequences=sequences, budget=budget)], context)
        assert context.allocation is not None and context.allocation.nbytes <= budget
        errors.append(float((interpret(copy, sequences[0]) - wanted).square().mean()))
    assert errors[0] > errors[1] > errors[2] > errors[3] == 0, errors


def test_variants_are_the_model_with_other_weights(compiled: Callable[..., Any]) -> None:
    graph = load_graph(compiled("llama").checkpoint)
    run_passes(graph, pipelines.canonicalize(), PassContext())
    sequences = [[1, 5, 9, 4], [2, 3, 60, 70, 80, 90]]
    linear = [n for n in graph.nodes if n.op == "call_function" and "linear" in str(n.target)]
    changed = [linear[1], linear[-1]]
    other = {node: derive(lambda w: w * 1.5, graph.weight(node.args[1])) for node in changed}  # type: ignore[arg-type]
    found = {
        (f.sequence, f.variant): f.logits for f in run_together(graph, sequences, [{n: other[n]} for n in changed])
    }
    for s, ids in enumerate(sequences):
        assert torch.equal(found[s, MODEL], interpret(graph, ids))
        for v, node in enumerate(changed):
            copy = graph.copy()
            copy.weights[str(node.args[1].target)] = other[node]  # type: ignore[union-attr]
            assert torch.equal(found[s, v], interpret(copy, ids))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--size", "92MB"), "--size is for --quant auto"),
        (("--bits", "4", "--quant", "rtn4"), "--bits is for --quant auto"),
        (("--quant", "auto", "--bits", "4", "--size", "1MB"), "the same thing in two ways"),
        (("--quant", "auto", "--bits", "-1"), "must be above 0"),
        (("--quant", "auto", "--bits", "nan"), "must be above 0"),
        (("--quant", "auto", "--bits", "65"), "at most 64"),
        (("--quant", "auto", "--size", "many"), "is not a size"),
        (("--quant", "auto", "--quant-head", "4bit"), "--quant-head has no meaning with --quant auto"),
        (("--quant", "auto", "--size", "9kB"), "in the smallest formats, more than 9,000"),
    ],
)
def test_refusals(
    options: tuple[str, ...],
    words: str,
    compiled: Callable[..., Any],
    tmp_path: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(auto, "measure", None)  # it takes minutes: options are refused before
    arguments = ["compile", compiled("llama").checkpoint, "-o", tmp_path / "e", "--calib-length", 16, *options]
    result = CliRunner().invoke(main, [str(a) for a in arguments])
    assert result.exit_code == UsageError.exit_code and words in " ".join(result.output.split())
    assert not list(tmp_path.iterdir())


def test_sizes() -> None:
    assert [read_size(text) for text in ("92MB", "92 MB", "1.5GiB", "700", "80kB")] == [
        92_000_000, 92_000_000, 3 << 29, 700, 80_000
    ]  # fmt: skip
    for wrong in ("", "MB", "-1MB", "1 XB", "0", "nan", "inf", "1e9", "9223372036854775808", f"{'9' * 400}GB"):
        with pytest.raises(ValueError, match="is"):
            read_size(wrong)


def test_rotated_first(compiled: Callable[..., Any]) -> None:
    """After rotation, an embedding that was tied to the head is a separate weight; its format is chosen like others."""
    model = Path(compiled("llama-mqa_tied_biases_llama3").checkpoint)
    options = CompileOptions(model, Path("unused"), target="cpu", quant="auto", size=90_000, rotate=True)
    graph = load_graph(options.model)
    run_passes(graph, pipelines.canonicalize(), PassContext())
    wanted, context = interpret(graph, [1, 5, 9, 4]), PassContext()
    backend = backend_for(TARGETS["cpu"], "f32", False)
    run_passes(graph, auto_passes(options, graph, backend, "f32", [[(7 * i) % 120 for i in range(32)]]), context)
    assert context.allocation is not None and context.allocation.nbytes <= 90_000
    chosen = [curve.name for curve in context.allocation.curves]
    assert sum(name in ("lm_head.weight", "model.embed_tokens.weight") for name in chosen) == 2
    error = (interpret(graph, [1, 5, 9, 4]) - wanted).square().mean() / wanted.square().mean()
    assert error < 0.1


def test_it_is_planned(compiled: Callable[..., Any]) -> None:
    result = CliRunner().invoke(main, ["plan", str(compiled("llama").checkpoint), "--quant", "auto", "--json"])
    assert result.exit_code == 0, result.output
