"""What else is in the batch, how prompts are cut and whether a request was preempted never changes a token (R7)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import icc
import numpy as np
import pytest

GREEDY = icc.SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(3)
    return [rng.integers(3, 119, n).tolist() for n in (1, 5, 17, 33, 40, 2, 29)]


def alone(engine: Any, **load: Any) -> list[tuple[int, ...]]:
    with icc.load(engine, **load) as llm:
        return [llm.generate([p], GREEDY)[0].token_ids for p in prompts()]


@pytest.mark.parametrize("name", ["llama", "mixtral", "gemma2"])
@pytest.mark.parametrize("quant", ["none", "rtn4"])
def test_batch_mates_change_nothing(name: str, quant: str, compiled: Callable[..., Any]) -> None:
    engine = compiled(name, quant=quant, max_step_tokens=24, max_batch_size=5).engine
    expected = alone(engine, threads=1)
    with icc.load(engine, threads=2) as llm:
        together = [c.token_ids for c in llm.generate(prompts(), GREEDY)]
    assert together == expected


def test_preemption_changes_nothing(compiled: Callable[..., Any]) -> None:
    engine = compiled("llama", max_step_tokens=24, max_batch_size=5).engine
    expected = alone(engine)
    from icc.runtime.engine.load import open_engine

    block = open_engine(engine).program.kv.total_block_bytes()
    with icc.load(engine, kv_bytes=5 * block) as llm:  # one sequence of full length and little more
        assert [c.token_ids for c in llm.generate(prompts(), GREEDY)] == expected


def test_logits_do_not_depend_on_how_the_text_is_cut(compiled: Callable[..., Any]) -> None:
    ids = prompts()[4]
    found = []
    for step in (1, 7, 512):
        with icc.load(compiled("llama", quant="rtn4", max_step_tokens=step).engine) as llm:
            found.append(llm.logits(ids))
    assert np.array_equal(found[0], found[1]) and np.array_equal(found[0], found[2])
