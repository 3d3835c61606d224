"""The parts of a step kernel: schedules that end without races in any order, and sources as functions of a tile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from icc.compiler.backends.triton.spec import LaunchSpec
from icc.compiler.backends.triton.step_kernel.schedule import Span, TileStage, Wait, faults, schedule, touches_after
from icc.compiler.backends.triton.step_kernel.tiles import NoTileForm, tile_form
from races import Race


def spans(*places: int) -> frozenset[Span]:
    return frozenset(Span("arena", place, place + 10) for place in places)


CHAIN = [
    TileStage("a", 4, spans(0), spans(10)), TileStage("b", 2, spans(10), spans(20)),
    TileStage("c", 3, spans(20), spans(30) | {Span("scratch", 0, 8)}), TileStage("d", 5, spans(30, 10), spans(0)),
    TileStage("e", 1, spans(0), frozenset({Span("scratch", 4, 6)})),
]  # fmt: skip


def test_a_schedule_waits_for_what_it_must_and_no_more() -> None:
    made = schedule(CHAIN)
    assert not list(faults(made))
    assert [[wait.counter for wait in stage.waits] for stage in made] == [[], [0], [1], [2], [3]]
    assert [stage.before for stage in made] == [0, 4, 6, 9, 14]
    apart = schedule([*CHAIN[:1], TileStage("other", 2, spans(50), spans(60)), CHAIN[1]])
    assert [len(stage.waits) for stage in apart] == [0, 0, 1], "what touches nothing of another waits for nothing"


@pytest.mark.parametrize(
    ("stage", "change", "words"),
    [
        (2, {"waits": ()}, "c touches memory of b and does not wait for it"),
        (3, {"waits": (Wait(1, 2),)}, "d touches memory of c"),
        (4, {"waits": ()}, "e touches memory of c"),  # reused scratch memory
        (2, {"waits": (Wait(1, 1),)}, "c touches memory of b"),
        (1, {"waits": (Wait(0, 5),)}, "b waits for 5 tiles at counter 0, 4 come before it"),
        (1, {"waits": (Wait(3, 5), Wait(0, 4))}, "b waits for 5 tiles at counter 3, 0 come before it"),
        (2, {"waits": (Wait(2, 3),)}, "c waits for 3 tiles at counter 2, 0 come before it"),  # its own
        (3, {"signal": 0}, "b touches memory of a"),  # a counter that a later stage also uses
        (2, {"before": 5}, "c begins at tile 5, 6 tiles come before it"),
        (4, {"signal": 31}, "e counts at 31"),
    ],
)
def test_a_planted_fault_of_a_schedule_is_found(stage: int, change: dict[str, Any], words: str) -> None:
    made = list(schedule(CHAIN))
    made[stage] = replace(made[stage], **change)
    assert any(words in fault for fault in faults(made)), list(faults(made))


class Stuck(Exception):
    pass


def play(stages: Sequence[TileStage], programs: int, random: Random) -> None:
    """Run the tiles in a random order that waits allow. Raises Stuck if no program can continue, Race if memory is
    touched too early."""
    flat = [stage for stage in stages for _ in range(stage.tiles)]
    left = [list(range(program, len(flat), programs)) for program in range(programs)]
    counters, done = dict.fromkeys(range(32), 0), dict.fromkeys((stage.name for stage in stages), 0)
    while any(left):
        ready = [p for p in left if p and all(counters[w.counter] >= w.count for w in flat[p[0]].waits)]
        if not ready:
            raise Stuck
        tile = flat[random.choice(ready).pop(0)]
        for earlier in stages[: [s.name for s in stages].index(tile.name)]:
            if done[earlier.name] < earlier.tiles and touches_after(tile, earlier):
                raise Race
        counters[tile.signal] += 1
        done[tile.name] += 1


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_what_has_no_faults_ends_and_races_in_no_order(data: st.DataObject) -> None:
    """Schedules of random stages, unchanged and with one stage changed: if no fault is found, running them shows
    none."""
    place = st.sets(st.integers(0, 5), max_size=2)
    drawn = data.draw(st.lists(st.tuples(st.integers(1, 4), place, place), min_size=1, max_size=6))
    made = list(
        schedule([TileStage(f"s{n}", tiles, spans(*(10 * r for r in reads)), spans(*(10 * w for w in writes)))
                  for n, (tiles, reads, writes) in enumerate(drawn)])
    )  # fmt: skip
    assert not list(faults(made))
    if data.draw(st.booleans()):
        number = data.draw(st.integers(0, len(made) - 1))
        waits = data.draw(st.lists(st.builds(Wait, st.integers(0, len(made) - 1), st.integers(0, 5)), max_size=2))
        signal = data.draw(st.integers(0, len(made) - 1))
        made[number] = replace(made[number], waits=tuple(waits), signal=signal)
    if not list(faults(made)):
        for programs in (1, 2, 3, 40):
            play(made, programs, Random(data.draw(st.integers(0, 99))))


# -- sources ----------------------------------------------------------------------------------------------------------


def of(body: str) -> LaunchSpec:
    head = "import triton\nimport triton.language as tl\n\nBLOCK = tl.constexpr(4)\n\n\n@triton.jit\n"
    return LaunchSpec(f"{head}def f(x_ptr):\n{body}", "f", (), (None, None, None))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("    BLOCK = 3\n", "both name BLOCK"),
        ("    tile_x = 3\n", "has a tile_x"),
        ("    for a in range(3):\n        if a == 1:\n            return\n", "within a statement"),
    ],
)
def test_sources_without_a_tile_form_say_why(body: str, words: str) -> None:
    with pytest.raises(NoTileForm, match=words):
        tile_form(of(body), 0, (1, 1, 1))


def test_places_and_sizes_of_the_grid_become_arguments_and_numbers() -> None:
    head, store = "    if tl.program_id(2) > 1:\n        return\n", "tl.program_id(0) * BLOCK, tl.num_programs(1)"
    body = f"{head}    tl.store(x_ptr + {store})\n"
    form = tile_form(of(body), 3, (5, 6, 7))
    assert form.entry == "f_3" and form.places
    assert "def f_3(x_ptr, tile_x, tile_y, tile_z):" in form.text and "tile_x * BLOCK_3, 6)" in form.text
    assert "return" not in form.text and "program" not in form.text
