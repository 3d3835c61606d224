"""The predictions of the cost models for Llama 8B on every target, asserted so that a change of tilings cannot lose
them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from icc.compiler.backends.triton.kernels.linear import LinearKernel
from icc.compiler.backends.triton.plan import phase_shapes
from icc.compiler.backends.triton.tiling.choice import Config, Tuner
from icc.compiler.backends.triton.tiling.linear import ROWS, LinearTilings, pick
from icc.compiler.engine.manifest import default_steps
from icc.compiler.targets import TARGETS
from icc.runtime.format.manifest import Limits
from test_linear_objects import SHAPES, product

GPUS = [name for name, target in TARGETS.items() if target.backend != "cpu"]


def modelled(kernel: LinearKernel, rows: int, target: str) -> tuple[Config, float]:
    """The tiling that is picked, and its modelled seconds."""
    tuner = Tuner(TARGETS[target])
    facts = kernel.product(rows, tuner.target.level)
    config = pick(facts, tuner)
    return config, LinearTilings(tuner.target).seconds(facts, config)


@pytest.mark.parametrize("target", GPUS)
def test_four_bits_are_faster_where_weights_are_what_is_read_and_hardly_slower_elsewhere(target: str) -> None:
    """On an H100, products of 512 rows and more were measured to take 1.01 to 1.07 times those of 16 bits. A B200,
    whose matrix units read dense operands as they come from memory, is modelled to lose more between 128 and 1,024
    rows."""
    known = {"sm_86": 1.08, "sm_90": 1.07, "sm_100": 1.35, "sm_103": 1.35, "sm_110": 1.25}
    slower = known.get(TARGETS[target].arch, 1.03)
    for rows in (1, *ROWS, 8192):
        four, sixteen = (
            sum(modelled(product(name, stored), rows, target)[1] for name in SHAPES) for stored in ("q4g128", "bf16")
        )
        limit = sixteen * (slower if rows >= 64 else 1.0)
        assert four <= limit, f"{rows} rows: {four * 1e6:.0f} us, {sixteen * 1e6:.0f} us"


# microseconds of Llama 8B's products on an H100 with 4 bits and with 16, by rows (NOTES, "Products on an H100")
MEASURED = {1: (72, 171), 16: (74, 174), 64: (100, 188), 128: (140, 197), 256: (231, 241), 512: (399, 373),
            1024: (674, 668), 2048: (1326, 1278), 8192: (5477, 5106)}  # fmt: skip


@pytest.mark.parametrize("rows", MEASURED)
def test_the_model_says_what_was_measured(rows: int) -> None:
    """4 bits within 17 %, 16 bits within 8 %, and their ratio within 13 % (the model is too optimistic for 4 bits and
    few rows)."""
    four, sixteen = (
        sum(modelled(product(name, stored), rows, "h100")[1] for name in SHAPES) * 1e6 for stored in ("q4g128", "bf16")
    )
    assert four / MEASURED[rows][0] == pytest.approx(1, abs=0.17)
    assert sixteen / MEASURED[rows][1] == pytest.approx(1, abs=0.08)
    assert four / sixteen == pytest.approx(MEASURED[rows][0] / MEASURED[rows][1], rel=0.13)


@pytest.mark.parametrize("target", GPUS)
def test_one_row_comes_near_the_limit_of_its_bytes(target: str) -> None:
    """The model's bandwidth, as a share of the memory's: the goals, 0.8 and 0.65 (4 bits), are missed on targets with
    the fastest memory, most of all by 4 bits."""
    fours = {"h100": 0.5, "h200": 0.35, "b200": 0.24, "b300": 0.24, "mi300x": 0.4, "mi325x": 0.35, "mi355x": 0.37}
    for stored, bits, share in (("bf16", 16, 0.7), ("q4g128", 4.25, fours.get(target, 0.6))):
        kernels = [product(name, stored) for name in SHAPES]
        nbytes = sum(kernel.step.n * kernel.step.k for kernel in kernels) * bits / 8
        seconds = sum(modelled(kernel, 1, target)[1] for kernel in kernels)
        assert nbytes / (TARGETS[target].bandwidth * 1e9) >= share * seconds, (stored, seconds)


@pytest.mark.parametrize("target", GPUS)
def test_8_bit_floats_are_never_slower_than_sixteen_bits(target: str) -> None:
    """For any number of rows on targets with instructions for them, within the model's uncertainty; on others for few
    rows, which are memory-bound."""
    for rows in (1, *ROWS, 8192) if TARGETS[target].float8 else (1, 8, 16, 32):
        sixteen, *eight = (
            sum(modelled(product(name, stored), rows, target)[1] for name in SHAPES)
            for stored in ("bf16", "e4m3", "e4m3_kg128")
        )
        most = 1.05 if target == "thor" else 1.04  # blocks of 128, at 4,096 rows
        assert max(eight) <= most * sixteen, f"{rows} rows: {eight}, {sixteen}"


def test_four_bits_with_rows_of_eight_are_the_fastest_on_sm_100() -> None:
    """MXFP4 times MXFP8, for any number of rows, by the model."""
    for rows in (1, *ROWS, 8192):
        four, eight, sixteen = (
            sum(modelled(product(name, stored), rows, "b200")[1] for name in SHAPES)
            for stored in ("mxfp4a8", "e4m3", "bf16")
        )
        assert four <= eight <= sixteen, f"{rows} rows: {four}, {eight}, {sixteen}"


@pytest.mark.parametrize("target", GPUS)
def test_rows_of_8_bits_are_taken_only_where_they_pay(target: str) -> None:
    """8-bit rows never make 4-bit codes slower. The goal, 0.75 of the time of 16 bits from 512 rows on, is met by the
    model on sm_80 to sm_89 and missed on sm_90, where unpacking codes takes as long as multiplying them (log of
    2026-11-27)."""
    arch, level = TARGETS[target].arch, TARGETS[target].level
    for rows in (1, *ROWS, 8192) if level else ():
        eight, four, sixteen = (
            sum(modelled(product(name, stored), rows, target)[1] for name in SHAPES)
            for stored in ("q4a8g128", "q4g128", "bf16")
        )
        assert eight <= 1.0001 * four, f"{rows} rows: {eight}, {four}"
        if rows >= 512:
            limit = 0.75 if level < 90 else {"sm_90": 1.05}.get(arch, 1.3)
            assert eight <= limit * sixteen, f"{rows} rows: {eight / sixteen:.2f} of 16 bits"
        if arch == "sm_90" and rows >= 4096:
            assert eight <= 0.97 * sixteen


# microseconds of tilings with e4m3 rows on an H200, including the kernel that rounds rows (log of 2026-11-27)
TIMED_ROWS8 = {
    ("qkv", 2048, 128, 64, 4): 147.3, ("qkv", 2048, 128, 128, 8): 179.5, ("qkv", 2048, 64, 128, 8): 201.4,
    ("o", 2048, 128, 64, 4): 110.9, ("o", 2048, 128, 128, 8): 124.2, ("down", 2048, 128, 64, 4): 337.5,
    ("down", 2048, 128, 128, 8): 407.4, ("gate_up", 2048, 64, 64, 4): 930.5, ("gate_up", 2048, 64, 128, 8): 1061.8,
    ("qkv", 512, 128, 64, 4): 50.3, ("qkv", 512, 128, 128, 8): 61.3, ("down", 512, 128, 64, 4): 88.0,
    ("qkv", 8192, 128, 64, 4): 583.4, ("down", 8192, 128, 64, 4): 1447.8, ("gate_up", 8192, 64, 64, 4): 3877.0,
}  # fmt: skip


def test_the_model_says_what_rows_of_8_bits_were_measured_to_take() -> None:
    model = LinearTilings(TARGETS["h200"])
    for (name, rows, m, n, warps), us in TIMED_ROWS8.items():
        facts = product(name, "q4a8g128").product(rows, 90)
        config = {"decode": 0, "m": m, "n": n, "k": 128, "warps": warps, "stages": 3, "splits": 1, "eight": 1}
        assert config in model.candidates(facts)
        assert model.seconds(facts, config) * 1e6 == pytest.approx(us, rel=0.2), (name, rows, m, n, warps)


@pytest.mark.parametrize("target", ["h100", "b200"])
def test_products_fill_the_multiprocessors_where_a_split_can(target: str) -> None:
    """From 512 rows on; fewer rows are memory-bound, and half of the multiprocessors can saturate memory. If twice as
    many programs needed a second wave, a split gains nothing."""
    sms = TARGETS[target].multiprocessors
    for stored in ("bf16", "q4g128"):
        for name in SHAPES:
            for rows in (512, 1024, 4096):
                facts = replace(product(name, stored).product(rows, TARGETS[target].level), rows=rows)
                config = pick(facts, Tuner(TARGETS[target]))
                programs = -(-facts.columns // config["n"]) * -(-rows // config["m"]) * config["splits"]
                assert programs >= 0.8 * sms or 2 * programs > sms, (stored, name, rows, config)


@pytest.mark.parametrize("target", ["h100", "h200"])
def test_codes_are_multiplied_by_instructions_of_warp_groups(target: str) -> None:
    """From 64 rows on, and never by several warps that compute the same columns."""
    for stored in ("q4g128", "q8g128"):
        for name in SHAPES:
            for rows in (64, 128, 256, 512, 1024, 4096):
                config, _ = modelled(product(name, stored), rows, target)
                assert config.get("unpacked") or (config["n"] >= 64 and config["n"] >= 16 * config["warps"])


def test_defaults_follow_the_memory_of_the_target_and_the_model() -> None:
    llama = 8_030_000_000
    assert default_steps(TARGETS["h100"], llama) == default_steps(TARGETS["h200"], llama) == (256, 8192)
    assert default_steps(TARGETS["l40s"], llama) == (128, 4096) and default_steps(TARGETS["l4"], llama) == (32, 1024)
    assert default_steps(TARGETS["h100"], 70_000_000_000) == (128, 4096)
    assert default_steps(TARGETS["cpu"], llama) == (16, 512)
    sizes = [shape.max_tokens for shape in phase_shapes(Limits(4096, 256, 8192)) if not shape.decode]
    assert 512 in sizes and sizes[-1] == 8192
