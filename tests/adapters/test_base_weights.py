"""Rows of packed weights that are read at run time equal the rows that the back ends packed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from icc.compiler.backends.cpu.layouts.registry import LAYOUTS as CPU
from icc.compiler.backends.triton.layouts.registry import LAYOUTS as TRITON
from icc.compiler.program.layout import Layouts, Role
from icc.compiler.weights.formats.registry import find_format
from icc.runtime.adapters.base_weights import BaseWeights
from icc.runtime.format.adapters import AdapterSite
from icc.runtime.format.bfloat16 import bf16_bits
from icc.runtime.format.program import WeightEntry

ROLES: list[Role] = ["product", "screen", "table"]


@pytest.mark.parametrize("rows", [16, 37, 64])
@pytest.mark.parametrize("form", ["f32", "bf16", "f16", "q4g32", "q4g96", "q8g32", "i8g32", "e4m3", "e4m3w"])
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("layouts", [CPU, TRITON], ids=["cpu", "gpu"])
def test_any_rows_of_any_layout(layouts: Layouts, role: Role, form: str, rows: int) -> None:
    values = torch.randn(rows, 96, generator=torch.Generator().manual_seed(rows))
    storage = find_format(form).fitted(96)
    layout = layouts.find(storage, role)
    parts = storage.encode(values).parts
    arrays = {
        name: bf16_bits(part.float().numpy()) if part.dtype == torch.bfloat16 else part.numpy()
        for name, part in parts.items()
    }
    packed = layout.pack(arrays)
    base = BaseWeights({"w": WeightEntry(layout.name, [rows, 96], packed.nbytes)}, lambda name: packed)
    assert base.readable("w") and not base.readable("v")
    expected = storage.decode(parts).numpy()
    for first, count in ((0, rows), (3, 1), (5, 11), (rows - 1, 1)):
        found = base.rows("w", first, count)
        assert found.dtype == np.float32
        assert np.abs(found - expected[first : first + count]).max() <= 5e-4 * np.abs(expected).max()


def test_what_is_not_read() -> None:
    base = BaseWeights({"w": WeightEntry("nf4g64", [32, 64], 1024), "v": WeightEntry("f32", [32], 128)}, np.zeros)
    assert not base.readable("w") and not base.readable("v")


@pytest.mark.parametrize("axis", [0, 1])
def test_rows_of_which_ranks_have_parts(axis: int) -> None:
    """Each rank has its own ranges of rows or columns, and shares one with the other rank if columns are cut. Three
    rows of another weight come before them."""
    whole = np.arange(12 * 8, dtype=np.float32).reshape(12, 8)
    cuts = [[(0, 2), (4, 6)], [(4, 6), (6, 8)]] if axis else [[(0, 3), (6, 9)], [(3, 6), (9, 12)]]
    if axis:
        cuts = [[*cuts[0], (2, 4)], [*cuts[1], (0, 2)]]
    parts = [np.concatenate([whole.take(range(*piece), axis) for piece in own], axis) for own in cuts]
    parts = [np.concatenate([np.full((3, part.shape[1]), -1, np.float32), part]) for part in parts]
    views = [{"w": part.reshape(-1).view(np.uint8)} for part in parts]
    entries = {"w": WeightEntry("f32", list(parts[0].shape), parts[0].nbytes)}
    site = AdapterSite("p", 12, 8, "a", "b", base="w", base_row=3, base_axis=axis, base_cuts=cuts)
    nothing: dict[str, np.ndarray] = {}  # a rank of another stage, which has no such weight
    base = BaseWeights(entries, nothing.__getitem__, [views[0].__getitem__, nothing.__getitem__, views[1].__getitem__])
    for first, count in ((0, 12), (2, 5), (7, 1), (8, 4)):
        assert np.array_equal(base.of_site(site, first, count), whole[first : first + count])
    changed = whole.copy()
    changed[[1, 10]] += 1
    found = base.differing(site, changed, False, 1.0)
    assert found is not None and found.tolist() == [1, 10]
