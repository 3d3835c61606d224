"""Random combinations of options give a correct engine, or a one-line error before any kernel is compiled."""

from __future__ import annotations

import random
from pathlib import Path
from types import ModuleType
from typing import Any

import icc
import pytest
from icc.compiler.errors import IccError
from icc.compiler.kv_formats import cache_options
from icc.compiler.quantization import QUANTIZATIONS
from sizes import soak

CODES = (2, 12, 30)  # a wrong argument; an unsupported model; a missing kernel


def drawn(draw: random.Random) -> dict[str, Any]:
    """Random options of `icc.compile`, more often consistent than not."""
    found: dict[str, Any] = {
        "quant": draw.choice(sorted(QUANTIZATIONS)),
        "kv_cache": draw.choice(sorted(cache_options())),
    }
    found |= {"calib_sequences": draw.choice((1, 2, 4)), "calib_length": draw.choice((1, 7, 24, 48))}
    found |= {"max_seq_len": draw.choice((51, 64)), "max_step_tokens": draw.choice((16, 33))}
    if found["quant"] == "auto":
        found["bits"] = draw.choice((2.6, 3.3, 4.5, 5.7, 8.2, 20.0))
    maybe = {
        "rotate": True,
        "quant_head": draw.choice(("none", "int8", "4bit")),
        "group_size": draw.choice((16, 32, 48, 64, 128)),
        "keep": (draw.choice(("*", "*layers.0*", "nothing")),),
        "spec": draw.choice(("ngram", "layer-skip:1")),
        "state_cache": "bf16",
    }
    return found | {name: value for name, value in maybe.items() if draw.random() < 0.25}


@pytest.mark.parametrize("seed", soak(*range(60)))
def test_right_or_refused_early(seed: int, tiny: ModuleType, tmp_path: Path) -> None:
    draw = random.Random(seed)
    name, dtype = draw.choice(sorted(tiny.tiny_configs())), draw.choice(("float32", "bfloat16", "float16"))
    options, stages = drawn(draw), set[str]()
    tiny.save_tiny(tiny.tiny_configs()[name], tmp_path / "model", dtype)
    try:
        engine = icc.compile(
            tmp_path / "model", tmp_path / "engine", target="native", progress=lambda p: stages.add(p.stage), **options
        )
    except IccError as error:
        assert error.exit_code in CODES and "kernels" not in stages, (name, dtype, options)
        assert [path.name for path in tmp_path.iterdir()] == ["model"]
        return
    with icc.load(engine, threads=1, verify_answers=True) as llm:
        found = llm.generate([[1, 5, 9], [4] * 20], icc.SamplingParams(max_tokens=4, ignore_eos=True))
    assert [len(one.token_ids) for one in found] == [4, 4], (name, dtype, options)
