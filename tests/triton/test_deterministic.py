"""Same request, same bits (R7): in deterministic engines for any other content of the step, in others within a
phase."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from building import GpuEngine, build
from icc import SamplingParams
from icc.runtime.format.manifest import Limits
from icc.runtime.scheduler.queues import Queues

LIMITS = Limits(max_seq_len=12, max_batch_size=4, max_step_tokens=8)
ASKED = [5, 9, 23, 7, 11]
OTHERS = [[8, 3], [77], [9, 5, 23, 7, 11]]
PARAMS = SamplingParams(max_tokens=6, temperature=0.7, seed=1, logprobs=2, ignore_eos=True)


def make(tiny: Any, path: Path, name: str, quant: str, deterministic: bool) -> GpuEngine:
    config = tiny.tiny_configs()[name]
    config.num_hidden_layers = 1  # the interpreter is slow
    tiny.save_tiny(config, path, "bfloat16" if quant != "none" else "float32")
    return build(path, quant, LIMITS, block_size=4, deterministic=deterministic)


def answers(llm: Any, prompts: list[list[int]], params: SamplingParams = PARAMS) -> list[Any]:
    """Token ids and log-probabilities of each prompt, to the last bit."""
    return [(one.token_ids, one.logprobs) for one in llm.generate(prompts, params)]


def test_neither_batch_nor_chunks_nor_cache_nor_preemption_change_a_bit(
    tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make(tiny, tmp_path, "llama", "rtn4", True)
    with engine.llm() as llm:
        (alone,) = answers(llm, [ASKED])
        assert answers(llm, [ASKED]) == [alone], "out of the prefix cache"
    with engine.llm() as llm:  # the others use up tokens of the steps, so the prompt is chunked
        assert answers(llm, [*OTHERS, ASKED])[-1] == alone
    preempted: list[int] = []
    preempt = Queues.preempt
    monkeypatch.setattr(Queues, "preempt", lambda self, r: (preempted.append(r.id), preempt(self, r)))
    with engine.llm(num_blocks=5) as llm:
        assert answers(llm, [OTHERS[2], ASKED])[-1] == alone
    assert preempted


def test_all_phases_launch_the_same_objects(tiny: Any, tmp_path: Path) -> None:
    plan = make(tiny, tmp_path, "mixtral", "rtn4", True).program.plan
    assert plan is not None and len(plan.phases) > 3
    first = plan.phases[0]
    for phase in plan.phases[1:]:
        assert (phase.launches, phase.before, phase.after) == (first.launches, first.before, first.after)


@pytest.mark.soak
def test_within_a_phase_neighbours_change_nothing(tiny: Any, tmp_path: Path) -> None:
    """Also without the option, a row's sums do not depend on the other rows of its step."""
    engine = make(tiny, tmp_path, "llama", "rtn4", False)
    few = replace(PARAMS, max_tokens=2)
    with engine.llm() as llm:
        beside_one = answers(llm, [[8, 3, 4], ASKED], few)[-1]
    with engine.llm() as llm:
        assert answers(llm, [[60, 61, 62], ASKED], few)[-1] == beside_one
