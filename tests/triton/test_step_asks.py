"""Step kernels whose products prefetch their first weights before they wait; tilings chosen for the whole kernel."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from icc.compiler.backends.triton.dependent import dependent
from icc.compiler.backends.triton.interpreter import launch
from icc.compiler.backends.triton.kernels.linear import LinearKernel
from icc.compiler.backends.triton.kernels.product_source import ProductSource
from icc.compiler.backends.triton.lockstep import Lockstep
from icc.compiler.backends.triton.objects.sass import SassCode, disassemble
from icc.compiler.backends.triton.plan import resident
from icc.compiler.backends.triton.spec import LaunchSpec, Shape
from icc.compiler.backends.triton.step_kernel.runs import step_spec
from icc.compiler.backends.triton.step_kernel.schedule import Span, TileStage, schedule
from icc.compiler.backends.triton.tiling import whole
from icc.compiler.backends.triton.tiling.choice import Tuner
from icc.compiler.backends.triton.tiling.estimate import Estimate
from icc.compiler.backends.triton.tiling.machine import LinearTiling, Machine
from icc.compiler.backends.triton.tiling.whole import StageProduct, WholeTilings
from icc.compiler.targets import TARGETS
from icc.runtime.format.plan import CallArg, OperandArg, SizeArg, StepCountersArg
from interpreting import LIMITS, make_kernel
from products import Forced, weight
from rank_races import run_racing
from sizes import soak
from test_linear_objects import SHAPES, compiled, product

ONE = Shape(1, True)
TILING = {"decode": 1, "m": 8, "n": 16, "k": 128, "warps": 4, "stages": 3, "splits": 1}


def stage(kernel: LinearKernel, tiling: dict[str, int]) -> LaunchSpec:
    [spec] = kernel.staged().launches(ONE, LIMITS, Forced(tiling))
    return spec


def chained(kernels: list[LinearKernel], tiling: dict[str, int] = TILING) -> LaunchSpec:
    """A step kernel of products, each of which reads the previous one's output."""
    specs = [stage(kernel, tiling) for kernel in kernels]
    spans = [frozenset([Span("arena", 64 * n, 64 * n + 64)]) for n in range(len(specs) + 1)]
    stages = schedule(
        [TileStage(f"p{n}", spec.grid[0].constant, spans[n], spans[n + 1]) for n, spec in enumerate(specs)]
    )
    return step_spec(list(enumerate(specs)), stages)


@pytest.mark.parametrize("programs", [3, *soak(1, 9)])
def test_products_in_a_row_have_the_bits_of_launches_and_nothing_races(programs: int) -> None:
    torch.manual_seed(0)
    shapes = ((256, 128), (72, 256))  # the last tile is not full
    weights = [weight(shape, "bf16", 4, 128) for shape in shapes]
    kernels: list[Any] = [
        make_kernel("linear_q", k=k, n=n, types=("bf16", "u8", "", "bf16"), **w.params)
        for (n, k), w in zip(shapes, weights, strict=True)
    ]
    x = torch.randn(1, 128).to(torch.bfloat16)
    rows = [x, *(torch.full((1, n), torch.nan).to(torch.bfloat16) for n, _ in shapes)]
    expected = [x]
    for kernel, w in zip(kernels, weights, strict=True):
        [spec] = kernel.launches(ONE, LIMITS, Forced(TILING))
        assert "ask_weights" not in spec.source
        expected.append(torch.empty(1, kernel.step.n).to(torch.bfloat16))
        known = {OperandArg("x"): expected[-2], OperandArg("w"): w.packed, OperandArg("y"): expected[-1]}
        launch(spec, (spec.grid[0].constant, 1, 1), [known.get(a.value, 1) for a in spec.args])  # type: ignore[arg-type]
    spec, counters = chained(kernels), torch.zeros(32, dtype=torch.int32)
    values: dict[Any, Any] = {SizeArg("num_tokens"): 1, StepCountersArg(): counters}
    for n, w in enumerate(weights):
        named = {"x": rows[n], "w": w.packed, "y": rows[n + 1]}
        values |= {CallArg(n, OperandArg(name)): tensor for name, tensor in named.items()}
    args = [values[arg.value] for arg in spec.args]
    run_racing(programs, [(spec, (1, 1, 1), lambda _: args)], Lockstep(Random(programs).choice), programs=True)
    assert spec.source.count("ask_weights_1(w_ptr_1, ") == 2 and "ask_weights_0(w_ptr_0, " not in spec.source
    assert torch.equal(rows[-1], expected[-1]) and not counters.any()


@pytest.mark.parametrize(("stored", "n"), [(s, n) for s in ("q4g128", "q8g128", "bf16") for n in (16, 64)])
@pytest.mark.parametrize("name", SHAPES)
def test_what_is_asked_for_are_the_first_weights_of_a_program(name: str, stored: str, n: int) -> None:
    """All prefetches lie in W; every tile prefetches its first byte, and each thread a line of 128 bytes."""
    kernel = replace(product(name, stored), ahead=True)
    tile = LinearTiling.of({**TILING, "n": n})
    source, codes = ProductSource(kernel, tile, (), 90), kernel.codes
    nbytes = codes.matrix_nbytes(kernel.step.n, kernel.step.k) if codes else 2 * kernel.step.n * kernel.step.k
    row = 2 * codes.span if codes else 2 * kernel.step.k
    assert len(source.asks) == len(source.parts) * (2 if codes else 1)
    assert source.asked_lines * len(source.parts) == 128
    for first in range(0, kernel.step.columns, n):
        known = {"line": np.arange(source.asked_lines), "first": first, "WIDTH": kernel.step.columns}
        tl = SimpleNamespace(minimum=np.minimum)
        found = [eval(text.replace(".to(tl.int64)", ""), {}, {**known, "tl": tl}) for text in source.asks]
        assert all(at.min() >= 0 and at.max() < nbytes for at in found)
        starts = {part.offset + part.stride * first for part in source.parts}
        assert {int(at.min()) // row for at in found[:: 2 if codes else 1]} == starts


def test_only_stages_of_step_kernels_ask() -> None:
    kernel = product("o", "q4g128")
    [spec] = kernel.launches(ONE, LIMITS, Tuner(TARGETS["h100"]))
    assert "ask_weights" not in spec.source and "ask_weights" in stage(kernel, TILING).source
    floats = replace(product("o", "e4m3"), ahead=True)  # codes row by row; an A100 multiplies them in 16 bits
    assert ProductSource(floats, LinearTiling.of(TILING), (), 80).mode.codes_operands
    assert not ProductSource(floats, LinearTiling.of(TILING), (), 80).asks


def of_8b(stored: str, target: str) -> tuple[WholeTilings, list[StageProduct]]:
    """The tilings of a layer of Llama 8B (q, k, v; attention; o; gate and up; down), and its products."""
    tuner = Tuner(TARGETS[target])
    found = [product(name, stored).stage_product(ONE, tuner) for name in SHAPES]
    products = [one for one in found if one is not None]
    return WholeTilings(Machine(tuner.target), (products[0], None, *products[1:]), 4), products


@pytest.mark.parametrize(("stored", "held"), [("q4g128", 4), ("bf16", 2)])
@pytest.mark.parametrize("target", ["h100", "h200"])
def test_stages_of_8b_are_cut_so_that_as_many_programs_fit_as_its_largest_launch_has(
    target: str, stored: str, held: int
) -> None:
    """By the model, step kernels take 1 to 4 % less time than launches; with the tilings of launches they would take 6
    % more."""
    found, products = of_8b(stored, target)
    launches = found.seconds(whole.LAUNCHES)
    assert min(found.candidates(), key=found.seconds) == {"resident": held}
    assert 0.96 < found.seconds({"resident": held}) / launches < 0.99
    tilings = found.tilings(held)
    assert tilings is not None
    for one in products:
        free = {"n", "stages"}
        assert all(tilings[one.key][name] == one.launched[name] for name in one.launched if name not in free)
        assert found.room(one, tilings[one.key]) >= held
    least = min(found.room(one, one.launched) for one in products)  # every stage with the tiling of its launch
    before = sum(found._stage_seconds(one, one.launched, least) for one in products)
    assert before + whole.LAUNCH + 4 * (whole.MERGE + whole.LATENCY) > 1.06 * launches
    assert found.seconds({"resident": 8}) == inf


def test_fewer_programs_never_make_a_product_faster() -> None:
    for stored in ("q4g128", "bf16"):
        found, products = of_8b(stored, "h100")
        for one in products:
            seconds = [found._stage_seconds(one, one.launched, held) for held in range(1, 6)]
            assert seconds == sorted(seconds, reverse=True)
            unbound = Estimate(found.machine).seconds(one.facts, one.launched)
            assert Estimate(found.machine, 8).seconds(one.facts, one.launched) == unbound


@pytest.mark.parametrize("names", [[], *soak((["gate_up", "down"],))])
def test_the_machine_code_asks_before_it_polls(
    names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`CCTL.E.PF2` comes after the count of the previous stage and before the loop of `LDG.E.STRONG.GPU`; loops are as
    in launches, and no register is spilled if four programs fit."""
    small: list[Any] = [
        make_kernel("linear_q", k=k, n=n, stored="q4g128", types=("bf16", "u8", "", "bf16"))
        for n, k in ((4096, 512), (512, 4096))
    ]
    kernels = [product(name, "q4g128") for name in names] or small
    plain = [kernels[1].launches(ONE, LIMITS, Forced({**TILING, "stages": 4}))[0]]
    spec = dependent(replace(chained(kernels, {**TILING, "stages": 4}), max_registers=128))
    [(_, alone), (_, made)] = compiled([*plain, spec], "h100", tmp_path, monkeypatch)
    assert made.spill_bytes == 0 and made.registers <= 128
    assert resident(made, 4, TARGETS["h100"]) >= 4
    lines = [line.name for line in SassCode(disassemble(made.binary)).lines]
    poll = next(n for n, name in enumerate(lines) if name.startswith("LDG.E.STRONG"))
    asks = [n for n, name in enumerate(lines) if name.startswith("CCTL") and "PF2" in name]
    count = next(n for n, name in enumerate(lines) if name.startswith(("REDG", "ATOMG")))
    assert count < asks[0] < poll < asks[-1], "once before it waits, and for the next tile"
    first, last = made.loops[-1], alone.loops[-1]
    assert (first.copies, first.loads, first.barriers) == (last.copies, last.loads, last.barriers)
