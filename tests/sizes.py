"""How much the tests try: what `make test` has minutes for, and what `make soak` (ICC_SOAK=1) has a night for.

`size_of(name)` is a number of the table; ICC_<NAME> in the environment is another. `soak(...)` are cases of a parameter
list that only `make soak` runs; what they go through, others go through too.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import pytest

SOAK = bool(os.environ.get("ICC_SOAK"))
_SIZES = {  # name: in `make test`, in `make soak`
    "calib_sequences": (8, 32),
    "damaged_checkpoints": (40, 50_000),  # of each kind
    "damaged_onnx": (1, 200),  # files of each kind of change
    "draws": (3000, 100_000),  # samples of a distribution
    "drawn_configurations": (0, 2),  # of each type, as engines
    "driver_fault_every": (57, 1),  # of the calls of the GPU's driver, each so-manieth fails
    "fuzz_examples": (300, 20_000),  # of each parser; `make fuzz` goes on for as long as it is given
    "pressed_runs": (2, 60),  # of each engine, under pressure
    "quality_characters": (1500, 6000),  # of each held-out module
    "r7_pairs": (500, 20_000),
    "raw_requests": (300, 50_000),
    "real_limits": (0, 1),  # wait for the server's own time limits
    "schemathesis_cases_every": (32, 1),  # of the cases that follow from the document, each so-manieth is tried
    "schemathesis_examples": (3, 200),  # drawn per operation
    "sigterms": (2, 1000),
    "small_vocabulary": (5, 50),  # of those distributions
    "soak_requests": (100, 10_000),
    "state_machine": (30, 10_000),  # runs of the scheduler
    "state_machine_steps": (40, 200),
    "timing_guesses": (0, 1000),
    "write_fault_every": (3, 1),  # of the system calls that write an engine, each so-manieth fails
}


def size_of(name: str) -> int:
    return int(os.environ.get(f"ICC_{name.upper()}", _SIZES[name][SOAK]))


def soak(*cases: Any) -> list[Any]:
    """These parameters, for `make soak` only. A tuple is one case of several parameters."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.soak) for case in cases]


def usual(cases: Iterable[Any], *rare: Any) -> list[Any]:
    """These parameters, of which the rare ones are for `make soak` only."""
    found = list(cases)
    assert set(rare) <= set(found), "a case that is not there"
    return [*(case for case in found if case not in rare), *soak(*rare)]
