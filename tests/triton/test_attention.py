"""The attention kernels against float64: every option, odd heads and dims, packed sequences with a past, padding."""

from __future__ import annotations

import pytest
from attention_cases import Layer, Step

# Of the largest output: one rounding of the rotated q, of the weights and of the output (the interpreter truncates bf16).
TOLERANCE = {"f32": 2e-6, "bf16": 2e-2, "f16": 2e-3, "i8": 2e-2}
LAYERS = {
    "grouped": Layer(8, 2, 64, 64, 64),
    "odd": Layer(6, 2, 24, 16, 8),
    "multi-query, interleaved, window": Layer(7, 1, 40, 24, 16, "interleaved", window=20),
    "single, softcap": Layer(5, 5, 80, 80, 40, softcap=5.0),
    "sinks, window": Layer(4, 2, 16, 32, 16, sinks=True, window=70),
    "chunk, wide": Layer(2, 1, 256, 192, chunk=32),
    "alibi": Layer(4, 4, 8, 8, alibi=True),
    "alibi, softcap, sinks": Layer(3, 1, 96, 96, softcap=20.0, sinks=True, alibi=True),
}
MIXED = [(0, 37), (50, 23), (90, 1), (0, 0), (3, 130), (0, 1)]
DECODE = [(36, 1), (0, 1), (200, 1), (0, 0), (0, 0)]


def check(step: Step, decode: bool, **options: object) -> None:
    got, expected = step.run(decode, **options), step.expected()  # type: ignore[arg-type]
    error = (got - expected).abs().max() / expected.abs().max()
    assert error < TOLERANCE[step.cache], error


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("cache", ["f32", "bf16"])
def test_mixed(name: str, cache: str) -> None:
    check(Step(LAYERS[name], MIXED, cache), False)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("cache", ["f32", "bf16"])
def test_decode(name: str, cache: str) -> None:
    check(Step(LAYERS[name], DECODE, cache), True)


@pytest.mark.parametrize("decode", [False, True])
@pytest.mark.parametrize("cache", ["f16", "i8"])
def test_cache_types(cache: str, decode: bool) -> None:
    layer = Layer(6, 2, 24, 40, 24, sinks=True)
    check(Step(layer, DECODE if decode else MIXED, cache, 8), decode)


@pytest.mark.parametrize("decode", [False, True])
def test_float_queries_over_a_narrower_cache(decode: bool) -> None:
    for cache in ("bf16", "i8"):
        check(Step(LAYERS["odd"], DECODE if decode else MIXED, cache, kind="f32"), decode)
