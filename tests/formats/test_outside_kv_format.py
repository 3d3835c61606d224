"""A KV format that no file of icc knows, the one of docs/extending.md, agrees with its reference on both back ends."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import icc
import msgspec
import numpy as np
import pytest
import tiny_models
import torch
from acme_package import write_acme
from building import build
from icc.compiler import kv_formats
from icc.compiler.backends import render
from icc.compiler.backends.cpu.kernels.attention import KvWriteParams
from icc.compiler.backends.cpu.kernels.base import KernelParams
from icc.compiler.backends.triton.kernels.caches import TRITON_CACHES, CacheElements
from icc.compiler.errors import UsageError
from icc.compiler.frontend.load import load_graph
from icc.compiler.graph.graph import Graph
from icc.compiler.kv_check import check_kv_format, check_triton_codes, rounded_logits
from icc.compiler.kv_formats import KVFormat
from icc.compiler.options import CompileOptions
from icc.passes import pipelines
from icc.passes.base import PassContext
from icc.passes.manager import run_passes
from icc.runtime.errors import KVLayoutError
from icc.runtime.format.kv_numbers import KV_NUMBERS, KVNumbers
from icc.runtime.format.load import open_engine
from icc.runtime.format.manifest import Limits
from icc.runtime.format.programs import check_agreement
from torch import Tensor

IDS = [(7 * i + 3) % 119 for i in range(19)]


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Installs the page's package, and removes all traces of its format afterwards."""
    folder = tmp_path_factory.mktemp("site")
    write_acme(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.setattr(kv_formats, "_FORMATS", dict(kv_formats._FORMATS))
        yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "acme"]:
        del sys.modules[name]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "llama"
    tiny_models.save_tiny(tiny_models.tiny_configs()["llama"], path)
    return path


class Unscaled(KVFormat):
    """8-bit floats (e5m2) without scales."""

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        return x.to(torch.float8_e5m2).view(torch.uint8), None

    def decode(self, codes: Tensor, beside: Tensor | None, dim: int) -> Tensor:
        return codes.view(torch.float8_e5m2).float()


def away(graph: Graph, found: np.ndarray, name: str = "sq8") -> tuple[float, float]:
    """Two differences as shares of the largest logit: logits `found` to those of the graph with keys and values rounded
    by the format, and these to the exact graph's."""
    cached, exact = rounded_logits(graph, IDS, name)
    scale = np.abs(cached).max()
    return np.abs(found - cached).max() / scale, np.abs(exact - cached).max() / scale


def test_the_format_keeps_what_it_says(package: None) -> None:
    form, x = kv_formats.find_kv_format("sq8"), torch.randn(5, 3, 24, generator=torch.Generator().manual_seed(0))
    codes, scales = form.encode(x)
    assert codes.dtype == torch.int8 and codes.shape == x.shape and scales is not None and scales.shape == (5, 3, 1)
    assert torch.equal(form.kept(form.kept(x)), form.kept(x)) and (form.kept(x) - x).abs().max() < 0.03
    assert "sq8" in kv_formats.cache_options() and "sq8" not in KV_NUMBERS


@pytest.mark.parametrize(
    ("numbers", "wrong", "said"),
    [
        (KVNumbers("odd", 8), {"encode": lambda x: x.to(torch.int8)}, "elements and what lies beside"),
        (KVNumbers("odd", 8), {"encode": lambda x: (x, None)}, "elements must be"),
        (KVNumbers("odd", 8), {"encode": lambda x: (x.to(torch.int8), x)}, "None beside"),
        (KVNumbers("odd", 8, scaled=True), {}, "beside them must be a tensor"),
        (KVNumbers("odd", 8), {"decode": lambda codes, beside, dim: codes.float()[..., 0]}, "decode must give"),
        (KVNumbers("odd", 8), {"decode": lambda codes, beside, dim: 3.0 * codes.float()}, "far from"),
        (
            KVNumbers("odd", 8),
            {"decode": lambda codes, *_: codes.view(torch.float8_e5m2).float().nan_to_num()},
            "as a number",
        ),
    ],
)
def test_a_reference_that_breaks_its_word(numbers: KVNumbers, wrong: dict[str, Any], said: str) -> None:
    form = Unscaled(numbers, "", 0.0)
    for name, method in wrong.items():
        object.__setattr__(form, name, method)
    with pytest.raises(ValueError, match=said):
        check_kv_format(form)


@pytest.mark.parametrize("name", ["i8", "f8", "sq8", "e5m2"])
def test_what_gpus_keep_is_what_the_reference_keeps(package: None, name: str) -> None:
    check_triton_codes(kv_formats.find_kv_format(name))


@pytest.mark.parametrize(
    ("macro", "wrong", "said"),
    [
        ("return codes.to(tl.float32)", "return codes.to(tl.float32) * 1.01", "`unpack` gives other numbers"),
        ("peak / 127.0,", "peak / 128.0,", "`quantize` gives other scales"),
        ("+ 12582912.0 - 12582912.0", "- 0.5", "are those of encode"),
        ('float("nan"))', "0.0)", "NaN is kept"),
    ],
)
def test_macros_that_break_the_reference(macro: str, wrong: str, said: str, tmp_path: Path) -> None:
    text = (render.TEMPLATES / "triton/kv/int8.py.jinja").read_text()
    assert macro in text
    (tmp_path / "wrong.py.jinja").write_text(text.replace(macro, wrong))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(render, "_folders", [*render._folders, tmp_path])
        render._environment.cache_clear()
        patch.setitem(TRITON_CACHES._kinds, "i8", CacheElements("i8", macros="wrong.py.jinja"))
        with pytest.raises(ValueError, match=said):
            check_triton_codes(kv_formats.find_kv_format("i8"))
    render._environment.cache_clear()


def test_what_cannot_be_checked_so() -> None:
    with pytest.raises(ValueError, match="elements of 4 bits; this check handles only 8"):
        check_triton_codes(kv_formats.find_kv_format("i4"))


@pytest.mark.parametrize("name", [*KV_NUMBERS, "sq8", "e5m2"])
def test_references_keep_their_word(package: None, name: str) -> None:
    check_kv_format(kv_formats.find_kv_format(name))


def test_on_the_cpu(package: None, model: Path, tmp_path: Path) -> None:
    """The engine describes the format of its cache: the runtime's table does not have this name."""
    icc.compile(model, tmp_path / "e", target="native", kv_cache="sq8")
    engine = open_engine(tmp_path / "e")
    [group] = engine.program.kv.groups
    assert (group.dtype, group.stored) == ("sq8", KVNumbers("sq8", 8, scaled=True))
    graph = load_graph(model)
    for phase in (pipelines.canonicalize(), pipelines.attention(), pipelines.fuse()):
        run_passes(graph, phase, PassContext())
    with icc.load(tmp_path / "e", threads=1, verify_answers=True) as llm:
        off, lost = away(graph, llm.logits(IDS))
    assert off < 0.3 * lost
    for stored, said in ((None, "of type 'sq8', this runtime has f32"), (KVNumbers("sq8", 5), "elements of 5 bits")):
        layout = msgspec.structs.replace(engine.program.kv, groups=(msgspec.structs.replace(group, stored=stored),))
        with pytest.raises(KVLayoutError, match=said):
            check_agreement(engine.manifest, msgspec.structs.replace(engine.program, kv=layout), "main")


def test_in_the_interpreted_plan(package: None, model: Path) -> None:
    engine = build(model, "none", Limits(max_seq_len=24, max_batch_size=2, max_step_tokens=16), block_size=4, kv="sq8")
    with engine.llm() as llm:
        off, lost = away(engine.graph, llm.logits(IDS))
    assert off < 0.02 and lost > 0  # products are in bf16, which rounds about as much as the codes


def test_one_without_scales(package: None, model: Path, tmp_path: Path) -> None:
    """On CPUs by the page's own test, and in the interpreted plan."""
    import_module("acme.test_kv").check(str(model), "e5m2", str(tmp_path / "e"))  # as from its command line
    limits = Limits(max_seq_len=24, max_batch_size=2, max_step_tokens=16)
    plan = build(model, "none", limits, block_size=4, kv="e5m2")
    with plan.llm() as llm:
        off, lost = away(plan.graph, llm.logits(IDS), "e5m2")
    assert off < 0.3 * lost


def test_a_type_of_a_package_takes_a_byte(package: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU kernels identify a type with less than a byte per element by its bits alone, and would misread a
    package's."""
    form = kv_formats.find_kv_format("sq8")
    step: Any = SimpleNamespace(cache="sq8", kv=None, block_size=16)
    monkeypatch.setattr(KernelParams, "refusal", classmethod(lambda cls, step: ""))
    assert not KvWriteParams.refusal(step)
    monkeypatch.setitem(kv_formats._FORMATS, "sq8", replace(form, numbers=KVNumbers("sq8", 4, scaled=True)))
    assert "'sq8' has elements of 4 bits" in KvWriteParams.refusal(step)


def test_a_format_that_nobody_has_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as error:
        CompileOptions(tmp_path, tmp_path / "e", kv_cache="sq9")
    assert "--kv-cache 'sq9' is unknown" in str(error.value) and "int8" in str(error.value.hint)
