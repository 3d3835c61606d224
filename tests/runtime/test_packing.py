"""The arrays of a step, number by number: trees of guesses, block tables with holes, tables for timing, padded
sizes."""

from __future__ import annotations

import numpy as np
import pytest
from icc.runtime.batch.packed import PackedBatch
from icc.runtime.batch.padding import StepSize, padded_size
from icc.runtime.batch.scheduled import Draft, ScheduledBatch, ScheduledSequence
from icc.runtime.batch.tables import plain_tables
from icc.runtime.format.batch import BatchLimits
from icc.runtime.format.plan import Phase
from icc.runtime.kv.config import GroupConfig
from icc.runtime.kv.sequence import NO_BLOCK

LIMITS = BatchLimits(64, 4, 20, 64)
CHUNK = ScheduledSequence(1, (10, 11, 12), 0, ((7,),), 1)


def array(packed: PackedBatch, name: str) -> np.ndarray:
    return np.frombuffer(packed.arrays[name], np.int32)


def test_a_tree_has_its_depths_its_parents_and_what_each_guess_sees() -> None:
    tree = ScheduledSequence(2, (20, 21, 22, 23), 5, ((3, 4, 5),), 4, Draft((21, 22, 23), (-1, 0, -1)))
    packed = PackedBatch(LIMITS, [4])
    packed.pack(ScheduledBatch((CHUNK, tree, ScheduledSequence(3, (30,), 2, ((9,),), 1))))
    assert array(packed, "positions")[:8].tolist() == [0, 1, 2, 5, 6, 7, 6, 2]
    assert array(packed, "parents")[:9].tolist() == [-1, -1, -1, -1, 3, 4, 3, -1, -1]
    masks = array(packed, "tree_masks").view(np.uint64)
    assert masks[:9].tolist() == [0, 0, 0, 0b1, 0b11, 0b111, 0b1001, 0, 0]
    assert array(packed, "slot_mapping")[3:7].tolist() == [4 * 4 + 1, 4 * 4 + 2, 4 * 4 + 3, 5 * 4]
    assert array(packed, "logit_rows")[:6].tolist() == [2, 3, 4, 5, 6, 7]
    packed.pack(ScheduledBatch((CHUNK,)))
    assert (array(packed, "parents") == -1).all() and not array(packed, "tree_masks").any(), "nothing of it is left"


def test_what_arrays_from_elsewhere_hold_is_cleared_by_the_first_step() -> None:
    given = {name: np.full(size, 5, np.int32) for name, size in (("parents", 64), ("tree_masks", 128))}
    packed = PackedBatch(LIMITS, [4], given)
    packed.pack(ScheduledBatch((CHUNK,)))
    assert (given["parents"] == -1).all() and not given["tree_masks"].any() and not packed.has_trees


def test_a_table_that_is_too_long_does_not_reach_into_the_next_sequences() -> None:
    packed = PackedBatch(LIMITS, [4])
    most = len(packed.arrays["block_tables"]) // LIMITS.seqs
    packed.pack(ScheduledBatch((ScheduledSequence(1, (10,), 0, (tuple(range(most)),), 1),)))
    with pytest.raises(ValueError):
        packed.pack(ScheduledBatch((ScheduledSequence(1, (10,), 0, (tuple(range(most + 1)),), 1),)))


def test_a_tree_of_more_guesses_than_half_a_mask_has_bits() -> None:
    parents = (*range(-1, 38), -1)  # a chain, and a second guess of the first token
    tree = ScheduledSequence(2, tuple(range(41)), 0, (tuple(range(11)),), 41, Draft(tuple(range(1, 41)), parents))
    packed = PackedBatch(LIMITS, [4])
    packed.pack(ScheduledBatch((tree,)))
    masks = array(packed, "tree_masks").view(np.uint64).tolist()
    assert masks[:41] == [*((1 << seen) - 1 for seen in range(1, 41)), 1 | 1 << 40] and not any(masks[41:])


def test_a_block_that_was_given_back_is_packed_as_the_first_one() -> None:
    """Its values are fetched but not used; the block number must be valid."""
    tables = (NO_BLOCK, NO_BLOCK, 5, 0)
    packed = PackedBatch(LIMITS, [4])
    array(packed, "block_tables")[:] = 99
    packed.pack(ScheduledBatch((ScheduledSequence(1, (10,), 9, (tables,), 1),)))
    assert array(packed, "block_tables")[:5].tolist() == [0, 0, 5, 0, 99]
    assert array(packed, "slot_mapping")[0] == 5 * 4 + 1


def test_tables_without_a_scheduler_begin_behind_the_others_and_come_round() -> None:
    groups = (GroupConfig(10, 4), GroupConfig(5, 2))
    assert plain_tables(groups, 9) == ((0, 1, 2), (0, 1, 2, 3, 4))
    assert plain_tables(groups, 8, 5, 4) == ((3, 4), (0, 1, 2, 3))
    assert plain_tables(groups, 1, 12) == ((3,), (1,))


def test_a_decode_step_is_as_large_as_its_phase_and_a_mixed_one_a_little_larger_than_it_is() -> None:
    decode, mixed = (Phase(8, decode, {}, (), ()) for decode in (True, False))
    assert padded_size(decode, StepSize(3, 3, 3), LIMITS) == (8, 8, 8)
    assert padded_size(decode, StepSize(8, 8, 8), LIMITS) == (8, 8, 8)
    assert padded_size(mixed, StepSize(5, 2, 2), LIMITS) == (8, 4, 4)
    assert padded_size(mixed, StepSize(8, 2, 5), LIMITS) == (8, 2, 8)
    assert padded_size(mixed, StepSize(5, 2, 0), LIMITS) == (8, 4, 0)


def test_a_mixed_step_is_padded_to_a_quarter_of_the_power_of_two_below_it() -> None:
    mixed = Phase(64, False, {}, (), ())
    sizes = [padded_size(mixed, StepSize(count, 2, 2), LIMITS).tokens for count in (33, 40, 41, 64)]
    assert sizes == [40, 40, 48, 64]
