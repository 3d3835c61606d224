"""A DFlash drafter as a graph: it makes the guesses of published code, and refusals name what cannot be read."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from dflash_models import BLOCK, CASES, MASK, Drafter, Reference, save_dflash, without_mask
from draft_graphs import Change, graph_with_layer, said_of
from eagle_models import CASES as EAGLES
from eagle_models import target_of
from icc.compiler.errors import UsageError
from icc.compiler.graph.graph import Graph
from icc.compiler.graph.interpret import interpret_outputs
from icc.compiler.speculate.choice import SpecChoice

pytestmark = pytest.mark.slow

TEXT = [1, 5, 9, 5, 9, 5, 7, 7, 30, 31, 32, 33, 90, 91, 90, 91, 60]


class Pair:
    """A drafter, its model, and the graph of both."""

    def __init__(self, drafter: Drafter, path: Path) -> None:
        self.path = path
        target = target_of(EAGLES["speculators" if drafter.scale != 1 else "specforge"], path / "model")
        target = without_mask(target, path / "model")
        save_dflash(drafter, target, path / "drafter")
        self.reference = Reference(drafter, target, path / "drafter")

    @cached_property
    def graph(self) -> Graph:
        return graph_with_layer(self.path / "model", f"dflash:{self.path / 'drafter'}")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    """A function that gives the pair of a name, created once."""
    folder = tmp_path_factory.mktemp("dflash")
    return cache(lambda name: Pair(CASES[name], folder / name))


@pytest.mark.parametrize("name", list(CASES))
def test_guesses_are_those_of_published_code(pairs: Callable[[str], Pair], name: str) -> None:
    """Blocks after several prefixes of a text, some of them shorter than a window."""
    pair = pairs(name)
    hidden = interpret_outputs(pair.graph, TEXT)["tap.hidden"]
    for length in (2, 4, 9, len(TEXT)):
        tokens = [*TEXT[:length], *[MASK] * (BLOCK - 1)]
        rows = torch.cat([hidden[: length - 1], torch.zeros(BLOCK, hidden.shape[1])])
        found = interpret_outputs(pair.graph, tokens, {"draft_hidden": rows})["draft_layer.logits"]
        assert found[length:].argmax(-1).tolist() == pair.reference.chain(TEXT[:length], BLOCK - 1)


@pytest.mark.parametrize("name", list(CASES))
def test_what_it_guesses_changes_with_what_it_reads(pairs: Callable[[str], Pair], name: str) -> None:
    """Shows that the test above can fail: blocks after other tokens differ, and have no mask tokens."""
    chains = {tuple(pairs(name).reference.chain(TEXT[:n], BLOCK - 1)) for n in (2, 4, 9, len(TEXT))}
    assert len(chains) > 1 and all(token != MASK for chain in chains for token in chain)


def test_its_weights_are_its_own_but_for_embedding_and_head(pairs: Callable[[str], Pair]) -> None:
    """Also, the drafter does not force the model to run a sequence in one step."""
    graph = pairs("zlab").graph
    own = {name for name in graph.weights if name.startswith("draft_layer.")}
    assert {"draft_layer.fc", "draft_layer.hidden_norm.weight"} <= own
    assert not any("embed" in name or "lm_head" in name for name in own)
    assert not graph.looks_ahead


@pytest.fixture
def broken(pairs: Callable[[str], Pair], tmp_path: Path) -> Callable[..., str]:
    """A function that gives the one-line error of a compile with a changed drafter."""

    def said(change: Change, layout: str = "zlab") -> str:
        pair = pairs(layout)
        return said_of("dflash", pair.path, pair.graph, change, tmp_path)

    return said


NESTED = "dflash_config"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c, t: t.pop("fc.weight"), "tensor 'fc.weight': is missing"),
        (
            lambda c, t: t.pop("layers.1.self_attn.k_proj.weight"),
            "tensor 'layers.1.self_attn.k_proj.weight': is missing",
        ),
        (lambda c, t: t.pop("hidden_norm.weight"), "tensor 'hidden_norm.weight': is missing"),
        (
            lambda c, t: t.update({"fc.weight": torch.zeros(64, 128)}),
            r"tensor 'fc.weight': has shape \[64, 128\], config.json says \[64, 192\]",
        ),
        (lambda c, t: t.update(extra=torch.zeros(3)), "tensor 'extra' is not known"),
        (lambda c, t: c.update(architectures=["DFlash2DraftModel"]), "not a DFlash drafter"),
        (lambda c, t: c.update(model_type="gemma"), "field 'model_type' is 'gemma'"),
        (lambda c, t: c.update(conv_kernel_size=4), "field 'conv_kernel_size' is not known"),
        (lambda c, t: c[NESTED].update(selector_rank=4), "field 'dflash_config.selector_rank' is not known"),
        (lambda c, t: c[NESTED].update(projector_type="domino"), "field 'projector_type' is 'domino'"),
        (lambda c, t: c[NESTED].update(attention_mode="mla"), "field 'attention_mode' is 'mla'"),
        (
            lambda c, t: c[NESTED].update(target_layer_ids=[1, 5]),
            r"'target_layer_ids' is \[1, 5\], the model has 6 layers",
        ),
        (lambda c, t: c[NESTED].pop("target_layer_ids"), "'target_layer_ids' is None"),
        (lambda c, t: c[NESTED].update(mask_token_id=120), "'mask_token_id' is 120, the model has 120 tokens"),
        (lambda c, t: c.update(block_size=1), "'block_size' is 1, icc reads blocks of 2 to 64 tokens"),
        (lambda c, t: c.update(block_size="9"), "'block_size' is '9', not a count"),
        (lambda c, t: c.update(num_target_layers=7), "num_target_layers is 7, the model's layers are 6"),
        (lambda c, t: c.update(vocab_size=119), "vocab_size is 119, the model's is 120"),
        (lambda c, t: c.update(hidden_size=32), "hidden_size is 32, the model's is 64"),
        (lambda c, t: c.update(is_causal=1), "field 'is_causal' is 1"),
        (lambda c, t: c[NESTED].update(output_multiplier=-1.0), "'output_multiplier' is -1.0, not a number above 0"),
        (lambda c, t: c[NESTED].update(input_embedding_scale=0), "'input_embedding_scale' is 0, not a number above 0"),
        (lambda c, t: c[NESTED].update(input_embedding_scale=math.inf), "'input_embedding_scale' is inf, not a number"),
        (lambda c, t: c.update(head_dim=0), "field 'head_dim' is 0, not a count"),
        (
            lambda c, t: c.update(sliding_window=-2, layer_types=["sliding_attention"] * 2),
            "field 'sliding_window' is -2, not a count",
        ),
        (lambda c, t: t["layers.1.mlp.up_proj.weight"].fill_(math.inf), "'layers.1.mlp.up_proj.weight': holds Inf"),
        (lambda c, t: c.update(dflash_config=3), "field 'dflash_config' is no object"),
        (lambda c, t: c.update(layer_types=["chunked_attention"] * 2), "field 'layer_types'"),
    ],
)
def test_what_does_not_fit_is_named(broken: Callable[..., str], change: Any, message: str) -> None:
    assert re.search(message, broken(change))


def test_likewise_of_transformers_own(broken: Callable[..., str]) -> None:
    assert "field 'selector' is not known" in broken(lambda c, t: c.update(selector=3), "transformers")
    assert "hidden_size" in broken(lambda c, t: c.update(hidden_size="x"), "transformers")
    assert "tensor 'hidden_norm.weight': is missing" in broken(
        lambda c, t: t.pop("encoder.output_norm_enc.weight"), "transformers"
    )


def test_a_directory_is_needed() -> None:
    for text in ("dflash", "dflash:"):
        with pytest.raises(UsageError, match="not known at compile time"):
            SpecChoice.parse(text)
