"""RELIABILITY R15: steady growth (creep) is found, and other growth is not reported as such; see
benchmarks/serve/creep.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from sizes import soak

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks" / "serve"))
from slopes import creeping, settled, slope

SERVE = Path(__file__).parents[3] / "benchmarks" / "serve"
HOURS = np.arange(240) / 120  # two hours, a measurement every 30 s


def noise(seed: int) -> np.ndarray:
    """The effect of an allocator on the memory of a process, MiB: small jumps up and down, and some large ones."""
    rng = np.random.default_rng(seed)
    return rng.normal(0, 0.3, 240) + np.where(rng.random(240) < 0.05, 8.0, 0.0)


def test_the_slope_is_theils_and_its_ends_are_sens() -> None:
    """The Theil-Sen slope with Sen's interval. With five values, the 95 % interval includes all pairs."""
    values = [1.26, 1.27, 1.12, 1.16, 1.03]
    pairs = sorted((values[j] - values[i]) / (j - i) for j in range(5) for i in range(j))
    line = slope([1, 2, 3, 4, 5], values)
    assert (line.low, line.median, line.high) == pytest.approx((pairs[0], (pairs[4] + pairs[5]) / 2, pairs[-1]))
    straight = slope([0, 1, 2, 3, 4, 5], [0, 2, 4, 6, 8, 10])
    assert (straight.low, straight.median, straight.high) == pytest.approx((2, 2, 2))
    outlier = slope([0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 300, 4, 5, 6])
    assert outlier.median == pytest.approx(1.0)
    assert slope([0, 1, 2, 3, 4], [0, float("nan"), 2, 3, 4]).median == pytest.approx(1.0)
    with pytest.raises(ValueError, match="at least 4 values"):
        slope([0, 1, 2], [0, 1, 2])


@pytest.mark.parametrize("seed", range(5))
def test_what_settles_does_not_creep(seed: int) -> None:
    """Caches fill in the first half; one file is opened late; a count of threads alternates."""
    filling = 200 + 40 * (1 - np.exp(-HOURS / 0.2)) + noise(seed)
    series = {
        "memory": filling.tolist(),
        "files": [30.0 + (hour > 1.3) for hour in HOURS],
        "threads": [20.0 + int(step) % 2 for step in range(240)],
        "blocks": [0.0] * 240,
    }
    assert creeping(HOURS.tolist(), series, {"memory": 1.0, "files": 0.0, "threads": 0.0, "blocks": 0.0}) == {}


@pytest.mark.parametrize("seed", range(5))
def test_what_creeps_is_found_in_the_noise(seed: int) -> None:
    """3 MiB an hour with jumps of 8 MiB; one more file and block every ten minutes."""
    steps = np.floor(HOURS * 6)
    series = {
        "memory": (200 + 3 * HOURS + noise(seed)).tolist(),
        "files": (30 + steps).tolist(),
        "blocks": steps.tolist(),
    }
    found = creeping(HOURS.tolist(), series, {"memory": 1.0, "files": 0.0, "blocks": 0.0})
    assert found.keys() == series.keys()
    assert settled(HOURS.tolist(), series["memory"]).median == pytest.approx(3, abs=0.5)


def test_blocks_that_the_engine_finds_creep_still() -> None:
    """Each of 16 values occurs twice in a row."""
    values = [float(round_ // 2) for round_ in range(16)]
    assert creeping(HOURS[:16].tolist(), {"blocks": values}, {"blocks": 0.0})
    assert creeping(HOURS[:16].tolist(), {"blocks": [0.0, *values[:-1]]}, {"blocks": 0.0})


def creep(engine: Path, *options: str, leak: str = "") -> dict:
    """The JSON report of creep.py after a few seconds of load, and its log under "said"."""
    command = [sys.executable, str(SERVE / "creep.py"), str(engine), "--minutes", "0", "--round", "0.2", *options]
    script = ["--server", str(Path(__file__).with_name("leaky_server.py"))] if leak else []
    done = subprocess.run([*command, *script], capture_output=True, text=True, env={**os.environ, "ICC_LEAK": leak})
    assert done.returncode == 0, done.stderr[-3000:]
    return {**json.loads(done.stdout), "said": done.stderr[-2000:]}


@pytest.mark.parametrize("leak", ["memory,files,threads,blocks", *soak("memory", "files", "threads", "blocks")])
def test_planted_leaks_are_found(chat_engine: Path, leak: str) -> None:
    """Each request leaks 256 KiB, each sixteenth a file, a thread and a KV block: 16 rounds of 42 requests show that,
    however long they take. Every second value of the blocks may equal the one before, as the engine finds lost blocks
    and resets. In so few seconds memory grows even without a leak, so it may be reported too."""
    found = creep(chat_engine, "--memory", "500", "--rounds", "16", leak=leak)
    names = {"memory": "memory_mib"}
    expected = {names.get(kind, kind) for kind in leak.split(",")}
    assert expected <= set(found["creeps"]) <= expected | {"memory_mib"}, found
    assert found["requests"] > 100 and not found["failed"], found["said"]


@pytest.mark.parametrize("rounds", soak(1))
def test_a_server_without_leaks_is_not_accused(chat_engine: Path, rounds: int) -> None:
    """In its first five minutes a server's memory grows: its prefix cache and its allocator's pools fill."""
    found = creep(chat_engine, "--minutes", "10", "--round", "5", "--memory", "100")
    assert found["creeps"] == [] and not found["failed"], found
