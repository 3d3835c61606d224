"""What ranks give each other: right numbers at odd sizes, launch behind launch, and no race between ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from icc.compiler.backends.triton.kernels.collective import CollectiveKernel
from icc.compiler.backends.triton.lockstep import Lockstep, StuckError
from icc.compiler.backends.triton.plan import kernel_of
from icc.compiler.backends.triton.spec import LaunchSpec, Shape
from icc.compiler.backends.triton.tiling.choice import Tuner
from icc.compiler.program.steps.collective import AllGather, AllReduce, Collective
from icc.compiler.targets import TARGETS
from icc.runtime.format.exchange import EXCHANGE, GONE
from icc.runtime.format.manifest import Limits
from icc.runtime.format.operands import BufferOperand
from icc.runtime.format.plan import AreaArg
from races import Race
from rank_races import run_racing
from sizes import soak

LIMITS = Limits(max_seq_len=64, max_batch_size=4, max_step_tokens=4096)


def operand(name: str, n: int) -> BufferOperand:
    return BufferOperand(name, "f32", n)


def a_sum(ranks: int, n: int) -> AllReduce:
    return AllReduce(kernel="k", x=operand("x", n), y=operand("y", n), n=n, ranks=ranks)


def lines(ranks: int, outer: int, n: int) -> AllGather:
    wide = outer * n
    return AllGather(
        kernel="k", x=operand("x", wide), y=operand("y", ranks * wide), n=n, outer=outer, ranks=ranks
    )  # fmt: skip


def spec_of(step: Collective, tokens: int, target: str = "h100") -> LaunchSpec:
    kernel = kernel_of(step)
    assert isinstance(kernel, CollectiveKernel)
    [spec] = kernel.launches(Shape(tokens, False), LIMITS, Tuner(TARGETS[target]))
    return spec


class Ranks:
    """Values and areas of some ranks. launches: of each, the spec, x of all ranks and what y must be."""

    def __init__(self, ranks: int, seed: int = 0) -> None:
        self.ranks, random = ranks, Random(seed)
        self.areas = [torch.zeros(EXCHANGE.nbytes // 4) for _ in range(ranks)]
        self.lockstep = Lockstep(lambda ready: random.choice(ready))
        self.launches: list[tuple[LaunchSpec, int, list[torch.Tensor], list[torch.Tensor], torch.Tensor]] = []

    def add(self, step: Collective, rows: int, spec: LaunchSpec) -> None:
        xs = [torch.randn(rows, step.widths()["x"]) for _ in range(self.ranks)]
        ys = [torch.full((rows, step.widths()["y"]), float("nan")) for _ in xs]
        if isinstance(step, AllReduce):
            wanted = xs[0].clone()
            for x in xs[1:]:
                wanted += x
        else:
            shaped = [x.reshape(rows, step.outer, 1, step.n) for x in xs]  # type: ignore[attr-defined]
            wanted = torch.cat(shaped, 2).reshape(rows, -1)
        self.launches.append((spec, rows, xs, ys, wanted))

    def run(self) -> None:
        run_racing(
            self.ranks,
            [(spec, (spec.grid[0].constant, 1, 1), self._arguments(*rest)) for spec, *rest, _ in self.launches],
            self.lockstep,
        )
        for _, _, _, ys, wanted in self.launches:
            for y in ys:
                assert torch.equal(y, wanted)

    def _arguments(self, rows: int, xs: list[torch.Tensor], ys: list[torch.Tensor]) -> Any:
        def of(rank: int) -> Sequence[torch.Tensor | int]:
            return [xs[rank].view(-1), ys[rank].view(-1), rows, rank, self.areas[rank], *self.areas]

        return of


@pytest.mark.parametrize("ranks", [2, 3, *soak(4, 8)])
@pytest.mark.parametrize("seed", [0, *soak(*range(1, 20))])
def test_ranks_have_the_same_numbers_and_do_not_race(ranks: int, seed: int) -> None:
    """Kernels of several sizes take turns at the same areas: a decode, odd sizes, and one whose programs have several
    pieces each."""
    node = Ranks(ranks, seed)
    for step, rows, tokens in (
        (a_sum(ranks, 1536), 1, 1), (a_sum(ranks, 33), 3, 4), (lines(ranks, 2, 129), 3, 4), (a_sum(ranks, 33), 0, 4),
        (a_sum(ranks, 520), 7, 1), (lines(ranks, 1, 700), 2, 1), (a_sum(ranks, 1536), 1, 1),
    ):  # fmt: skip
        node.add(step, rows, spec_of(step, tokens))
    node.run()


@pytest.mark.parametrize(
    ("planted", "instead"),
    [
        ("side = 1 - side", "side = side"),  # one place for pieces: the next is written while others read
        ("< turn:", "< turn - 1:"),  # waits for the turn before
        ('sem="release"', 'sem="relaxed"'),
        ('sem="acquire"', 'sem="relaxed"'),
    ],
)
def test_a_kernel_that_waits_too_little_races(planted: str, instead: str) -> None:
    step = a_sum(2, 700)
    spec = spec_of(step, 1)
    assert planted in spec.source
    wrong = replace(spec, source=spec.source.replace(planted, instead))
    with pytest.raises(Race):
        for seed in range(10):
            node = Ranks(2, seed)
            for _ in range(4):
                node.add(step, 2, wrong)
            run_racing(
                2, [(s, (s.grid[0].constant, 1, 1), node._arguments(*rest)) for s, *rest, _ in node.launches],
                node.lockstep,
            )  # fmt: skip


def test_a_rank_that_is_gone_is_not_waited_for_where_it_is_said() -> None:
    """Rank 1 never runs. Rank 0 waits; with GONE in its words it ends, whatever the sum is."""
    step = a_sum(2, 700)
    spec, node = spec_of(step, 1), Ranks(1)
    node.areas.append(torch.zeros(EXCHANGE.nbytes // 4))
    x, y = torch.randn(700), torch.zeros(700)
    arguments = [(spec, (spec.grid[0].constant, 1, 1), lambda _: [x, y, 1, 0, node.areas[0], *node.areas])]
    node.lockstep.patience = 200
    with pytest.raises(StuckError):
        run_racing(1, arguments, node.lockstep)
    words = node.areas[0].view(torch.int64)[: EXCHANGE.turns_at // 8]
    words[:] = GONE
    run_racing(1, arguments, node.lockstep)
    assert torch.equal(y, x)  # of rank 1 there are zeros


def test_arguments_are_the_ranks_areas() -> None:
    spec = spec_of(a_sum(4, 64), 1)
    assert [arg.value for arg in spec.args][4:] == [AreaArg(), *map(AreaArg, range(4))]


@pytest.mark.parametrize("target", ["a100", "h100", "b200", "mi300x"])
def test_a_communicator_is_for_what_it_is_faster_at(target: str) -> None:
    """The plan names it beside the kernel for large sums of 8 ranks, never for those of a decode."""
    step = a_sum(8, 8192)
    assert spec_of(step, 8, target).exchange is None
    exchange = spec_of(step, 4096, target).exchange
    assert exchange is not None and exchange.op == "all_reduce" and not exchange.only
    assert exchange.count.value({"num_tokens": 3}) == 3 * 8192


@pytest.mark.parametrize("target", ["l4", "l40s", "a10g", "rtx4090"])
def test_gpus_that_do_not_see_each_other_have_a_communicator_alone(target: str) -> None:
    kernel, tuner = kernel_of(lines(2, 3, 65)), Tuner(TARGETS[target])
    gather, arrange = kernel.launches(Shape(4, False), LIMITS, tuner)
    assert gather.exchange is not None and gather.exchange.only and not gather.source
    assert kernel.scratch(Shape(4, False), LIMITS, tuner) == {"gathered": 4 * 4 * 195 * 2} and not arrange.exchange
