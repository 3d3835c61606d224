"""Collectives of ranks: right numbers at odd sizes, over consecutive launches, and no race between ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import pytest
import torch
from icc.compiler.backends.triton.kernels.collective import CollectiveKernel
from icc.compiler.backends.triton.lockstep import Lockstep, StuckError
from icc.compiler.backends.triton.plan import kernel_of
from icc.compiler.backends.triton.spec import LaunchSpec, Shape
from icc.compiler.backends.triton.tiling.choice import Tuner
from icc.compiler.program.steps.collective import AllGather, AllReduce, Collective, GatherRows, ReduceScatter
from icc.compiler.targets import TARGETS
from icc.runtime.format.exchange import EXCHANGE, GONE
from icc.runtime.format.manifest import Limits
from icc.runtime.format.operands import BufferOperand
from icc.runtime.format.plan import EVEN_TOKENS, RANK, ROWS, AreaArg, OwnRows, SizeArg, whole_rows
from races import Race
from rank_races import run_racing
from sizes import soak

LIMITS = Limits(max_seq_len=64, max_batch_size=4, max_step_tokens=4096)
LEAST = 4  # fewer rows are not divided


def operand(name: str, n: int, dtype: str = "f32") -> BufferOperand:
    return BufferOperand(name, dtype, n)


def a_sum(ranks: int, n: int) -> AllReduce:
    return AllReduce(kernel="k", x=operand("x", n), y=operand("y", n), n=n, ranks=ranks)


def lines(ranks: int, outer: int, n: int) -> AllGather:
    wide = outer * n
    return AllGather(
        kernel="k", x=operand("x", wide), y=operand("y", ranks * wide), n=n, outer=outer, ranks=ranks
    )  # fmt: skip


def own_sum(ranks: int, n: int) -> ReduceScatter:
    return ReduceScatter(kernel="k", x=operand("x", n), y=operand("y", n), n=n, ranks=ranks, least=LEAST)


def all_rows(ranks: int, n: int, dtype: str = "f32") -> GatherRows:
    x = operand("x", n, dtype)
    return GatherRows(kernel="k", x=x, y=x, n=n, ranks=ranks, least=LEAST)


def spec_of(step: Collective, tokens: int, target: str = "h100") -> LaunchSpec:
    kernel = kernel_of(step)
    assert isinstance(kernel, CollectiveKernel)
    [spec] = kernel.launches(Shape(tokens, False), LIMITS, Tuner(TARGETS[target]))
    return spec


class Ranks:
    """Values and exchange areas of some ranks. launches: spec, rows, x and y of all ranks, and the expected y."""

    def __init__(self, ranks: int, seed: int = 0) -> None:
        self.ranks, random = ranks, Random(seed)
        self.areas = [torch.zeros(EXCHANGE.nbytes // 4) for _ in range(ranks)]
        self.lockstep = Lockstep(lambda ready: random.choice(ready))
        self.launches: list[tuple[LaunchSpec, int, list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]] = []

    def add(self, step: Collective, rows: int, spec: LaunchSpec) -> None:
        kind = torch.bfloat16 if step.x.dtype == "bf16" else torch.float32
        xs = [torch.randn(rows, step.widths()["x"]).to(kind) for _ in range(self.ranks)]
        ys = [torch.full((rows, step.widths()["y"]), float("nan")) for _ in xs]
        own = [self._own(rows, rank) for rank in range(self.ranks)]
        if isinstance(step, GatherRows):
            every = torch.cat([x[rows_of] for x, rows_of in zip(xs, own, strict=True)])
            wanted = [every if rows >= LEAST else x for x in xs]
            ys = xs = [self._alone(x, rows_of) for x, rows_of in zip(xs, own, strict=True)]
        elif isinstance(step, AllGather):
            wanted = [torch.cat([x.reshape(rows, step.outer, 1, step.n) for x in xs], 2).reshape(rows, -1)] * self.ranks
        else:
            total = xs[0].clone()
            for x in xs[1:]:
                total += x
            by_rows = isinstance(step, ReduceScatter)
            wanted = [self._alone(total, rows_of) if by_rows else total for rows_of in own]
        self.launches.append((spec, rows, xs, ys, wanted))

    def _sizes(self, rows: int, rank: int) -> dict[str, int]:
        divided = OwnRows(self.ranks, LEAST).sizes(rows, rank) if rows >= LEAST else whole_rows(rows)
        return {"num_tokens": rows, RANK: rank, **divided}

    def _own(self, rows: int, rank: int) -> slice:
        first, own, *_ = (self._sizes(rows, rank)[name] for name in ROWS)
        return slice(first, first + own)

    def _alone(self, rows: torch.Tensor, own: slice) -> torch.Tensor:
        """The rows with all except the rank's own set to NaN."""
        found = torch.full_like(rows, float("nan"))
        found[own] = rows[own]
        return found

    def run(self) -> None:
        run_racing(self.ranks, self.bound(), self.lockstep)
        for _, _, _, ys, wanted in self.launches:
            for y, its in zip(ys, wanted, strict=True):
                assert torch.equal(y.nan_to_num(1e9), its.nan_to_num(1e9))

    def bound(self) -> list[Any]:
        """The launches for `run_racing` whose grid is not empty, with their grids and arguments."""
        found = []
        for spec, rows, xs, ys, _ in self.launches:
            if programs := spec.grid[0].value(self._sizes(rows, 0)):
                found.append((spec, (programs, 1, 1), partial(self._arguments, spec, rows, xs, ys)))
        return found

    def _arguments(
        self, spec: LaunchSpec, rows: int, xs: list[torch.Tensor], ys: list[torch.Tensor], rank: int
    ) -> Sequence[torch.Tensor | int]:
        sizes, areas = self._sizes(rows, rank), {f"area{r}_ptr": area for r, area in enumerate(self.areas)}
        places = {"x_ptr": xs[rank].view(-1), "y_ptr": ys[rank].view(-1), "own_ptr": self.areas[rank], **areas}
        return [sizes[arg.value.name] if isinstance(arg.value, SizeArg) else places[arg.name] for arg in spec.args]


@pytest.mark.parametrize("ranks", [2, 3, *soak(4, 8)])
@pytest.mark.parametrize("seed", [0, *soak(*range(1, 20))])
def test_ranks_have_the_same_numbers_and_do_not_race(ranks: int, seed: int) -> None:
    """Kernels of several sizes use the same areas in turn: a decode, odd sizes, and one whose programs have several
    chunks each."""
    node = Ranks(ranks, seed)
    for step, rows, tokens in (
        (a_sum(ranks, 1536), 1, 1), (a_sum(ranks, 33), 3, 4), (lines(ranks, 2, 129), 3, 4), (a_sum(ranks, 33), 0, 4),
        (a_sum(ranks, 520), 7, 1), (lines(ranks, 1, 700), 2, 1), (a_sum(ranks, 1536), 1, 1),
    ):  # fmt: skip
        node.add(step, rows, spec_of(step, tokens))
    node.run()


@pytest.mark.parametrize("ranks", [2, 3, *soak(4, 8)])
@pytest.mark.parametrize("seed", [0, *soak(*range(1, 20))])
def test_rows_that_ranks_divide(ranks: int, seed: int) -> None:
    """Numbers of rows that divide evenly or not, also in 16 bits, between whole sums; several chunks per program. If
    there are few rows, every rank has all of them, and nothing is gathered."""
    node = Ranks(ranks, seed)
    for step, rows, tokens in (
        (own_sum(ranks, 96), 8, 8), (all_rows(ranks, 96), 8, 8), (own_sum(ranks, 33), 3, 16),
        (a_sum(ranks, 96), 1, 1), (all_rows(ranks, 34, "bf16"), 7, 16), (all_rows(ranks, 33), 3, 16),
        (own_sum(ranks, 520), 13, 4), (all_rows(ranks, 520), 13, 4), (own_sum(ranks, 33), 0, 16),
    ):  # fmt: skip
        node.add(step, rows, spec_of(step, tokens))
    node.run()


def test_decodes_and_small_phases_have_whole_sums() -> None:
    """Their kernel is that of a whole sum, and no gather is launched."""
    tuner = Tuner(TARGETS["h100"])
    for shape in (Shape(64, True), Shape(LEAST - 1, False)):
        [own] = kernel_of(own_sum(2, 96)).launches(shape, LIMITS, tuner)
        assert own == kernel_of(a_sum(2, 96)).launches(shape, LIMITS, tuner)[0]
        assert kernel_of(all_rows(2, 96)).launches(shape, LIMITS, tuner) == ()
    [gather] = kernel_of(all_rows(2, 96)).launches(Shape(64, False), LIMITS, tuner)
    assert not gather.grid[0].value({EVEN_TOKENS: 0})


@pytest.mark.parametrize("tokens", [4, 5, 32, 37, 63])
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("step", [1, 4])
def test_every_row_is_one_ranks_own(tokens: int, ranks: int, step: int) -> None:
    """All ranks except the last have equally many rows, as a communicator's collectives require."""
    every = [OwnRows(ranks, 1, step).sizes(tokens, rank) for rank in range(ranks)]
    if not every[0][EVEN_TOKENS]:
        assert tokens < ranks * step and every == [whole_rows(tokens)] * ranks
        return
    rows = [row for own in every for row in range(own["first_own"], own["first_own"] + own["own_tokens"])]
    assert rows == list(range(tokens)) and all(own["first_own"] % step == 0 for own in every)
    assert {own["own_tokens"] for own in every[:-1]} == {every[0][EVEN_TOKENS]}
    assert 0 <= every[0]["rest_tokens"] < ranks * step


@pytest.mark.parametrize(
    ("planted", "instead"),
    [
        ("side = 1 - side", "side = side"),  # one buffer for chunks: the next is written while others read
        ("< turn:", "< turn - 1:"),  # waits for the previous turn
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
            run_racing(2, node.bound(), node.lockstep)


def test_a_rank_that_is_gone_is_not_waited_for_where_it_is_said() -> None:
    """Rank 1 never runs. Rank 0 waits; once its flags are GONE it ends, with any sum."""
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
    assert torch.equal(y, x)  # rank 1's area has zeros


def test_arguments_are_the_ranks_areas() -> None:
    spec = spec_of(a_sum(4, 64), 1)
    assert [arg.value for arg in spec.args][4:] == [AreaArg(), *map(AreaArg, range(4))]


@pytest.mark.parametrize("target", ["a100", "h100", "b200", "mi300x"])
def test_a_communicator_is_for_what_it_is_faster_at(target: str) -> None:
    """The plan names a communicator beside the kernel for large sums of 8 ranks, never for a decode."""
    step = a_sum(8, 8192)
    assert spec_of(step, 8, target).exchange is None
    exchange = spec_of(step, 4096, target).exchange
    assert exchange is not None and exchange.op == "all_reduce" and not exchange.only
    assert exchange.count.value({"num_tokens": 3}) == 3 * 8192


@pytest.mark.parametrize("target", ["a100", "h100", "b200", "mi300x"])
def test_a_communicator_is_for_many_rows_that_are_divided(target: str) -> None:
    """A ring moves as many bytes as direct reads, so its bandwidth must make up for its latency."""
    for step in (own_sum(8, 8192), all_rows(8, 8192)):
        assert spec_of(step, 32, target).exchange is None
        exchange = spec_of(step, 4096, target).exchange
        assert exchange is not None and exchange.op == step.op and exchange.count.value({}) == 8192


@pytest.mark.parametrize("target", ["l4", "l40s", "a10g", "rtx4090"])
def test_gpus_that_do_not_see_each_other_have_a_communicator_alone(target: str) -> None:
    kernel, tuner = kernel_of(lines(2, 3, 65)), Tuner(TARGETS[target])
    for step in (own_sum(2, 64), all_rows(2, 64)):
        [own] = kernel_of(step).launches(Shape(4, False), LIMITS, tuner)
        assert own.exchange is not None and own.exchange.only and not own.source
    gather, arrange = kernel.launches(Shape(4, False), LIMITS, tuner)
    assert gather.exchange is not None and gather.exchange.only and not gather.source
    assert kernel.scratch(Shape(4, False), LIMITS, tuner) == {"gathered": 4 * 4 * 195 * 2} and not arrange.exchange
