"""The arrays of a step, compared with their copies: the C interface, and the sampling of rows."""

from __future__ import annotations

import re
from ctypes import c_int32, c_void_p
from pathlib import Path

import numpy as np
from icc.runtime.batch.packed import PackedBatch, host_arrays
from icc.runtime.executor.cpu.library import BATCH_FIELDS, IccBatch
from icc.runtime.executor.sampling import GREEDY, Sampled, SamplingRow, fill_rows
from icc.runtime.format.batch import CPU_INPUTS, INPUTS, OUTPUTS, PLAN_ARRAYS, SAMPLED, SAMPLING, BatchLimits
from icc.runtime.format.program import DRAFTS

HEADER = Path(__file__).parents[2] / "codegen_templates" / "cpp" / "abi.h"
DIMS = {"V": "vocab", "H": "heads", "R": "ranks"}  # their names in the header
LIMITS = BatchLimits(8, 3, 5, 4)


def test_the_c_interface_has_these_arrays() -> None:
    """Every field of the struct in order, with its type and with the shape that its comment states."""
    body = re.search(r"struct icc_batch \{\n(.*?)\n\};", HEADER.read_text(), re.DOTALL)
    assert body is not None
    found = re.findall(r"^    (const )?(int32_t|float)(\*?) (\w+); +// (\[[^]]*\])?", body[1], re.MULTILINE)
    assert tuple(name for *_, name, _ in found) == BATCH_FIELDS
    arrays = {array.name: array for array in (*CPU_INPUTS, *OUTPUTS)}
    assert {name for _, _, star, name, _ in found if star} == set(arrays)
    for read_only, kind, star, name, shape in found:
        if star:
            array = arrays[name]
            assert bool(read_only) == (array in INPUTS), name
            assert {"int32_t": "i32", "float": "f32"}[kind] == array.dtype, name
            dims = [DIMS.get(str(dim), str(dim)) for dim in array.shape if dim != "G"]  # the struct is one group's
            assert shape == f"[{', '.join(dims)}]", name
    assert IccBatch._fields_ == tuple((name, c_void_p if star else c_int32) for _, _, star, name, _ in found)


def test_rows_are_sampled_by_these_arrays() -> None:
    assert [array.name for array in SAMPLING] == list(SamplingRow._fields)
    arrays = host_arrays(SAMPLING, LIMITS)
    fill_rows(arrays, 1, [SamplingRow(0.5, 7, 0.25, 0.125, 3 << 32 | 9, 2), None])
    assert {name: array[1:3].tolist() for name, array in arrays.items()} == {
        "temperature": [0.5, 0.0], "top_k": [7, 0], "top_p": [0.25, 1.0], "min_p": [0.125, 0.0],
        "seed": [[9, 3], [0, 0]], "counter": [2, 0],
    }  # fmt: skip
    assert not any(array[0].any() or array[3:].any() for array in arrays.values())
    assert GREEDY.temperature == 0 and len(SAMPLED) == len(Sampled.__struct_fields__) - 1  # logits are no result


def test_a_batch_is_packed_into_these_arrays() -> None:
    mine = {"token_ids": np.zeros(8, np.int32)}
    packed = PackedBatch(LIMITS, [4], mine)
    assert packed.arrays["token_ids"] is mine["token_ids"]
    assert set(packed.arrays) == {array.name for array in INPUTS}
    for array in INPUTS:
        assert packed.arrays[array.name].nbytes == LIMITS.nbytes(array)
    assert INPUTS[-1].name == "block_tables"


def test_a_plan_names_these_arrays() -> None:
    assert DRAFTS in PLAN_ARRAYS and "parents" not in PLAN_ARRAYS
    assert {name for name in PLAN_ARRAYS if ":" in name} == {
        *(f"sampling:{array.name}" for array in SAMPLING), *(f"sampled:{array.name}" for array in SAMPLED),
    }  # fmt: skip
