"""The attention kernels against float64: every option, odd heads and dims, packed sequences with a past, padding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch
from attention_cases import LIMITS, Layer, Step
from icc.compiler.backends.errors import CodegenError
from icc.compiler.backends.triton.objects.compile import compile_specs
from icc.compiler.backends.triton.plan import kernel_of
from icc.compiler.backends.triton.spec import Shape
from icc.compiler.backends.triton.tiling.attention import decode_tiling
from icc.compiler.backends.triton.tiling.choice import Tuner
from icc.compiler.program.steps.attention import Rotary
from icc.compiler.targets import TARGETS
from icc.runtime.format.kv import KVLayer
from interpreting import TUNER
from sizes import soak, usual

# Relative to the largest output: one rounding each of q, the weights and the output.
TOLERANCE = {"f32": 2e-6, "bf16": 1e-2, "f16": 1e-3, "i8": 1e-2, "f8": 1e-2, "i4": 1e-2, "i2": 1e-2}
LAYERS = {
    "grouped": Layer(8, 2, 64, 64, 64),
    "odd": Layer(6, 2, 24, 16, 8),
    "multi-query, interleaved, window": Layer(7, 1, 40, 24, 16, "interleaved", window=20),
    "single, softcap": Layer(3, 3, 80, 80, 40, softcap=5.0),
    "sinks, window": Layer(4, 2, 16, 32, 16, sinks=True, window=50),
    "chunk, wide": Layer(2, 1, 256, 192, chunk=32),
    "alibi": Layer(2, 2, 8, 8, alibi=True),
    "first tokens and a window": Layer(4, 2, 16, 16, 8, window=30, front=5, sinks=True),
    "alibi, softcap, sinks": Layer(5, 1, 96, 96, softcap=20.0, sinks=True, alibi=True),
    "biases by distance, a query's own too": Layer(4, 2, 16, 16, 8, bias=True, row_bias=21),
}
MIXED = [(0, 19), (37, 23), (90, 1), (0, 0), (3, 70), (0, 1)]
DECODE = [(36, 1), (0, 1), (170, 1), (0, 0), (0, 0)]


def check(step: Step, decode: bool, **options: Any) -> None:
    got, expected = step.run(decode, **options), step.expected()
    error = (got - expected).abs().max() / expected.abs().max()
    assert error < TOLERANCE[step.cache], error


@pytest.mark.parametrize("name", LAYERS)
def test_mixed(name: str) -> None:
    check(Step(LAYERS[name], MIXED, "bf16"), False)


WHOLE = [(0, 19), (0, 1), (0, 70), (0, 23)]  # sequences with every token in the step
AHEAD = {
    "all": Layer(4, 4, 32, 32, ahead=-1),
    "window to both sides": Layer(4, 2, 16, 16, 16, window=9, ahead=8),
    "biases by distance": Layer(2, 2, 24, 24, ahead=-1, bias=True, row_bias=33, later=16),
    "biases of queries and of keys": Layer(4, 2, 24, 24, ahead=-1, row_bias=139, later=69, key_bias=29, key_later=4),
}


@pytest.mark.parametrize("name", AHEAD)
def test_tokens_that_see_later_ones(name: str) -> None:
    check(Step(AHEAD[name], WHOLE, "bf16"), False)
    check(Step(AHEAD[name], [(0, 1), (0, 1)], "f32"), True)


# a wide tree, one of more than 32 tokens, and one across the end of a page and of a tile, beside plain sequences
TREES = {
    0: [0, 0, 1, 1, 2, 3, 3, 6, 0, 9],
    3: [max(0, i // 2 - i % 3) for i in range(47)],
    4: [0, 0, 1, 2, 3, 0, 6, 7, 8],
}
VERIFYING = [(37, 11), (0, 19), (90, 1), (5, 48), (60, 10), (64, 5)]


# without trees, the other caches are in test_mixed
@pytest.mark.parametrize(
    "name",
    usual(LAYERS, "grouped", "single, softcap", "sinks, window", "chunk, wide", "alibi", "alibi, softcap, sinks"),
)
def test_trees_of_guesses(name: str) -> None:
    check(Step(LAYERS[name], VERIFYING, "bf16", trees=TREES), False)


def test_trees_in_small_tiles() -> None:
    """Some tiles begin within a tree."""
    step = Step(LAYERS["multi-query, interleaved, window"], VERIFYING, "f32", trees=TREES)
    key = f"attention_mixed_{step.kernel().workload.key}_many"
    tiling = {"rows": 32, "heads": 7, "tile": 16, "warps": 4, "stages": 2}
    check(step, False, tuner=Tuner(TARGETS["h100"], {key: tiling}))


@pytest.mark.parametrize("name", LAYERS)
def test_decode(name: str) -> None:
    check(Step(LAYERS[name], DECODE, "bf16"), True)


@pytest.mark.parametrize("name", ["odd", *soak("multi-query, interleaved, window", "alibi, softcap, sinks")])
def test_float32(name: str) -> None:
    check(Step(LAYERS[name], [(0, 9), (17, 21), (60, 1)], "f32"), False)
    check(Step(LAYERS[name], [(0, 1), (77, 1), (0, 0)], "f32"), True)


@pytest.mark.parametrize("cache", ["f16", "i8", "f8", "i4", *soak("i2")])
def test_cache_types(cache: str) -> None:
    layer = Layer(6, 2, 24, 40, 24, sinks=True)
    check(Step(layer, MIXED, cache, 8), False)
    check(Step(layer, DECODE, cache, 8), True)


@pytest.mark.parametrize(("cache", "key_dim"), [("bf16", 80), ("i8", 80), *soak(("i4", 80), ("i2", 96), ("i4", 192))])
def test_values_that_are_the_beginning_of_keys(cache: str, key_dim: int) -> None:
    layer = Layer(6, 1, key_dim, 64 if key_dim < 128 else 128, shared=True)
    check(Step(layer, MIXED, cache), False)
    check(Step(layer, DECODE, cache), True)


@pytest.mark.parametrize("cache", ["i8", *soak("bf16")])
def test_float_queries_over_a_narrower_cache(cache: str) -> None:
    check(Step(LAYERS["odd"], MIXED, cache, kind="f32"), False)
    check(Step(LAYERS["odd"], DECODE, cache, kind="f32"), True)


@pytest.mark.parametrize("splits", [1, 2, 64])
@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_splits_and_pages(splits: int, block_size: int) -> None:
    """Splits of several tiles and of none; pages smaller than, as large as and larger than a tile."""
    step = Step(LAYERS["sinks, window"], [(230, 1), (1, 1), (0, 0)], "bf16", block_size)
    step.layer = replace(step.layer, window=200)
    work = step.kernel().workload
    key = f"attention_splits_{work.key}_s200_n3"
    tiling = {"heads": 2, "rows": 16, "tile": 32, "warps": 4, "stages": 2}
    tuned = Tuner(TARGETS["h100"], {key: {"splits": splits}, f"attention_decode_{work.key}": tiling})
    check(step, True, tuner=tuned)


class Split(Tuner):
    """A tuner that chooses a given number of splits."""

    def __init__(self, splits: int) -> None:
        super().__init__(TARGETS["h100"])
        object.__setattr__(self, "splits", splits)

    def pick(self, key: str, candidates: Any, cost: Any) -> dict[str, int]:
        if key.startswith("attention_splits"):
            return {"splits": self.splits}  # type: ignore[attr-defined]
        return super().pick(key, candidates, cost)


@pytest.mark.parametrize(
    ("name", "cache", "splits"),
    [("sinks, window", "bf16", 2), ("chunk, wide", "bf16", 3),
     *soak(("first tokens and a window", "bf16", 3), ("grouped", "i4", 2)),
     *soak(*((name, "bf16", splits) for name in LAYERS for splits in (2, 64)))],
)  # fmt: skip
def test_mixed_steps_whose_keys_are_split(name: str, cache: str, splits: int) -> None:
    """Prompts, decodes and trees; splits of several tiles, of one and of none."""
    step = Step(LAYERS[name], VERIFYING, cache, trees=TREES)
    check(step, False, tuner=Split(splits), max_tokens=step.tokens)
    launches = step.kernel().launches(Shape(64, False), LIMITS, Split(splits))
    assert [spec.entry for spec in launches] == ["attention", "attention_merge"]
    assert len(step.kernel().launches(Shape(512, False), LIMITS, Split(splits))) == 1
    assert len(step.kernel().launches(Shape(64, False, 64), LIMITS, Split(splits))) == 1  # deterministic


def test_narrow_pieces_and_shared_heads() -> None:
    """On a target with small tiles, and with more query heads than a program takes."""
    check(Step(LAYERS["chunk, wide"], MIXED, "bf16"), False, tuner=Tuner(TARGETS["a10g"]))
    many = Layer(67, 1, 16, 16)
    check(Step(many, [(5, 9), (40, 1)], "bf16"), False)
    check(Step(many, [(33, 1), (0, 1)], "bf16"), True)
    assert decode_tiling(Step(many, [(1, 1)], "bf16").kernel().workload, TUNER).heads == 34


@pytest.mark.parametrize("decode", [False, True])
def test_what_lies_outside_the_window_is_not_read(decode: bool) -> None:
    step = Step(LAYERS["sinks, window"], [(170, 1), (120, 1 if decode else 4)], "bf16")
    expected = step.expected()
    for row, oldest in enumerate((170 - 49, 120 - 49)):
        for at in range(oldest):
            step.pool.write(step.slot(row, at), torch.full((2, 16), torch.nan), torch.full((2, 32), torch.nan))
    assert ((step.run(decode) - expected).abs().max() / expected.abs().max()) < TOLERANCE["bf16"]


@pytest.mark.parametrize("decode", [False, True])
def test_nan_stays_in_its_sequence(decode: bool) -> None:
    step = Step(LAYERS["odd"], [(40, 1), (50, 1)], "bf16")
    step.pool.write(step.slot(0, 3), torch.full((2, 24), torch.nan), torch.zeros(2, 16))
    got = step.run(decode)
    assert got[0].isnan().all() and got[1].isfinite().all()


def test_refusals_name_the_fact() -> None:
    step = Step(LAYERS["odd"], [(1, 1)], "bf16").kernel().step
    with pytest.raises(CodegenError, match="scale -1"):
        kernel_of(msgspec.structs.replace(step, scale=-1.0))
    with pytest.raises(CodegenError, match="no kernels for KV format 'i3'"):
        kernel_of(msgspec.structs.replace(step, rotary=Rotary(), cos=None, sin=None, kv=KVLayer(1, 3, 4), cache="i3"))


def test_phases_share_objects_and_decode_does_not_spill() -> None:
    """Compiled for a GPU: 13 phases need few sources, and the decode kernels use no local memory."""
    kernel = Step(Layer(8, 2, 64, 64, 64), [(1, 1)], "bf16", 32).kernel()
    target = TARGETS["a100"]
    decode = [s for n in (1, 2, 4, 8, 16, 64, 256) for s in kernel.launches(Shape(n, True), LIMITS, Tuner(target))]
    mixed = [s for n in (16, 64, 256, 8192) for s in kernel.launches(Shape(n, False), LIMITS, Tuner(target))]
    assert len({s.source for s in mixed if s.entry == "attention"}) <= 3
    objects = compile_specs(decode, target)
    assert len(objects) <= 7 and all(o.spill_bytes == 0 for o in objects.values())
    assert max(o.shared_bytes for o in objects.values()) <= target.shared_memory_kib * 1024


@pytest.mark.parametrize("cache", soak("i4", "i2"))
def test_packed_caches_do_not_spill(cache: str) -> None:
    """Kernels that unpack, mix and centre codes, with heads of 64."""
    kernel, target = Step(Layer(32, 8, 64, 64, 64), [(1, 1)], cache, 32).kernel(), TARGETS["h100"]
    shapes = (Shape(1, True), Shape(16, False), Shape(8192, False))
    specs = [spec for shape in shapes for spec in kernel.launches(shape, LIMITS, Tuner(target))]
    assert all(found.spill_bytes == 0 for found in compile_specs(specs, target).values())
