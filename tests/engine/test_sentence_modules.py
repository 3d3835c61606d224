"""Folders as sentence-transformers writes them: several poolings, layers after them, prompts; checked by the formulas
of its modules, without the package."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import icc
import numpy as np
import pytest
from icc.compiler.engine.tail import write_tail
from icc.compiler.engine.vocabulary import lowering
from icc.compiler.errors import CheckpointError, UnsupportedModel
from icc.compiler.frontend.source.pooling import LayerBehind
from icc.compiler.frontend.source.scoring import Scoring, read_scoring
from icc.runtime.errors import EngineFormatError, RequestError
from icc.runtime.format.manifest import EmbeddingFacts, Pooling, TailLayer
from icc.runtime.requests.embedding import PooledRequest, stacked
from icc.runtime.requests.tail import ACTIVATIONS, read_tail

from .test_embeddings import write_modules
from .test_encoders import WORDS, run_model, saved, write_tokenizer

WIDE = 32


def of_rows(rows: np.ndarray, kind: Pooling) -> np.ndarray:
    """The vector [H] in float64, as sentence-transformers pools rows [T, H] whose attention mask is 1; row 0 has weight
    1."""
    weights = np.arange(1, len(rows) + 1)[:, None]
    return {
        "cls": rows[0], "last": rows[-1], "max": rows.max(0), "mean": rows.mean(0),
        "mean_sqrt_len": rows.sum(0) / len(rows) ** 0.5, "weightedmean": (weights * rows).sum(0) / weights.sum(),
    }[kind]  # fmt: skip


class Rows:
    """Rows of a prompt in the form that steps give."""

    def __init__(self, rows: np.ndarray, *cuts: int) -> None:
        self.prompt, self._chunks = list(range(len(rows))), np.split(rows, cuts)

    def take(self) -> list[np.ndarray]:
        return [self._chunks.pop(0)] if self._chunks else []


def vector_of(rows: np.ndarray, facts: EmbeddingFacts, skipped: int = 0, tail: Any = ()) -> np.ndarray:
    embedding = PooledRequest(Rows(rows, 2, 3), facts, tail, skipped)  # type: ignore[arg-type]
    while not embedding.complete:
        embedding.advance()
    return embedding.vector()


KINDS: tuple[Pooling, ...] = ("cls", "last", "max", "mean", "mean_sqrt_len", "weightedmean")


@pytest.mark.parametrize("skipped", [0, 3, 99])
def test_poolings_are_put_together_without_the_prompt(skipped: int) -> None:
    rows = np.random.default_rng(0).normal(size=(7, 5)).astype(np.float32)
    facts = EmbeddingFacts("mean", False, 30, also=[kind for kind in KINDS if kind != "mean"], rows=5)
    found = vector_of(rows, facts, skipped).reshape(6, 5)
    first = min(skipped, 6)
    rest = rows[first:].astype(np.float64)
    weights = np.arange(first + 1, 8)[:, None]  # positions include the prompt, as in sentence-transformers
    for kind, part in zip(["mean", *facts.also], found, strict=True):
        wanted = (weights * rest).sum(0) / weights.sum() if kind == "weightedmean" else of_rows(rest, kind)
        np.testing.assert_allclose(part, wanted, rtol=1e-5, atol=1e-6)


def write_layer(folder: Path, prefix: str, *shape: int, bias: bool = True, **more: Any) -> dict[str, Any]:
    """Write random weights of a module as a safetensors file; returns them."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True)
    tensors = {f"{prefix}.weight": torch.randn(*shape), **({f"{prefix}.bias": torch.randn(shape[0])} if bias else {})}
    tensors |= {name: torch.randn(*shape) for name in more}
    save_file(tensors, str(folder / "model.safetensors"))
    return tensors


def test_layers_behind_the_pooling(tmp_path: Path) -> None:
    """The layers compute what torch computes in float64 from the written files."""
    import torch
    from torch.nn import functional

    widen = write_layer(tmp_path / "a", "linear", 6, 4, **{"residual.weight": True})
    again = write_layer(tmp_path / "b", "linear", 6, 6, bias=False)
    norm = write_layer(tmp_path / "c", "norm", 6)
    layers = [
        LayerBehind("normalize", tmp_path), LayerBehind("dense", tmp_path / "a", "silu", True),
        LayerBehind("dense", tmp_path / "b", "gelu", True), LayerBehind("layer_norm", tmp_path / "c"),
    ]  # fmt: skip
    (tmp_path / "engine").mkdir()
    written, width = write_tail(tmp_path / "engine", layers, 4)
    facts = EmbeddingFacts("mean", False, width, tail=written, rows=4)
    read: Callable[[str], bytes] = lambda name: (tmp_path / "engine" / name).read_bytes()  # noqa: E731
    row = np.random.default_rng(1).normal(size=(1, 4)).astype(np.float32)
    found = vector_of(row, facts, tail=read_tail(facts, read))
    x = functional.normalize(torch.from_numpy(row[0]).double(), dim=0)
    weights = {name: value.double() for name, value in widen.items()}
    x = functional.silu(weights["linear.weight"] @ x + weights["linear.bias"]) + weights["residual.weight"] @ x
    x = functional.gelu(again["linear.weight"].double() @ x) + x
    x = functional.layer_norm(x, (6,), norm["norm.weight"].double(), norm["norm.bias"].double())
    np.testing.assert_allclose(found, x, rtol=2e-5, atol=1e-6)
    with pytest.raises(CheckpointError, match="takes vectors of 4 numbers, not of 5"):
        write_tail(tmp_path / "engine", layers[1:2], 5)
    with pytest.raises(CheckpointError, match=r"no tensor norm\.weight"):
        write_tail(tmp_path / "engine", [LayerBehind("layer_norm", tmp_path / "a")], 6)
    for wrong in (
        [TailLayer("dense", "nowhere.npy")],
        written[:3],
        [TailLayer("dense", written[1].weight, activation="x")],
    ):
        with pytest.raises((EngineFormatError, OSError)):
            read_tail(EmbeddingFacts("mean", False, 7, tail=wrong, rows=4), read)


def test_activation_functions() -> None:
    import torch

    x = np.linspace(-8, 8, 101, dtype=np.float32)
    for name, function in ACTIVATIONS.items():
        wanted = getattr(torch.nn.functional, name, getattr(torch, name, lambda x: x))(torch.from_numpy(x).double())
        np.testing.assert_allclose(function(x), wanted, atol=2e-6, err_msg=name)


def test_vectors_are_cut_to_dimensions() -> None:
    vectors, facts = [np.array([3, 4, 12], dtype=np.float32)], EmbeddingFacts("mean", False, 3)
    assert stacked(vectors, facts, 2).tolist() == [[np.float32(0.6), np.float32(0.8)]]
    assert stacked(vectors, facts, None).tolist() == stacked(vectors, facts, 3).tolist() == [[3, 4, 12]]
    assert stacked([], facts, 2).shape == (0, 2)
    for dimensions in (0, 4):
        with pytest.raises(RequestError, match="must be from 1 to the 3 of the model's vectors"):
            stacked(vectors, facts, dimensions)


def test_a_whole_folder(tmp_path: Path) -> None:
    """Two poolings, layers in the runtime, prompts left out of the pooling, texts in lower case and truncated."""
    import torch

    model = saved("bert", tmp_path, "embed", num_hidden_layers=1)
    write_tokenizer(tmp_path)
    write_modules(tmp_path, "mean_tokens", "Dense", "Normalize")
    config = {"pooling_mode": ["mean", "max"], "include_prompt": False}
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(config))
    dense = write_layer(tmp_path / "2_Dense", "linear", 20, 2 * WIDE)
    (tmp_path / "2_Dense" / "config.json").write_text("{}")  # the default activation is Tanh
    prompts = {"prompts": {"query": "which word: ", "passage": ""}, "default_prompt_name": "query"}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 12, "do_lower_case": True}))
    engine = icc.compile(tmp_path, tmp_path / "x.engine", task="embed", target="native", max_batch_size=4)

    def wanted(words: str, skipped: int) -> np.ndarray:
        ids = [2, *(WORDS.index(word) if word in WORDS else 1 for word in words.split()), 3]
        hidden = run_model(model, ids)[skipped:]
        both = torch.cat([hidden.mean(0), hidden.max(0).values])
        return torch.nn.functional.normalize(
            torch.tanh(dense["linear.weight"] @ both + dense["linear.bias"]), dim=0
        ).numpy()

    text, plain, prompted = "Last A said", wanted("last a said", 0), wanted("which word : last a said", 4)
    with icc.load(engine, threads=1) as llm:
        assert llm.manifest.limits.max_seq_len == 12
        for options, expected in (
            ({}, prompted), ({"prompt_name": "query"}, prompted), ({"prompt_name": "search_query"}, prompted),
            ({"prompt_name": "document"}, plain), ({"prompt": ""}, plain),
            ({"prompt": "first "}, wanted("first last a said", 2)),
        ):  # fmt: skip
            np.testing.assert_allclose(llm.embed(text, **options)[0], expected, atol=1e-5, err_msg=str(options))
        few = llm.embed(text, dimensions=5)[0]
        np.testing.assert_allclose(few, prompted[:5] / np.linalg.norm(prompted[:5]), atol=1e-5)
        with pytest.raises(RequestError, match="no prompt 'answer'") as refused:
            llm.embed(text, prompt_name="answer")
        assert refused.value.hint == "it has: query, passage"
        with pytest.raises(RequestError, match="at most 12"):
            llm.embed("a " * 20)
        cut = llm.embed("a b " * 20, prompt="", truncate=True)[0]
        np.testing.assert_allclose(cut, wanted("a b a b a b a b a b", 0), atol=1e-5)
        cut = llm.embed("c " + "a b " * 20, prompt="", truncate="start", longest=5)[0]
        np.testing.assert_allclose(cut, wanted("b a b", 0), atol=1e-5)
        given = llm.embed([[2, 4, 3]])[0]
        np.testing.assert_allclose(given, wanted("which", 0), atol=1e-5)
        with pytest.raises(RequestError, match="taken as they are"):
            llm.embed([[2, 4, 3]], prompt_name="query")


def test_texts_are_made_lower_case_once() -> None:
    lower = {"type": "Lowercase"}
    for own, result in (
        (None, [lower]), ({"type": "NFC"}, [lower, {"type": "NFC"}]),
        ({"type": "Sequence", "normalizers": [{"type": "NFC"}]}, [lower, {"type": "NFC"}]),
    ):  # fmt: skip
        found = json.loads(lowering(json.dumps({"normalizer": own}).encode()))
        assert found["normalizer"] == {"type": "Sequence", "normalizers": result}
    for done in (lower, {"type": "BertNormalizer", "lowercase": True}):
        assert json.loads(lowering(json.dumps({"normalizer": done}).encode())) == {"normalizer": done}


def test_how_scores_are_made_is_read(tmp_path: Path) -> None:
    def write(name: str, facts: Any) -> None:
        (tmp_path / name).write_text(json.dumps(facts))

    assert read_scoring(tmp_path) == Scoring("sigmoid", 0)
    write("config.json", {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"})
    assert read_scoring(tmp_path) == Scoring("identity", 0)
    write("config.json", {"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}})
    write("sentence_bert_config.json", {"max_seq_length": 77})
    assert read_scoring(tmp_path) == Scoring("sigmoid", 77)
    write(
        "config_sentence_transformers.json", {"activation_fn": "torch.nn.modules.linear.Identity", "prompts": {"": ""}}
    )
    assert read_scoring(tmp_path) == Scoring("identity", 77)
    for facts, words in (
        ({"activation_fn": "torch.nn.Tanh"}, "Tanh"),
        ({"prompts": {"rank": "Rank: "}, "default_prompt_name": "rank"}, "the prompt 'rank'"),
    ):
        write("config_sentence_transformers.json", facts)
        with pytest.raises(UnsupportedModel, match=words):
            read_scoring(tmp_path)
    write("modules.json", [{"type": f"sentence_transformers.{name}"} for name in ("Transformer", "Dense")])
    with pytest.raises(UnsupportedModel, match="Dense behind the model"):
        read_scoring(tmp_path)
