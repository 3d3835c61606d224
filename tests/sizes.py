"""How much the tests try: few cases in `make test`, which takes minutes, many in `make soak` (ICC_SOAK=1), which takes
a night.

`size_of(name)` is a number of the table, unless ICC_<NAME> in the environment replaces it. `soak(...)` marks cases of a
parameter list that only `make soak` runs; other cases run the same code.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import pytest

SOAK = bool(os.environ.get("ICC_SOAK"))
_SIZES = {  # name: in `make test`, in `make soak`
    "calib_sequences": (8, 32),
    "damaged_checkpoints": (40, 50_000),  # per kind
    "damaged_onnx": (1, 200),  # files per kind of change
    "draws": (3000, 100_000),  # samples of a distribution
    "drawn_configurations": (0, 2),  # per model type, as engines
    "driver_fault_every": (57, 1),  # every so many calls of the GPU driver, one fails
    "fuzz_examples": (300, 20_000),  # per parser; `make fuzz` runs for a given time
    "pressed_runs": (2, 60),  # runs per engine under pressure
    "quality_characters": (1500, 6000),  # per held-out module
    "r7_pairs": (500, 20_000),
    "raw_requests": (300, 50_000),
    "real_limits": (0, 1),  # wait for the server's own time limits
    "schemathesis_cases_every": (32, 1),  # one in so many cases derived from the OpenAPI document
    "schemathesis_examples": (3, 200),  # drawn per operation
    "sigterms": (2, 1000),
    "small_vocabulary": (5, 50),  # of these distributions
    "soak_requests": (100, 10_000),
    "state_machine": (30, 10_000),  # runs of the scheduler
    "state_machine_steps": (40, 200),
    "timing_guesses": (0, 1000),
    "write_fault_every": (3, 1),  # every so many system calls that write an engine, one fails
}


def size_of(name: str) -> int:
    return int(os.environ.get(f"ICC_{name.upper()}", _SIZES[name][SOAK]))


def soak(*cases: Any) -> list[Any]:
    """These parameters, marked for `make soak` only. A tuple is one case of several parameters."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.soak) for case in cases]


def usual(cases: Iterable[Any], *rare: Any) -> list[Any]:
    """These parameters; those in `rare` are marked for `make soak` only."""
    found = list(cases)
    assert set(rare) <= set(found), "a case that is not there"
    return [*(case for case in found if case not in rare), *soak(*rare)]
