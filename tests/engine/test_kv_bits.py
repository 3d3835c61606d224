"""`--kv-bits`: a cache type for each layer within the given bits; logits are those of the reference."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import icc
import numpy as np
import pytest
import torch
from icc.compiler import caches
from icc.compiler.errors import UsageError
from icc.compiler.frontend.load import load_graph
from icc.compiler.graph.graph import Graph, attention_spec
from icc.compiler.graph.together import MODEL, run_together
from icc.compiler.kv_formats import find_kv_format
from icc.compiler.options import CompileOptions
from icc.compiler.planning.plan import make_plan
from icc.compiler.program.context import LowerOptions
from icc.compiler.program.lower import lower
from icc.passes import pipelines
from icc.passes.base import PassContext
from icc.passes.manager import run_passes
from icc.passes.quantize.cache_damage import measure_caches, rounding
from icc.runtime.format.load import open_engine
from kv_codes import stored

FEW: Any = {"calib_sequences": 4, "calib_length": 32}
TYPES = ("i8", "f8", "i4", "i2")


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("dim", [64, 24, 100])
def test_what_is_kept_is_what_kernels_write(dtype: str, dim: int) -> None:
    x = torch.randn(5, 3, dim, generator=torch.Generator().manual_seed(dim)) * 3
    expected = stored(x.numpy(), dtype)
    off = np.abs(find_kv_format(dtype).kept(x).numpy() - expected)
    unit = np.abs(expected).max() * {"i8": 1 / 127, "f8": 1 / 14, "i4": 1 / 7, "i2": 1.0}[dtype]
    assert off.max() < 1.01 * unit  # halfway between two codes, either is right
    assert (off > 1e-5 * np.abs(expected).max()).mean() < 0.02


def test_a_type_for_each_layer(compiled: Callable[..., Any]) -> None:
    """Some layers have windows; logits are those of a model with keys and values rounded to these types."""
    made = compiled("gemma2", kv_bits=8.5, **FEW)
    report = json.loads((made.engine / "report.json").read_text())["caches"]
    chosen = {int(c["name"].removeprefix("layer ")): c["format"] for c in report["choices"]}
    assert len(set(chosen.values())) > 1 and report["bytes"] <= report["budget"]
    groups = open_engine(made.engine).program.kv.groups
    assert {number: group.dtype for group in groups for number in group.layers} == chosen
    graph = load_graph(made.checkpoint)
    for phase in (pipelines.canonicalize(), pipelines.attention(), pipelines.fuse()):
        run_passes(graph, phase, PassContext())
    ids = [(7 * i + 3) % 119 for i in range(40)]
    calls = {attention_spec(node).layer: node for node in graph.nodes if "paged_attention" in str(node.target)}
    rounded = {node: rounding(find_kv_format(chosen[layer])) for layer, node in calls.items()}
    logits = {found.variant: found.logits.numpy() for found in run_together(graph, [ids], [rounded])}
    with icc.load(made.engine, threads=1, verify_answers=True) as llm:
        found = llm.logits(ids)
    scale = np.abs(logits[0]).max()
    assert np.abs(found - logits[0]).max() / scale < 0.3 * np.abs(logits[MODEL] - logits[0]).max() / scale


def test_ranks_have_the_types_of_one(compiled: Callable[..., Any]) -> None:
    """The loss from fewer bits is measured on the whole model, not on the heads of one rank."""
    one, two = (compiled("gemma2", kv_bits=8.5, **FEW, **ranks).engine for ranks in ({}, {"tensor_parallel": 2}))
    of_one, of_two = (
        [(c["name"], c["format"]) for c in json.loads((engine / "report.json").read_text())["caches"]["choices"]]
        for engine in (one, two)
    )
    assert of_one == of_two and len(set(of_one)) > 1


def test_layers_that_suffer_more_get_more_bits(compiled: Callable[..., Any]) -> None:
    """A layer whose output has no effect gets the fewest bits, and its measured loss is 0."""
    graph = load_graph(compiled("llama").checkpoint)
    for phase in (pipelines.canonicalize(), pipelines.attention()):
        run_passes(graph, phase, PassContext())
    calls = [node for node in graph.nodes if "paged_attention" in str(node.target)]
    last = calls[-1]
    for node in list(last.users):
        node.replace_input_with(last, calls[0])
    sizes = {
        attention_spec(node).layer: [
            (find_kv_format(name), size) for name, size in (("f16", 160), ("i8", 85), ("i4", 45))
        ]
        for node in calls
    }
    sequences = [[(7 * i + 3 * j) % 119 for i in range(32)] for j in range(4)]
    *others, unused = measure_caches(graph, sizes, sequences, lambda text, done, total: None)
    assert [option.damage for option in unused.options] == [0.0, 0.0, 0.0]
    for curve in others:
        none, eight, four = (option.damage for option in curve.options)
        assert none == 0.0 < eight < four


def test_a_plan_has_the_bytes(compiled: Callable[..., Any], tmp_path: Path) -> None:
    model = compiled("gemma2").checkpoint
    plans = {
        bits: make_plan(CompileOptions(model, tmp_path / "e", kv_bits=bits), ["cpu", "h100"]).as_json()["targets"]
        for bits in (None, 8.5)
    }
    for wide, narrow in zip(plans[None], plans[8.5], strict=True):
        assert narrow["bytes"]["kv_per_token"] < 0.6 * wide["bytes"]["kv_per_token"]


def test_choosing_lowers_the_graph_once(
    compiled: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sizes come from the formats, and whether kernels exist from the back ends, without lowering again."""
    lowered: list[str] = []

    def counted(graph: Graph, options: LowerOptions) -> Any:
        lowered.append(options.kv_dtype)
        return lower(graph, options)

    monkeypatch.setattr(caches, "lower", counted)
    made = make_plan(CompileOptions(compiled("gemma2").checkpoint, tmp_path / "e", kv_bits=8.5), ["cpu", "h100"])
    assert len(lowered) == len(made.as_json()["targets"]) == 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"kv_bits": 0.0}, "no number of bits"),
        ({"kv_bits": 6.0, "kv_cache": "int8"}, "leave one of them out"),
        ({"kv_bits": 6.0, "task": "embed"}, "reads whole ones"),
    ],
)
def test_what_cannot_be_is_refused(options: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as error:
        CompileOptions(tmp_path, tmp_path / "e", **options)
    assert said in f"{error.value} {error.value.hint}"


def test_too_few_bits_are_refused(compiled: Callable[..., Any], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="the smallest types take"):
        icc.compile(compiled("llama").checkpoint, tmp_path / "e", target="native", kv_bits=1.0, **FEW)
    assert not (tmp_path / "e").exists()
