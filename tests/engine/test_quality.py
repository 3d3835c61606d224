"""Quantization on the sample checkpoint, through the engine (8-bit activations included), on text that was not used for
training or calibration."""

from __future__ import annotations

from pathlib import Path

import icc
import pytest
import torch
from icc.runtime.commands.evaluate import Evaluation, evaluate_text
from sizes import SOAK, size_of

pytestmark = pytest.mark.slow

SAMPLE = Path(__file__).parents[2] / "samples" / "pystd"
CALIBRATED = ("awq4", "gptq4") if SOAK else ("awq4",)  # tests/triton runs a family with GPTQ in `make test`


def heldout() -> str:
    """The first part of several held-out modules, licence headers left out."""
    files = sorted((SAMPLE / "heldout").glob("*.txt"))
    return "\n".join(f.read_text(encoding="utf-8")[1000 : 1000 + size_of("quality_characters")] for f in files[:6])


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Evaluation]:
    torch.set_num_threads(1)  # the other core runs the other half of the tests
    folder, text = tmp_path_factory.mktemp("pystd"), heldout()
    found = {}
    for quant in ("none", "rtn4", *CALIBRATED):
        engine = icc.compile(
            SAMPLE, folder / quant, target="native", quant=quant, calib_sequences=size_of("calib_sequences")
        )
        with icc.load(engine, threads=1) as llm:
            found[quant] = evaluate_text(llm, text, window=512)
    return found


def test_calibrated_methods_close_a_third_of_the_gap(results: dict[str, Evaluation]) -> None:
    none, rtn4 = results["none"].perplexity, results["rtn4"].perplexity
    assert none < rtn4
    for quant in CALIBRATED:
        found = results[quant].perplexity
        assert none <= found < rtn4, f"{quant}: {found} is not between {none} and {rtn4}"
        closed = (rtn4 - found) / (rtn4 - none)
        assert closed >= 1 / 3, f"{quant} closes {closed:.0%} of the gap"


def test_the_sample_is_a_trained_model(results: dict[str, Evaluation]) -> None:
    assert results["none"].bits_per_byte < 1.76  # xz -9e on the whole held-out text


def test_eight_bit_activations_cost_little(results: dict[str, Evaluation]) -> None:
    """The engine against the same quantized weights in float32."""
    from icc.compiler.frontend.load import load_graph
    from icc.compiler.graph.interpret import interpret
    from icc.passes import pipelines
    from icc.passes.base import PassContext
    from icc.passes.manager import run_passes
    from icc.runtime.tokenizer import Tokenizer

    graph = load_graph(SAMPLE)
    run_passes(graph, pipelines.canonicalize() + pipelines.quantize("rtn4", "int8", (), ()), PassContext())
    tokenizer = Tokenizer((SAMPLE / "tokenizer.json").read_bytes())
    ids = tokenizer.encode(heldout(), add_special_tokens=False)
    exact = _Interpreted(tokenizer, lambda tokens: interpret(graph, tokens).numpy())
    found = evaluate_text(exact, heldout(), window=512)  # type: ignore[arg-type]
    assert found.tokens == len(ids)
    assert abs(results["rtn4"].perplexity / found.perplexity - 1) < 0.005


class _Interpreted:
    """The interface that evaluate_text needs, over a function of token ids."""

    def __init__(self, tokenizer: object, logits: object) -> None:
        from types import SimpleNamespace

        self.tokenizer, self._logits = tokenizer, logits
        facts = SimpleNamespace(bos_token_id=0)
        self.manifest = SimpleNamespace(model=facts, limits=SimpleNamespace(max_seq_len=1024))

    def iter_logits(self, ids: list[int]) -> object:
        yield self._logits(ids)  # type: ignore[operator]
