"""Programs of a launch never touch the same bytes without an order, and the order of programs has no effect."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from building import GpuEngine, build
from icc.compiler.backends.triton.interpreter import load_source
from icc.runtime.batch.scheduled import ScheduledBatch, ScheduledSequence
from icc.runtime.executor.sampling import SamplingRow
from icc.runtime.format.manifest import Limits
from races import Order, Race, detecting, reverse, shuffle
from sizes import soak

HEAD = "import triton\nimport triton.language as tl\n\nN = tl.constexpr(4)\n\n\n@triton.jit\n"
COUNTED = (
    HEAD
    + '''def kernel(x_ptr, count_ptr, y_ptr):
    """The last program of all adds what the others left."""
    at = tl.program_id(0)
    tl.store(x_ptr + at, at + 1)
    if {count} == tl.num_programs(0) - 1:
        tl.store(y_ptr, tl.sum(tl.load(x_ptr + tl.arange(0, N)), axis=0))
'''
)
FAMILIES = soak(
    "mixtral", "gpt_oss", "gemma2-odd", "lfm2-short_convolutions", "qwen3_next-delta_rule", "bamba-state_space",
    "jamba-selective_scan", "deepseek_v3-latent_grouped_routing",
)  # fmt: skip
MINE = "x_ptr + tl.program_id(0)"
PLANTED = {
    "the last column is the next one's first": f"tl.store({MINE} * 3 + tl.arange(0, N), 1)",
    "half of an element": f"tl.store(({MINE} + 1).to(tl.pointer_type(tl.int64), bitcast=True), 7)",
    "reads what another writes": f"tl.store({MINE}, tl.load({MINE} + 1))",
    "nothing": f"tl.store({MINE} * N + tl.arange(0, N), tl.load(x_ptr + 16 + tl.arange(0, N)))",
}


@pytest.mark.parametrize("kind", PLANTED)
def test_planted_races_are_found(kind: str) -> None:
    source = HEAD + f"def kernel(x_ptr):\n    {PLANTED[kind]}\n"
    x = torch.zeros(64, dtype=torch.int32)
    kernel = load_source(source).kernel
    if kind == "nothing":
        with detecting() as seen:
            kernel[(3,)](x)
        assert seen == ["kernel"]
        return
    with detecting(), pytest.raises(Race, match="kernel: a byte is"):
        kernel[(3,)](x)


def test_what_is_outside_of_all_arguments_is_found() -> None:
    kernel = load_source(HEAD + "def kernel(x_ptr):\n    tl.store(x_ptr + tl.program_id(0), 1)\n").kernel
    x = torch.zeros(8, dtype=torch.int32)
    with detecting():
        kernel[(4,)](x[4:])
    with detecting(), pytest.raises(Exception, match="1 of 1 elements are in no argument"):
        kernel[(4,)](x[:3])


def test_an_atomic_orders_what_comes_before_and_behind_it() -> None:
    def run(count: str, order: Any = shuffle) -> int:
        x, counter, y = (torch.zeros(4, dtype=torch.int32) for _ in range(3))
        with detecting(order):
            load_source(COUNTED.format(count=count)).kernel[(4,)](x, counter, y)
        return int(y[0])

    assert {run("tl.atomic_add(count_ptr, 1)", order) for order in (reverse, shuffle)} == {10}
    with pytest.raises(Race, match="read by another"):
        run("tl.atomic_add(count_ptr + tl.program_id(0), 1) + tl.program_id(0)", reverse)


def steps(engine: GpuEngine) -> list[np.ndarray]:
    """The logits of a prompt in two chunks beside others, of decodes, and the tokens sampled from them."""
    executor = engine.executor()
    found = []
    size = executor.groups[0].block_size

    def sequence(number: int, count: int, start: int, logits: int) -> ScheduledSequence:
        tables = tuple((number * 2, number * 2 + 1) for _ in executor.groups)
        assert start + count <= 2 * size
        return ScheduledSequence(number, tuple(range(5 + number, 5 + number + count)), start, tables, logits)

    batches = (
        (sequence(0, 9, 0, 0), sequence(1, 1, 0, 1)),
        (sequence(1, 1, 1, 1), sequence(0, 3, 9, 1), sequence(2, 4, 0, 1)),
    )
    for batch in batches:
        found.append(executor.step(ScheduledBatch(batch)).copy())
    decodes = sequence(0, 1, 12, 1), sequence(1, 1, 2, 1), sequence(2, 1, 4, 1)
    again = executor.collect(executor.submit(ScheduledBatch(decodes), [SamplingRow(0.9, 5, 0.9, 0.0, 7, 1)] * 3))
    executor.close()
    return [*found, again.token_ids.copy(), again.logprobs.copy()]


def check_engine(engine: GpuEngine, *orders: Order) -> None:
    expected = steps(engine)
    for order in orders:
        with detecting(order) as seen:
            found = steps(engine)
        assert {"pending", "sample_choose"} <= set(seen)
        for one, other in zip(expected, found, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.slow
def test_the_programs_of_a_plan_do_not_race(on_disk: Any) -> None:
    check_engine(on_disk.memory, shuffle)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_nor_do_those_of_other_families(tiny: Any, tmp_path: Path, family: str) -> None:
    config = tiny.tiny_configs()[family]
    tiny.save_tiny(config, tmp_path)
    check_engine(
        build(tmp_path, "none", Limits(max_seq_len=48, max_batch_size=4, max_step_tokens=16)), shuffle, reverse
    )
