"""An EAGLE-3 drafter as a graph: it makes the guesses of the published code, and refusals name what cannot be read."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from draft_graphs import Change, graph_with_layer, guesses, said_of
from eagle_models import CASES, TEXT, Drafter, Reference, save_eagle, target_of
from icc.compiler.errors import IccError, UsageError
from icc.compiler.frontend.eagle.config import read_config
from icc.compiler.frontend.load import load_graph
from icc.compiler.frontend.source.source import open_source
from icc.compiler.graph.graph import Graph
from icc.compiler.graph.interpret import interpret_outputs
from icc.compiler.speculate.choice import SpecChoice
from icc.compiler.speculate.draft_layer import load_draft_layer
from icc.passes import pipelines
from icc.passes.base import PassContext
from icc.passes.manager import run_passes
from safetensors.torch import load_file

pytestmark = pytest.mark.slow

RECORDED = json.loads(Path(__file__).with_name("data").joinpath("eagle_guesses.json").read_text())
MORE = {"shared": Drafter(True, (2, 3, 5), vocab=40, own=())}  # uses the model's embedding and rows of its LM head


class Pair:
    """A drafter, its model, and the graph of both."""

    def __init__(self, drafter: Drafter, path: Path) -> None:
        self.drafter, self.path = drafter, path
        self.target = target_of(drafter, path / "model")
        save_eagle(drafter, self.target, path / "drafter")

    @cached_property
    def graph(self) -> Graph:
        return graph_with_layer(self.path / "model", f"eagle:{self.path / 'drafter'}")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    """A function that gives the pair of a name, created once."""
    folder = tmp_path_factory.mktemp("eagle")
    return cache(lambda name: Pair((CASES | MORE)[name], folder / name))


@pytest.fixture(params=[*CASES, *MORE])
def pair(request: pytest.FixtureRequest, pairs: Callable[[str], Pair]) -> Pair:
    return pairs(request.param)


def test_guesses_are_those_of_the_published_code(pair: Pair, request: pytest.FixtureRequest) -> None:
    """The first guess at each position is that of the projects' own code, and a chain that of the forward written
    out."""
    reference = Reference(pair.drafter, pair.target, pair.path / "drafter")
    first, chain = guesses(pair.graph, TEXT, 4)
    assert chain == reference.chain(TEXT, 4)
    assert first == [reference.chain(TEXT[: n + 1], 1)[0] for n in range(1, len(TEXT))]
    name = request.node.callspec.params["pair"]
    assert name in MORE or first == RECORDED[name]


def test_only_tokens_of_its_vocabulary_are_guessed(pair: Pair) -> None:
    logits = interpret_outputs(pair.graph, TEXT)["draft_layer.logits"]
    known = range(120)
    if pair.drafter.vocab is not None:
        known = load_file(pair.path / "drafter" / "model.safetensors")["t2d"].nonzero()[:, 0].tolist()
    assert logits[0].isfinite().nonzero()[:, 0].tolist() == list(known)


def test_its_weights_are_quantized_as_the_models(pairs: Callable[[str], Pair]) -> None:
    """Without calibration, and its LM head like other LM heads; weights that it shares with the model do not change."""
    pair = pairs("specforge")
    source = open_source(pair.path / "model")
    graph, context = load_graph(source), PassContext()
    layer = load_draft_layer(SpecChoice.parse(f"eagle:{pair.path / 'drafter'}"), source, graph)
    added = pipelines.speculate((), 0, "rtn4", "int8", layer)
    run_passes(graph, [*pipelines.canonicalize(), *added], context)
    formats = {name: weight.storage.name for name, weight in graph.weights.items()}
    assert formats["draft_layer.lm_head.weight"].startswith("q8"), formats
    own = [
        f for name, f in formats.items() if name.startswith("draft_layer.") and name.endswith(("proj.weight", ".fc"))
    ]
    assert len(own) == 8 and {f[:2] for f in own} == {"q4"}
    assert not any(f.startswith("q") for name, f in formats.items() if not name.startswith("draft_layer."))
    assert not any("embed_tokens" in name for name in formats if name.startswith("draft_layer."))


@pytest.fixture
def broken(pairs: Callable[[str], Pair], tmp_path: Path) -> Callable[..., str]:
    """A function that gives the one-line error of a compile with a changed drafter."""

    def said(change: Change, layout: str = "specforge") -> str:
        pair = pairs(layout)
        return said_of("eagle", pair.path, pair.graph, change, tmp_path)

    return said


LAYER = "transformer_layer_config"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c, t: t.pop("fc.weight"), "tensor 'fc.weight': is missing"),
        (lambda c, t: t.pop("midlayer.hidden_norm.weight"), "tensor 'layers.0.hidden_norm.weight': is missing"),
        (lambda c, t: t.pop("d2t"), "tensor 'd2t': is missing"),
        (
            lambda c, t: t.update({"fc.weight": t["fc.weight"][:, 64:].clone()}),
            r"tensor 'fc.weight': has shape \[64, 128\]",
        ),
        (
            lambda c, t: t.update({"midlayer.self_attn.q_proj.weight": torch.zeros(64, 64)}),
            r"tensor 'midlayer.self_attn.q_proj.weight': has shape \[64, 64\], config.json says \[64, 128\]",
        ),
        (lambda c, t: t.update(extra=torch.zeros(3)), "tensor 'extra' is not known"),
        (lambda c, t: t.update(d2t=t["d2t"] + 100), "tensor 'd2t': does not name 50 different tokens"),
        (lambda c, t: t.update(d2t=torch.zeros(50)), "tensor 'd2t': has dtype float32, not integers"),
        (lambda c, t: t.update(t2d=~t["t2d"]), "tensor 't2d': marks other tokens"),
        (lambda c, t: c.update(parallel_drafting=True), "field 'parallel_drafting' is not known"),
        (lambda c, t: c.update(eagle_config={"layers": 3}), "field 'eagle_config.layers' is not known"),
        (lambda c, t: c.update(eagle_config={"use_aux_hidden_state": False}), "'use_aux_hidden_state' is False"),
        (
            lambda c, t: c.update(eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 2, 6]}),
            r"field 'eagle_config.eagle_aux_hidden_state_layer_ids' is \[1, 2, 6\], and the model has 6 layers",
        ),
        (lambda c, t: c.update(architectures=["LlamaForCausalLM"]), "not an EAGLE-3 drafter"),
        (lambda c, t: c.update(model_type="gemma"), "field 'model_type' is 'gemma'"),
        (lambda c, t: c.update(hidden_size="64"), "field 'hidden_size' is '64', not a count"),
        (lambda c, t: c.update(num_attention_heads=0), "field 'num_attention_heads' is 0, not a count"),
        (lambda c, t: c.update(num_key_value_heads=0), "field 'num_key_value_heads' is 0, not a count"),
        (
            lambda c, t: c.update(num_key_value_heads=3),
            "field 'num_key_value_heads' is 3, which does not divide 4 heads",
        ),
        (lambda c, t: t["fc.weight"].fill_(math.nan), "'fc.weight': holds NaN"),
        (lambda c, t: c.update(vocab_size=119), "vocab_size is 119, the model's is 120"),
        (lambda c, t: c.update(target_hidden_size=32), "target_hidden_size is 32, the model's is 64"),
        (lambda c, t: c.update(draft_vocab_size=0), "field 'draft_vocab_size' is 0, not a count"),
        (lambda c, t: c.update(fc_norm=1), "field 'fc_norm' is 1"),
        (lambda c, t: c.update(fc_norm=True), "tensor 'fc_norm.0.weight': is missing"),
        (lambda c, t: c.update(fc_norm=True, norm_before_fc=True), "exclude each other"),
        (lambda c, t: c.update(layer_types=["sliding_attention"]), "field 'layer_types'"),
    ],
)
def test_what_is_missing_or_unknown_is_named(broken: Callable[..., str], change: Any, message: str) -> None:
    assert re.search(message, broken(change))


def test_likewise_in_the_other_layout(broken: Callable[..., str]) -> None:
    assert "field 'speculators_model_type' is 'peagle'" in broken(
        lambda c, t: c.update(speculators_model_type="peagle"), "speculators"
    )
    assert "field 'ptd_token_id' is not known" in broken(lambda c, t: c.update(ptd_token_id=3), "speculators")
    assert "field 'attn_scale' is not known" in broken(lambda c, t: c[LAYER].update(attn_scale=3), "speculators")
    assert "'layers.1.self_attn.q_proj.weight': is missing" in broken(
        lambda c, t: c[LAYER].update(num_hidden_layers=2), "speculators"
    )


def test_a_model_of_few_layers_needs_taps_that_are_named(pairs: Callable[[str], Pair]) -> None:
    folder = pairs("specforge").path / "drafter"
    assert [read_config(folder, count).taps for count in (6, 32)] == [(2, 3, 3), (2, 16, 29)]
    with pytest.raises(IccError, match="the model has only 3 layers"):
        read_config(folder, 3)


def test_published_configurations_are_read(tmp_path: Path) -> None:
    """SpecForge's own, and one as speculators writes it: the three rotary positions of text are equal, and fields that
    its layer does not read change nothing."""
    forge = {
        "architectures": ["LlamaForCausalLMEagle3"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 3584,
        "initializer_range": 0.02, "intermediate_size": 18944, "max_position_embeddings": 8192, "max_window_layers": 28,
        "model_type": "llama", "target_model_type": "qwen2_5_vl", "num_attention_heads": 28, "num_hidden_layers": 1,
        "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "pretraining_tp": 1, "rope_theta": 1000000,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "sliding_window": 32768,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.51.0", "use_cache": True,
        "use_sliding_window": False, "vocab_size": 152064, "draft_vocab_size": 32000,
    }  # fmt: skip
    own = {
        "architectures": ["Eagle3Speculator"], "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"},
        "draft_vocab_size": 32000, "has_no_defaults_at_init": False, "norm_before_residual": True,
        "speculators_config": {"algorithm": "eagle3"}, "speculators_model_type": "eagle3",
        "speculators_version": "0.1.0.dev42", "target_hidden_size": None, "torch_dtype": "float32",
        "transformer_layer_config": {
            "head_dim": 128, "hidden_size": 4096, "intermediate_size": 14336, "model_type": "llama",
            "num_attention_heads": 32, "num_hidden_layers": 1, "num_key_value_heads": 8, "rope_theta": 500000.0,
            "rope_scaling": {
                "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192, "rope_type": "llama3",
            },
            "vocab_size": 128256,
        },
        "transformers_version": "4.53.1",
    }  # fmt: skip
    found = []
    for config in (forge, own):
        (tmp_path / "config.json").write_text(json.dumps(config))
        found.append(read_config(tmp_path, 32))
    assert [config.text.rope_parameters["rope_type"] for config in found] == ["default", "llama3"]
    assert [config.norm_before_residual for config in found] == [False, True]
    assert [(config.taps, config.draft_vocab) for config in found] == [((2, 16, 29), 32000)] * 2


def test_a_directory_is_needed() -> None:
    for text in ("eagle", "eagle:"):
        with pytest.raises(UsageError, match="not known at compile time"):
            SpecChoice.parse(text)
