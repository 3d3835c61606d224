"""Adapters with other features of an engine: the answers are those of an engine with the adapter merged into it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import icc
import numpy as np
import pytest
from icc import SamplingParams
from icc.runtime.llm import LLM
from icc.runtime.query import Query
from icc.runtime.watermark.settings import Watermark
from peft_models import save_adapter
from safetensors.torch import load_file, save_file

IDS = [5, 9, 33, 70, 2, 8, 14, 55, 101, 7, 7, 90]
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
TARGETS: dict[str, list[str]] = {
    "llama": ["q_proj", "v_proj", "down_proj"],
    "lfm2-short_convolutions": ["in_proj", "out_proj", "w2", "q_proj"],
}
Make = Callable[..., Path]


@pytest.fixture(scope="module")
def adapter(model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """An adapter of a model that changes its answers."""
    folder = tmp_path_factory.mktemp("adapters")

    def make(name: str) -> Path:
        if not (folder / name).exists():
            save_adapter(model(name), folder / name, 3, 0.2, r=4, target_modules=TARGETS[name])
        return folder / name

    return make


DECODINGS: dict[str, SamplingParams] = {
    "beams": SamplingParams(beams=3, n=2, max_tokens=8, ignore_eos=True),
    "n": SamplingParams(n=3, temperature=1.0, seed=7, max_tokens=8, ignore_eos=True),
    "a watermark": SamplingParams(
        temperature=1.0, seed=7, max_tokens=8, ignore_eos=True, watermark=Watermark(5, "gumbel")
    ),
}


def test_every_decoding(engine: Make, adapter: Callable[[str], Path]) -> None:
    """The base's request is in the same batch."""
    path = adapter("llama")
    with icc.load(engine("llama", adapters="2x16")) as llm, icc.load(engine("llama", lora=path)) as merged:
        llm.load_adapter("one", path)
        for name, params in DECODINGS.items():
            base = texts(llm, params, None)
            assert texts(llm, params, "one") == texts(merged, params, None) != base, name
            together = llm.generate([IDS, IDS], params, adapter=["one", None])
            assert [list(one.token_ids) for one in together] == [*texts(llm, params, "one"), *base], name


def texts(llm: LLM, params: SamplingParams, name: str | None) -> list[list[int]]:
    return [list(one.token_ids) for one in llm.generate([IDS], params, adapter=name)]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {"kv_policy": "streaming:sinks=4,window=32", "max_step_tokens": 16}),
        ("lfm2-short_convolutions", {}),
    ],
)
def test_caches_that_are_no_plain_blocks(
    name: str, options: dict[str, Any], engine: Make, adapter: Callable[[str], Path]
) -> None:
    """Sliding windows and recurrent states: cached prompts are kept per adapter, and no adapter uses another's."""
    prompt, path = (IDS * 6)[:66], adapter(name)
    options = {"max_seq_len": 128, **options}
    with icc.load(engine(name, lora=path, **options)) as merged, icc.load(engine(name, **options)) as plain:
        expected = {"one": answer(merged, prompt, "")[0], "": answer(plain, prompt, "")[0]}
    assert expected["one"] != expected[""]
    with icc.load(engine(name, adapters="2x16", **options)) as llm:
        llm.load_adapter("one", path)
        counts: list[int] = []
        for used in ("one", "", "one", "", "one"):
            found, count = answer(llm, prompt, used)
            assert found == expected[used], used
            counts.append(count)
        assert counts[:2] == [0, 0] and counts[3:] == [counts[2]] * 2


def answer(llm: LLM, prompt: list[int], name: str) -> tuple[list[int], int]:
    """The tokens of the answer, and how many tokens of the prompt were cached."""
    task = llm.submit(Query(prompt, GREEDY, adapter=name))
    while not task.done:
        llm.driver.step()
    [found] = task.generations
    return list(found.token_ids), found.num_cached_tokens or 0


def test_over_a_delta(
    engine: Make, model: Callable[[str], Path], adapter: Callable[[str], Path], tmp_path: Path
) -> None:
    """A fine-tune with its base's program has adapter slots if the base has; magnitudes are computed from its own
    weights."""
    shutil.copytree(model("llama"), tmp_path / "tuned")
    tensors = load_file(tmp_path / "tuned" / "model.safetensors")
    tensors["model.layers.1.self_attn.q_proj.weight"] *= 1.5
    save_file(tensors, tmp_path / "tuned" / "model.safetensors", {"format": "pt"})
    options = {"max_seq_len": 64, "adapters": "2x16+dora"}
    delta = icc.compile(tmp_path / "tuned", tmp_path / "delta.engine", like=engine("llama", **options))
    whole = icc.compile(tmp_path / "tuned", tmp_path / "whole.engine", target="native", **options)  # type: ignore[arg-type]
    kind: dict[str, Any] = {"r": 4, "target_modules": TARGETS["llama"], "use_dora": True}
    path = save_adapter(tmp_path / "tuned", tmp_path / "dora", 5, 0.2, **kind)
    found: list[np.ndarray] = []
    for made in (delta, whole):
        with icc.load(made) as llm:
            llm.load_adapter("one", path)
            found.append(llm.logits(IDS, adapter="one"))
            assert not np.array_equal(found[-1], llm.logits(IDS))
    assert np.array_equal(*found)
