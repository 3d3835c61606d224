"""The modes of products: each is one class, and nothing else compares their names."""

from __future__ import annotations

import re
from itertools import product
from math import inf
from pathlib import Path

import pytest
from icc.compiler.backends.triton.layouts.codes import CodeGroups
from icc.compiler.backends.triton.layouts.registry import LAYOUTS
from icc.compiler.backends.triton.spec import Shape
from icc.compiler.backends.triton.tiling.choice import Config, Tuner
from icc.compiler.backends.triton.tiling.linear import LinearTilings
from icc.compiler.backends.triton.tiling.machine import Machine
from icc.compiler.backends.triton.tiling.modes import table
from icc.compiler.backends.triton.tiling.modes.eight import Int8Mode
from icc.compiler.backends.triton.tiling.product import ProductFacts
from icc.compiler.errors import UsageError
from icc.compiler.program.epilogue import MAX_EXTRAS, MAX_PARTS
from icc.compiler.targets import TARGETS
from icc.compiler.weights.formats.registry import find_format
from interpreting import LIMITS
from test_linear_objects import product as linear_product

ROOT = Path(__file__).resolve().parents[2]
FORMATS = (
    "bf16",
    "f32",
    "q4",
    "q8",
    "i8",
    "zq4",
    "nf4",
    "e4m3",
    "e4m3_k",
    "q4_k",
    "q6_k",
    "iq2_xs",
    "mxfp4",
    "mxfp4a8",
)
MODES = [table.DENSE_MODE, table.CODES_MODE, table.BLOCKS_MODE, table.WIDE_MODE, *table.ROWS8.values()]


def test_templates_of_every_mode_exist() -> None:
    folder = ROOT / "codegen_templates/triton/linear"
    names = {name for mode in MODES for name in (mode.decode_template, mode.tile_template, mode.rows_template)}
    assert [name for name in sorted(names) if not (folder / f"{name}.py.jinja").exists()] == []
    assert len({mode.name for mode in MODES}) == len(MODES)


def test_nothing_compares_the_names_of_modes() -> None:
    compared = re.compile(r"""\bmode(\.name)? (==|!=|in|not in) [("']""")
    places = [*(ROOT / "compiler/backends/triton").rglob("*.py"), *(ROOT / "codegen_templates/triton").rglob("*.jinja")]
    assert [str(path) for path in places if compared.search(path.read_text())] == []


@pytest.mark.parametrize("target", ["a100", "rtx4090", "h100", "b200", "mi300x"])
def test_every_product_that_is_made_has_a_tiling(target: str) -> None:
    """Every format and mode, with the largest fused epilogue, for any number of rows."""
    tilings, missing, seen = LinearTilings(TARGETS[target]), [], set()
    for name, x_type, experts in product(FORMATS, ("bf16", "f32"), (0, 8)):
        codes = LAYOUTS.find(find_format(name, 32), "product")
        codes = codes if isinstance(codes, CodeGroups) else None
        mode = table.mode_of(codes, x_type, "u8" if codes else name, TARGETS[target].level, bool(experts))
        seen.add(mode)
        for parts, extras, rows in product(range(1, MAX_PARTS + 1), (0, MAX_EXTRAS), (1, 16, 64, 256, 4096)):
            unpacking = codes.unpacking if codes else None
            facts = ProductFacts(mode, x_type, 4096, 4096, 4096 // parts, parts, extras, rows, unpacking, experts, 2)
            if not any(tilings.seconds(facts, config) < inf for config in tilings.candidates(facts)):
                missing.append(facts)
    assert missing == [] and len(seen) >= 4


def test_what_has_no_tiling_is_said() -> None:
    with pytest.raises(UsageError, match="no tiling of a product fits target 'h100'"):
        Tuner(TARGETS["h100"]).pick("a product", [], lambda config: 0.0)


class SlowMode(Int8Mode):
    """A mode like int8, with its own tilings and name."""

    name = "slow"

    def candidates(self, machine: Machine, p: ProductFacts) -> list[Config]:
        return [{"decode": 0, "m": 16, "n": 32, "k": 64, "warps": 4, "stages": 2, "splits": 1}]


def test_a_mode_is_one_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes name the mode for their rows; the class with that name gives tilings, templates and scratch memory."""
    monkeypatch.setitem(table.ROWS8, "slow", SlowMode())
    kernel = linear_product("o", "i8")
    monkeypatch.setattr(type(kernel.codes), "rows8", lambda self, level: "slow")
    assert isinstance(kernel.codes, CodeGroups) and kernel.mode(90).name == "slow"
    tuner = Tuner(TARGETS["h100"])
    rows, tile = kernel.launches(Shape(64, False), LIMITS, tuner)
    assert (rows.entry, tile.entry) == ("linear_rows", "linear_w8a8")
    assert "BM = tl.constexpr(16)" in tile.source
    assert kernel.scratch(Shape(64, False), LIMITS, tuner) == {"codes": 64 * 4096, "scales": 4 * 64}
