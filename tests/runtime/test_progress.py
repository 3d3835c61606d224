"""Progress: estimates do not jump; without a terminal there are lines instead of bars."""

from __future__ import annotations

import io
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from icc.runtime.progress.bars import Bars
from icc.runtime.progress.display import shortened
from icc.runtime.progress.estimate import TimeEstimate, clock, rounded
from icc.runtime.progress.lines import LineDisplay
from icc.runtime.progress.stream import open_display


def shown_each_second(parts: list[tuple[float, float]]) -> list[tuple[int, float]]:
    """The (time, estimate) at every second of work. parts: the (cost, seconds) of each part."""
    estimate, now, done, total = TimeEstimate(0.0), 0.0, 0.0, sum(cost for cost, _ in parts)
    found, tick = [], 1
    for cost, seconds in parts:
        now, done = now + seconds, done + cost
        while tick < now:
            left = estimate.left(tick)
            if left is not None:
                found.append((tick, left))
            tick += 1
        estimate.update(done, total, now)
    return found


@given(st.lists(st.tuples(st.floats(0.1, 100), st.floats(0.01, 60)), min_size=2, max_size=60))
def test_an_estimate_never_jumps(parts: list[tuple[float, float]]) -> None:
    for (_, before), (_, after) in itertools.pairwise(shown_each_second(parts)):
        assert max(before - 1, 0) / 2 - 1 <= after <= 1.5 * max(before, 1)


def test_an_estimate_of_even_work_is_right_from_the_start() -> None:
    found = shown_each_second([(1.0, 0.5)] * 200)
    assert len(found) > 95
    assert all(abs(left - (100 - now)) <= 0.05 * (100 - now) + 1 for now, left in found)


def test_parts_count_by_what_they_cost() -> None:
    """A large part at the end, such as the LM head, is in the estimate from the beginning."""
    found = shown_each_second([(1.0, 1.0)] * 50 + [(50.0, 50.0)])
    assert all(abs(left - (100 - now)) <= 3 for now, left in found if now < 50)


def test_a_new_phase_is_learned_without_a_jump() -> None:
    estimate = TimeEstimate(0.0)
    for second in range(1, 31):
        estimate.update(second, 100, second)
        estimate.left(second)
    estimate.update(0, 1000, 30.0)
    shown = [estimate.left(31.0)]
    for second in range(32, 120):
        estimate.update(10 * (second - 30), 1000, second)
        shown.append(estimate.left(second))
    assert shown[0] == pytest.approx(69, abs=2)  # the phase is still unknown
    assert shown[-1] == pytest.approx(11, abs=3)


def test_a_longer_phase_behind_a_short_one_is_learned_however_often_it_is_asked() -> None:
    """As with awqgptq4: scales take 5 s, codes 60 s; the estimate is read ten times a second."""
    estimate, shown = TimeEstimate(0.0), dict[int, float]()
    for tick in range(1, 650):
        now = tick / 10
        estimate.update(now, 5, now) if now < 5 else estimate.update(now - 5, 60, now)
        shown[tick] = estimate.left(now) or 0.0
    assert shown[300] == pytest.approx(35, rel=0.3) and shown[500] == pytest.approx(15, rel=0.1)


def test_times_are_read_at_a_glance() -> None:
    assert [clock(s) for s in (0, 59.4, 59.6, 754, 3723)] == ["0:00", "0:59", "1:00", "12:34", "1:02:03"]
    assert [rounded(s) for s in (7.4, 33, 130, 800, 4000)] == [7, 35, 135, 780, 3900]


def test_a_long_name_keeps_both_its_ends() -> None:
    assert shortened("model.layers.1.mlp") == "model.layers.1.mlp"
    cut = shortened("model.language_model.layers.17.block_sparse_moe.experts.3.down_proj.weight", 40)
    assert len(cut) == 40 and cut.startswith("model.language_mode") and cut.endswith("down_proj.weight")


def test_lines_say_where_the_work_is() -> None:
    now = 0.0
    stream = io.StringIO()
    lines = LineDisplay(stream, clock=lambda: now)
    lines.tick()
    lines.enter("trace")
    now = 12.0
    lines.tick()
    lines.leave("trace")
    lines.enter("quantize")
    lines.update("", 0, 100)
    now = 32.0
    lines.update("model.layers.3.mlp", 25, 100)
    lines.tick()
    lines.say("quantize  done")
    lines.leave("quantize")
    lines.tick()
    assert stream.getvalue().splitlines() == [
        "trace     0:12 elapsed",
        "quantize  25 %, 0:20 elapsed, about 1:00 left: model.layers.3.mlp",
        "quantize  done",
    ]


def test_there_are_lines_every_so_often_without_a_terminal() -> None:
    stream = io.StringIO()
    assert isinstance(open_display(stream), LineDisplay)
    with LineDisplay(stream, every_s=0.01) as lines:
        lines.enter("trace")
        while stream.getvalue().count("trace") < 2:
            pass
    written = stream.getvalue()
    lines.tick()
    assert not lines.running and stream.getvalue().startswith(written)


def test_bars_tell_elapsed_from_left() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    display = open_display(stream)
    assert isinstance(display, Bars)
    with display as bars:
        bars.enter("kernels")
        bars.update("avx2", 1, 3)
        shown = bars.status()  # type: ignore[attr-defined]
        bars.say("a line [that] stays")
        bars.leave("kernels")
    assert shown.startswith("33 %, 0:00 elapsed")
    assert "a line [that] stays" in stream.getvalue()
