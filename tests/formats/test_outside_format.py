"""A storage format that no file of icc knows works from encoding to the kernels of both back ends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import outside
import pytest
import tiny_models
import torch
from building import build
from click.testing import CliRunner
from icc.compiler import quantization
from icc.compiler.backends.triton.layouts.registry import LAYOUTS as TRITON_LAYOUTS
from icc.compiler.cli import main
from icc.compiler.errors import UsageError
from icc.compiler.frontend.load import load_graph
from icc.compiler.graph.graph import Graph
from icc.compiler.graph.interpret import interpret
from icc.compiler.quantization import Quantization, find_quantization, head_format, register_quantization
from icc.compiler.weights.formats.registry import find_format
from icc.passes import pipelines
from icc.passes.base import PassContext
from icc.passes.manager import run_passes
from icc.runtime.format.manifest import Limits
from run_lowered import lower_graph, optimize, run_lowered
from sizes import soak

IDS = np.random.default_rng(0).integers(3, 119, 13).tolist()
outside.register()


@pytest.fixture(autouse=True)
def options(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Adds --quant rtn-nl4 and gptq-nl4, which also quantize the head and a tied embedding."""
    monkeypatch.setattr(outside.Nl4, "serves_tables", True)
    monkeypatch.setattr(quantization, "_OTHERS", {})
    register_quantization("rtn-nl4", Quantization("rtn", "nl4", "a table of 16 values"))
    register_quantization("gptq-nl4", Quantization("gptq", "nl4", "a table of 16 values"))
    yield


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "llama"
    tiny_models.save_tiny(tiny_models.tiny_configs()["llama-mqa_tied_biases_llama3"], path)
    return path


def test_the_format_keeps_what_it_says() -> None:
    form, weight = find_format("nl4g32"), torch.randn(40, 96, generator=torch.Generator().manual_seed(0))
    encoded = form.encode(weight)
    assert encoded.snr_db > 18 and form.name == "nl4g32" and form.bits_per_weight((40, 96)) == 4.5
    held = form.release(form.hold(encoded.parts, (40, 96)), (40, 96))
    assert all(torch.equal(held[name], value) for name, value in encoded.parts.items())
    assert torch.equal(form.rounded(weight), form.decode(encoded.parts))


def test_its_quantizations_are_told_from_others() -> None:
    for find, option in ((find_quantization, "--quant"), (head_format, "--quant-head")):
        with pytest.raises(UsageError, match=f"{option} 'nl4' is unknown") as error:
            find("nl4")
        assert "gptq-nl4, rtn-nl4" in str(error.value.hint)
    with pytest.raises(UsageError, match=r"--quant 2:4: .* raised perplexity by 23 % at 9 bits"):
        find_quantization("2:4")
    said = CliRunner().invoke(main, ["compile", "model", "--target", "cpu,h100", "--quant", "2:4"])
    assert said.exit_code == 2 and "raised perplexity by 23 %" in said.stderr
    for name, method in (("rtn4", "rtn"), ("rtn-nl4", "rtn"), ("nl4", "auto")):
        with pytest.raises(ValueError, match=r"there is a quantization|is none of"):
            register_quantization(name, Quantization(method, "nl4", "another"))


@pytest.mark.parametrize("layouts", [outside.CPU_LAYOUTS, TRITON_LAYOUTS], ids=["cpu", "triton"])
@pytest.mark.parametrize("shape", [(40, 96), (3, 17, 64)])
def test_layouts_keep_the_codes(layouts, shape: tuple[int, ...]) -> None:
    form = find_format("nl4g32")
    parts = {name: value.numpy() for name, value in form.encode(torch.randn(*shape)).parts.items()}
    layout = layouts.find(form, "product")
    packed = layout.pack(parts)
    assert packed.size == layout.nbytes(shape)
    again = layout.unpack(packed, shape)
    np.testing.assert_array_equal(again["codes"], parts["codes"])
    np.testing.assert_allclose(again["scales"], parts["scales"], rtol=2**-11)


def quantized(model: Path, quant: str) -> Graph:
    graph = load_graph(model, 64)
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, 120, 48).tolist() for _ in range(4)]
    for phase in (pipelines.canonicalize(), pipelines.quantize(quant, "rtn-nl4", (), sequences)):
        run_passes(graph, phase, PassContext())
    names = {w.describe().split("[")[0] for w in graph.weights.values()}
    assert {"nl4g64", "nl4g32"} <= names
    return graph


@pytest.mark.parametrize("quant", ["rtn-nl4", *soak("gptq-nl4")])
def test_on_the_cpu(model: Path, quant: str, tmp_path: Path) -> None:
    graph = optimize(quantized(model, quant))
    lowered = lower_graph(graph)
    stored = [weight.format for weight in lowered.program.weights.values()]
    assert stored.count("nl4") >= 9  # merged QKV, O, merged gate and up, and down in two layers; the head
    found, expected = run_lowered(lowered, tmp_path, IDS), interpret(graph, IDS).numpy()
    scale = np.abs(expected).max()
    assert np.abs(found - expected).max() < 0.03 * scale  # activations are int8


def test_in_the_interpreted_plan(model: Path) -> None:
    engine = build(model, "rtn-nl4", Limits(max_seq_len=20, max_batch_size=2, max_step_tokens=16), block_size=4)
    assert [w.format for w in engine.program.weights.values()].count("nl4") >= 8
    found, expected = engine.llm().logits(IDS), interpret(engine.graph, IDS).numpy()
    assert np.abs(found - expected).max() < 5e-5 * np.abs(expected).max()
