"""Adapters beside what else an engine does: an answer is that of an engine into which the adapter was merged."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import icc
from icc import SamplingParams
from icc.runtime.llm import LLM
from icc.runtime.watermark.settings import Watermark
from peft_models import save_adapter

IDS = [5, 9, 33, 70, 2, 8, 14, 55, 101, 7, 7, 90]
TARGETS = ["q_proj", "v_proj", "down_proj"]
Make = Callable[..., Path]


DECODINGS: dict[str, SamplingParams] = {
    "beams": SamplingParams(beams=3, n=2, max_tokens=8, ignore_eos=True),
    "n": SamplingParams(n=3, temperature=1.0, seed=7, max_tokens=8, ignore_eos=True),
    "a watermark": SamplingParams(
        temperature=1.0, seed=7, max_tokens=8, ignore_eos=True, watermark=Watermark(5, "gumbel")
    ),
}


def test_every_decoding(engine: Make, model: Callable[[str], Path], tmp_path: Path) -> None:
    """Beside the base's in one batch."""
    path = save_adapter(model("llama"), tmp_path / "adapter", 3, 0.2, r=4, target_modules=TARGETS)
    with icc.load(engine("llama", adapters="2x16")) as llm, icc.load(engine("llama", lora=path)) as merged:
        llm.load_adapter("one", path)
        for name, params in DECODINGS.items():
            base = texts(llm, params, None)
            assert texts(llm, params, "one") == texts(merged, params, None) != base, name
            together = llm.generate([IDS, IDS], params, adapter=["one", None])
            assert [list(one.token_ids) for one in together] == [*texts(llm, params, "one"), *base], name


def texts(llm: LLM, params: SamplingParams, name: str | None) -> list[list[int]]:
    return [list(one.token_ids) for one in llm.generate([IDS], params, adapter=name)]
