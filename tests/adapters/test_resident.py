"""Adapter slots: admission and eviction, and that a slot holds the values of the adapter that runs with it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from icc.runtime.adapters import resident
from icc.runtime.adapters.adapter import Adapter, Change, LowRank
from icc.runtime.adapters.base_weights import BaseWeights
from icc.runtime.adapters.resident import Loaded, ResidentAdapters
from icc.runtime.errors import RequestError
from icc.runtime.format.adapters import AdapterPlan, AdapterSite, Pool

SLOTS = 3
PLAN = AdapterPlan(
    SLOTS, 16,
    [Pool("a", SLOTS, 1, 16, 8, "f32", 16), Pool("b", SLOTS, 1, 20, 16, "f32", 16)],
    [AdapterSite("w", 20, 8, "a", "b")],
)  # fmt: skip


class Memory:
    """Pools in host memory."""

    def __init__(self) -> None:
        self.pools = {"a": bytearray(SLOTS * 16 * 8 * 4), "b": bytearray(SLOTS * 32 * 16 * 4)}

    def write_pool(self, name: str, offset: int, values: np.ndarray, only: int = -1) -> None:
        assert offset + values.nbytes <= len(self.pools[name])
        self.pools[name][offset : offset + values.nbytes] = values.tobytes()

    def holds(self, slot: int) -> float:
        """The value that all elements of A in a slot have."""
        pool = np.frombuffer(self.pools["a"], np.float32).reshape(SLOTS, -1, 16)[slot, :, :4]
        assert (pool == pool[0, 0]).all()
        return float(pool[0, 0])

    def scale(self, slot: int) -> float:
        """The value that all elements of B in a slot have: B of ones, times the scale."""
        pool = np.frombuffer(self.pools["b"], np.float32).reshape(SLOTS, 2, 16, 16)[slot, 0, :4]
        assert (pool == pool[0, 0]).all()
        return float(pool[0, 0])


def adapter(number: int) -> Adapter:
    low = LowRank(np.full((4, 8), number, np.float32), np.ones((20, 4), np.float32), 1.0)
    return Adapter(Path(str(number)), bytes([number]), "", (), {"w": Change(low_rank=low)})


@pytest.fixture(autouse=True)
def read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resident, "read_adapter", lambda path, *_: adapter(int(path.name)))


def made(host_bytes: int = 1 << 20) -> tuple[ResidentAdapters, Memory]:
    memory = Memory()
    found = ResidentAdapters(PLAN, memory, BaseWeights({}, np.zeros), host_bytes)
    for number in range(1, 9):
        found.add(f"n{number}", Path(str(number)))
    return found, memory


def place(adapters: ResidentAdapters, name: str, scale: float = 1.0) -> Loaded | None:
    """Place an adapter at once, or after it was loaded; None if no slot is free."""
    found = adapters.place(name, scale)
    if found is None:
        adapters.wait(5.0)
        found = adapters.place(name, scale)
    return found


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 8), st.sampled_from([1.0, 0.5, -2.0]), st.booleans()), max_size=40),
    st.sampled_from([1, 1 << 20]),
)
def test_whoever_runs_has_its_own_slot(asked: list[tuple[int, float, bool]], host_bytes: int) -> None:
    """Loads and releases in any order, at any scale, with and without host memory: a slot in use keeps its adapter and
    its scale."""
    adapters, memory = made(host_bytes)
    running: list[tuple[tuple[int, float], Loaded]] = []
    try:
        for number, scale, ends in asked:
            if ends and running:
                adapters.release(running.pop(number % len(running))[1])
            used = {loaded.slot for _, loaded in running}
            found = place(adapters, f"n{number}", scale)
            if found is None:
                assert len(used) == SLOTS and (number, scale) not in {one for one, _ in running}
            else:
                running.append(((number, scale), found))
            for one, loaded in running:
                assert (memory.holds(loaded.slot), memory.scale(loaded.slot)) == one
            assert len({loaded.slot for _, loaded in running}) == len({one for one, _ in running})
    finally:
        adapters.close()


@pytest.mark.parametrize("tokens", [(5, 40), (-1,)])
def test_an_invocation_that_no_prompt_can_have(tokens: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resident, "read_adapter", lambda path, *_: replace(adapter(1), invocation=tokens))
    adapters = ResidentAdapters(PLAN, Memory(), BaseWeights({}, np.zeros), vocab_size=40)
    with pytest.raises(RequestError, match=f"alora_invocation_tokens has {tokens[-1]}, .* vocabulary of 40"):
        adapters.add("a", Path("a"))
    assert adapters.names == []


def test_the_least_recently_used_makes_room() -> None:
    adapters, _ = made()
    for name in ("n1", "n2", "n3", "n1"):
        loaded = place(adapters, name)
        assert loaded is not None
        adapters.release(loaded)
    assert place(adapters, "n4") is not None
    assert adapters.resident == ["n3", "n1", "n4"]
    adapters.close()


def test_a_name_for_another_adapter() -> None:
    adapters, memory = made()
    old = place(adapters, "n1")
    assert old is not None
    adapters.add("n1", Path("7"))
    new = place(adapters, "n1")
    assert new is not None and new.slot != old.slot
    assert (memory.holds(old.slot), memory.holds(new.slot)) == (1.0, 7.0)
    assert adapters.resident == ["n1", "n7"]
    adapters.remove("n1")
    with pytest.raises(RequestError, match="there is no adapter 'n1'"):
        adapters.place("n1")
    adapters.close()


def test_an_adapter_that_changes_on_disk_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its values were dropped from host memory, and are read again when it is used."""
    adapters, _ = made(host_bytes=1)
    monkeypatch.setattr(resident, "read_adapter", lambda path, *_: adapter(8))
    assert adapters.place("n1") is None
    adapters.wait(5.0)
    with pytest.raises(RequestError, match="1 has changed since it was loaded"):
        adapters.place("n1")
    loaded = place(adapters, "n8")  # nothing else is harmed
    assert loaded is not None
    adapters.close()


def test_two_hundred_loads_leave_what_the_last_one_did() -> None:
    """Loads that replace each other, or whose names are removed, also at scales that were used."""
    adapters, _ = made()
    held = len(adapters._packed)
    for number in range(200):
        adapters.add("n1", Path(str(1 + number % 8)))
        adapters.add("x", Path(str(20 + number)))
        loaded = place(adapters, "x", 0.5)
        assert loaded is not None
        adapters.release(loaded)
        adapters.remove("x")
        assert len(adapters._packed) <= held
    assert len(adapters.names) == 8 and len(adapters._slots) <= SLOTS
    adapters.close()


def test_where_an_invocation_begins() -> None:
    loaded = Loaded(Adapter(Path("x"), b"", "", (7, 8), {}), b"", 2, None)  # type: ignore[arg-type]
    assert loaded.adapter.begin([1, 7, 8, 3, 7, 8, 9]) == 4
    assert (
        loaded.adapter.begin([7, 8]) == 0 and loaded.adapter.begin([8, 7]) is None and loaded.adapter.begin([7]) is None
    )
    assert np.frombuffer(loaded.rows(1, 5), np.int32).tolist() == [-1, 2, 2, 2, 2]
    assert np.frombuffer(loaded.rows(None, 3), np.int32).tolist() == [-1] * 3
