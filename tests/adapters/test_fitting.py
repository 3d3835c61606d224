"""The values of an adapter for a weight whose rows and columns are scaled, as calibrated quantization leaves it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
from icc.runtime.adapters.adapter import Adapter, Change, LowRank, RowChange, Start
from icc.runtime.adapters.base_weights import BaseWeights
from icc.runtime.adapters.fitting import applied, check_fits
from icc.runtime.errors import RequestError
from icc.runtime.format.adapters import AdapterPlan, AdapterSite
from icc.runtime.format.program import WeightEntry

N, K, R = 20, 12, 4
RANDOM = np.random.default_rng(0)
W, A, B, X = (RANDOM.normal(0, 1, shape).astype(np.float32) for shape in ((N, K), (R, K), (N, R), (5, K)))
M, OWN, BIAS = (RANDOM.normal(1, 0.3, N).astype(np.float32) for _ in range(3))
COLUMNS, ROWS = (RANDOM.uniform(0.5, 2, size).astype(np.float32) for size in (K, N))
SITE = AdapterSite("w", N, K, "a", "b", columns="columns", rows="rows", bias="bias", gain="gain", base="base",
                   base_row=3, base_bias="own")  # fmt: skip


def engine(above: int = 3) -> BaseWeights:
    """The base weights of an engine. The weight of this layer lies below `above` rows of others, as in a merged
    weight."""
    stored = {
        "base": np.concatenate([np.ones((above, K), np.float32), W * ROWS[:, None] * COLUMNS]),
        "columns": COLUMNS, "rows": ROWS, "own": OWN * ROWS,
    }  # fmt: skip
    entries = {name: WeightEntry("f32", list(value.shape), value.nbytes) for name, value in stored.items()}
    return BaseWeights(
        entries, lambda name: np.pad(np.ascontiguousarray(stored[name]).reshape(-1).view(np.uint8), (0, 64))
    )


def plan(site: AdapterSite = SITE, rank: int = 16) -> AdapterPlan:
    return AdapterPlan(1, rank, [], [site])


def adapter(change: Change) -> Adapter:
    return Adapter(Path("x"), b"", "", (), {"w": change})


def gives(change: Change, scale: float = 1.0) -> np.ndarray:
    """The output of the engine's layer with this change, divided by its row factors."""
    [(_, found)] = applied(plan(), adapter(change), engine(), scale)
    x = X / COLUMNS
    y = x @ (W * ROWS[:, None] * COLUMNS).T + OWN * ROWS
    total = y + x @ found.a.T @ found.b.T
    total += 0 if found.bias is None else found.bias
    total += 0 if found.gain is None else y * found.gain
    return total / ROWS


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_magnitudes(scale: float) -> None:
    """The layer's own bias is not scaled by the magnitudes."""
    changed = W + 0.7 * scale * B @ A
    expected = X @ (changed * (M / np.linalg.norm(changed, axis=1))[:, None]).T + OWN
    found = gives(Change(low_rank=LowRank(A, B, 0.7), magnitude=M), scale)
    assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("scale", [1.0, -2.0])
def test_biases(scale: float) -> None:
    expected = X @ (W + 0.7 * scale * B @ A).T + OWN + scale * BIAS
    found = gives(Change(low_rank=LowRank(A, B, 0.7), bias=BIAS), scale)
    assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max()


def test_rows() -> None:
    changed = W.copy()
    changed[[7, 2]] = A[:2]
    changed += B @ A
    found = gives(Change(low_rank=LowRank(A, B, 1.0), rows=RowChange((7, 2), A[:2])))
    expected = X @ changed.T + OWN
    assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max()


def test_a_whole_matrix_is_the_rows_that_differ() -> None:
    """A whole embedding or head is stored as the rows that differ, as many as the adapter's rank allows."""
    site = AdapterSite("w", N, K, "a", "b", columns="columns", base="base", base_row=0)
    stored = {"base": W * COLUMNS, "columns": COLUMNS}
    entries = {name: WeightEntry("f32", list(value.shape), value.nbytes) for name, value in stored.items()}
    base = BaseWeights(entries, lambda name: np.ascontiguousarray(stored[name]).reshape(-1).view(np.uint8))
    whole = W.copy()
    [(_, same)] = applied(plan(site), adapter(Change(whole=whole)), base, 1.0)
    assert same.a.shape == (0, K)
    whole[[4, 9]] += 0.01
    check_fits(plan(site), "x", adapter(Change(whole=whole)), base)
    nf4 = {"base": WeightEntry("nf4g64", [N, K], 64), "columns": entries["columns"]}
    packed = BaseWeights(nf4, lambda name: COLUMNS.view(np.uint8))
    with pytest.raises(RequestError, match="w: the engine cannot compute with a whole weight"):
        check_fits(plan(site), "x", adapter(Change(whole=whole)), packed)
    for change in (Change(rows=RowChange((1,), W[:1])), Change(low_rank=LowRank(A, B, 1.0), magnitude=M)):
        with pytest.raises(RequestError, match="w: its weight is stored as nf4g64, of which icc cannot read rows"):
            check_fits(plan(SITE), "x", adapter(change), packed)
    [(_, found)] = applied(plan(site), adapter(Change(whole=whole)), base, 1.0)
    assert np.abs(W + (found.b @ found.a) / COLUMNS - whole).max() < 1e-6
    with pytest.raises(RequestError, match="w: the engine cannot compute with a whole weight"):
        check_fits(plan(site, rank=1), "x", adapter(Change(whole=whole)), base)
    with pytest.raises(RequestError, match="w: the engine cannot compute with a whole weight"):
        check_fits(plan(site), "x", adapter(Change(whole=whole[:-1])), base)


def test_rows_of_a_tied_table_are_the_heads_too() -> None:
    table = AdapterSite("table", N, K, "a", "b", base="base", base_row=3, table=True, tied="head")
    head = AdapterSite("head", N, K, "c", "d", base="base", base_row=3, tied="table")
    rows = Adapter(Path("x"), b"", "", (), {"table": Change(rows=RowChange((1,), A[:1]))})
    both = AdapterPlan(1, 16, [], [table, head])
    assert [site.parameter for site, _ in applied(both, rows, engine(), 1.0)] == ["table", "head"]
    with pytest.raises(RequestError, match=r"adapter n \(x\): head: the engine has no room for adapters there"):
        check_fits(plan(table), "n", rows, engine())
    scaled = Change(low_rank=LowRank(A, B, 1.0), magnitude=M[:K], transposed=True)
    with pytest.raises(RequestError, match="magnitudes of an embedding") as refused:
        check_fits(plan(table), "n", Adapter(Path("x"), b"", "", (), {"table": scaled}), engine())
    assert refused.value.hint == "merge it when the model is compiled (--lora)"


@pytest.mark.parametrize(
    ("change", "hint"),
    [
        (Change(whole=W + 1), f" (--lora), or compile with room for rank {N}, which is one for each of its rows"),
        (Change(whole=np.ones((300, K), np.float32)), " (--lora)"),  # more rows than any engine's rank
        (Change(low_rank=LowRank(A, B, 1.0), start=Start("olora")), " (--lora)"),
        (Change(low_rank=LowRank(np.ones((17, K), np.float32), np.ones((N, 17), np.float32), 1.0)),
         " (--lora), or compile with the room that it needs"),
    ],
)  # fmt: skip
def test_the_hint_names_what_would_help(change: Change, hint: str) -> None:
    site = msgspec.structs.replace(SITE, n=len(change.whole) if change.whole is not None else N)
    with pytest.raises(RequestError) as refused:
        check_fits(plan(site), "own", adapter(change), engine())
    rest = " (--adapters)" if "compile" in hint else ""
    assert refused.value.hint == f"merge it when the model is compiled{hint}{rest}"
