"""The player over a device that only records its calls: their order, and the padding."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import icc
import numpy as np
import pytest
from icc.runtime.batch.packed import host_arrays
from icc.runtime.batch.padding import StepSize, padded_size
from icc.runtime.batch.scheduled import Draft, ScheduledBatch, ScheduledSequence
from icc.runtime.errors import UsageError
from icc.runtime.executor.base import greedy
from icc.runtime.executor.device import Device, DeviceWork
from icc.runtime.executor.player import Player
from icc.runtime.executor.sampling import SamplingRow, sampling
from icc.runtime.format.batch import CPU_INPUTS, GPU_INPUTS, SAMPLED, BatchLimits
from icc.runtime.format.kv import KVGroup, KVLayer, KVLayout, KVMemory
from icc.runtime.format.plan import LaunchPlan, Phase
from icc.runtime.format.program import Program, Section, SectionArray
from icc.runtime.kv.upkeep import Upkeep

PHASES = tuple(Phase(tokens, decode, {}, (), ()) for tokens, decode in ((1, True), (2, True), (4, True), (16, False)))
PLAN = LaunchPlan(objects={}, calls=(), phases=PHASES, scratch_bytes=0)


SECTION = Section(
    "guesses", 0, 0,
    inputs={"draft_rows": SectionArray("i32", [], "logit_rows"), "hidden": SectionArray("f32", [2], "b1")},
    outputs={"drafts": SectionArray("i32", [2, 3], "b7"), "scores": SectionArray("f32", [], "b8")},
)  # fmt: skip


def asked(rows: list[int]) -> dict[str, np.ndarray]:
    return {"draft_rows": np.array(rows), "hidden": np.array([[row, 0.5] for row in rows])}


class Recorder:
    """A device of 8 blocks of 4 tokens. `calls`: the recorded calls, in order; all logits of row r are r."""

    limits = BatchLimits(16, 4, 6, 8)

    def __init__(self, plan: LaunchPlan | None) -> None:
        layout = KVLayout((KVGroup(4, "f32", {0: KVLayer(1, 8, 8)}),))
        self.program = Program({}, [], [], {}, layout, 0, 5, sections=[SECTION])
        self.cache, self.host = KVMemory(layout, (8,)), KVMemory(layout, (3 if plan else 0,))
        self.plan, self.turns = plan, 2 if plan else 1
        self.logits = np.repeat(np.arange(8, dtype=np.float32)[:, None], 5, axis=1)
        listed = (*GPU_INPUTS, *SAMPLED) if plan else CPU_INPUTS
        self.sides = [host_arrays(listed, self.limits) for _ in range(self.turns)]
        self.calls: list[tuple[Any, ...]] = []

    def arrays(self, turn: int) -> Mapping[str, np.ndarray]:
        return self.sides[turn]

    def read(self, at: str, tokens: int, nbytes: int) -> np.ndarray:
        self.calls.append(("read", at, tokens, nbytes))
        return np.zeros(nbytes, np.uint8)

    def write(self, at: str, tokens: int, rows: np.ndarray) -> None:
        self.calls.append(("write", at, tokens, rows.tolist()))

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self.calls.append((name, *args))

    def works(self) -> list[DeviceWork]:
        return [call[1] for call in self.calls if call[0] == "run"]


def player(plan: LaunchPlan | None = None) -> tuple[Player[Any], Recorder]:
    recorder = Recorder(plan)
    device: Device = recorder  # type: ignore[assignment]
    found = Player(device)
    expected = [call[1] for call in recorder.calls]
    assert [work.phase for work in expected] == [phase for phase in PHASES if plan and phase.decode]
    assert all(work.sizes["num_seqs"] == work.sizes["num_logit_rows"] == work.phase.max_tokens for work in expected)
    recorder.calls.clear()
    return found, recorder


def decodes(count: int) -> tuple[ScheduledSequence, ...]:
    return tuple(ScheduledSequence(i, (7 + i,), 4, ((i, i + 4),), 1) for i in range(count))


def test_without_a_plan_a_step_runs_as_it_is() -> None:
    plain, device = player()
    assert sampling(plain) is None and greedy(plain) is plain and plain.groups[0].host_blocks == 0
    assert plain.step(ScheduledBatch(decodes(3))).tolist() == [[row] * 5 for row in range(3)]
    assert [call[0] for call in device.calls] == ["send", "run", "fetch", "wait"]
    [work] = device.works()
    assert (work.phase, work.section, work.trees, work.wanted) == (None, "", False, 0)
    assert [work.sizes[f"num_{of}"] for of in ("tokens", "seqs", "logit_rows", "moves")] == [3, 3, 3, 0]
    assert device.sides[0]["token_ids"][:4].tolist() == [7, 8, 9, 0]

    tree = ScheduledSequence(0, (7, 8, 9), 2, ((3, 4),), 3, Draft((8, 9), (-1, -1)))
    plain.step_greedy(ScheduledBatch((tree,), upkeep=(Upkeep(moves=((1, 2),)),)))
    work = device.works()[-1]
    assert work.trees and work.wanted == 1 and work.sizes["num_moves"] == 1
    found = plain.run("guesses", asked([2, 0]))
    assert found["drafts"].shape == (2, 2, 3) and found["drafts"].dtype == np.int32
    assert found["scores"].shape == (2,) and found["scores"].dtype == np.float32
    written, given, ran, *read = device.calls[-5:]
    assert (written, given) == (("write", "logit_rows", 3, [2, 0]), ("write", "b1", 3, [[2.0, 0.5], [0.0, 0.5]]))
    assert read == [("read", "b7", 3, 48), ("read", "b8", 3, 8)]
    work = ran[1]
    assert (work.section, work.sizes["num_tokens"], work.sizes["num_logit_rows"]) == ("guesses", 3, 2)


def test_with_a_plan_decodes_are_padded_to_their_phase_and_sampled() -> None:
    played, device = player(PLAN)
    assert sampling(played) is played
    row = SamplingRow(0.5, 3, 1.0, 0.0, 1 << 32, 4)
    tickets = [played.submit(ScheduledBatch(decodes(count)), [row] * count) for count in (3, 2)]
    assert [ticket.turn for ticket in tickets] == [0, 1], "the second is packed while the first is under way"
    first, second = device.works()
    assert (first.phase, second.phase) == (PHASES[2], PHASES[1])
    assert (first.sizes["num_tokens"], first.sizes["num_logit_rows"]) == (4, 4)
    side = device.sides[0]
    assert side["slot_mapping"][0, 3] == -1 and side["context_lens"][3] == 0
    assert side["seq_starts"][:5].tolist() == [*range(5)]
    assert side["temperature"][:4].tolist() == [0.5, 0.5, 0.5, 0.0] and side["top_p"][3] == 1.0
    assert ("send", 0, 4, 4) in device.calls and ("fetch", 0, 3, False) in device.calls
    assert played.collect(tickets[0]).token_ids.shape == (3,) and device.calls[-1] == ("wait", 0)
    played.run("guesses", asked([1]))
    assert device.calls[-5] == ("write", "logit_rows", 2, [1]) and device.works()[-1].phase is PHASES[0]
    played.submit(ScheduledBatch(decodes(4)), [row] * 4)
    played.run("guesses", asked([1, 3, 0]))
    assert device.calls[-5] == ("write", "logit_rows", 4, [1, 3, 0, 1]), "padded to a size that comes often"
    mixed = played.submit(ScheduledBatch((*decodes(1), ScheduledSequence(8, (1, 2, 3), 0, ((2,),), 1))), [None, row])
    assert mixed.host_samples and device.works()[-1].phase is PHASES[3]
    assert device.works()[-1].sizes["num_tokens"] == 4 and ("fetch", mixed.turn, 2, True) in device.calls


def test_mixed_steps_are_padded_to_few_sizes() -> None:
    limits, phase = BatchLimits(512, 64, 6, 96), Phase(512, False, {}, (), ())
    found = set()
    for tokens in range(2, 513):
        for seqs in {1, 2, 3, 7, 24, 63, 64, tokens - 1} & set(range(1, min(tokens, 65))):
            for rows in {0, 1, seqs, min(tokens, 96)}:
                have = StepSize(tokens, seqs, rows)
                size = padded_size(phase, have, limits)
                assert all(padded >= real for padded, real in zip(size, have, strict=True)), (have, size)
                assert size.tokens <= tokens * 1.25 + 3 and size.seqs <= 64 and size.rows <= min(size.tokens, 96)
                assert bool(size.rows) == bool(rows), "no head where no row is wanted"
                if size.tokens > tokens and seqs < 64:
                    assert size.seqs > seqs, "somebody has the added tokens"
                found.add((size.tokens, size.seqs)) if tokens > 256 and rows == seqs == 63 else None
    assert len(found) == 4, "one graph per token count where the batch is full"
    assert padded_size(Phase(2048, False, {}, (), ()), StepSize(513, 9, 3), limits) == (513, 9, 3), "large ones are not"


def test_what_is_added_to_a_mixed_step_reads_and_writes_nothing() -> None:
    played, device = player(PLAN)
    chunk = ScheduledSequence(8, (1, 2, 3, 4), 4, ((2, 3),), 0)
    for turn, sequences in enumerate(((*decodes(1), chunk), (*decodes(2), chunk))):
        ticket = played.submit(ScheduledBatch(sequences), [SamplingRow(1.0, 0, 1.0, 0.0, 1, 1)] * (1 + turn))
        side, sizes = device.sides[turn], device.works()[-1].sizes
        tokens = 4 + len(sequences) - 1
        assert (ticket.rows, sizes["num_tokens"], sizes["num_logit_rows"]) == (1 + turn, 8, 4)
        assert sizes["num_seqs"] == 4
        starts = side["seq_starts"][len(sequences) : 5].tolist()
        assert starts == ([tokens, tokens, 8], [tokens, 8])[turn], "the last sequence has what is added"
        assert (side["slot_mapping"][0, tokens:8] == -1).all() and (side["positions"][tokens:8] == 0).all()
        assert (side["context_lens"][len(sequences) : 4] == 0).all() and (side["tree_masks"][tokens:8] == 0).all()
        assert (side["logit_rows"][1 + turn : 4] == tokens - 1).all()
        assert (side["temperature"][1 + turn : 4] == 0).all(), "greedy, which is least work"


def test_zeros_then_moves_then_copies_come_before_a_step() -> None:
    played, device = player(PLAN)
    upkeep = Upkeep(moves=((1, 2),), zeros=(5,), swap_outs=((6, 0), (7, 1)), swap_ins=((2, 3),), copies=((1, 6),))
    batch = ScheduledBatch(decodes(1), (upkeep,))
    played.step(batch)
    names = [call[0] for call in device.calls]
    assert names == ["zero", "send", "run", "swap_out", "copy", "swap_in", "run", "fetch", "wait"]
    nbytes = device.program.kv.groups[0].block_bytes()
    assert device.calls[0] == ("zero", 5 * nbytes, nbytes)
    assert device.calls[3] == ("swap_out", 6 * nbytes, 0, 2 * nbytes), "neighbours travel together"
    assert device.calls[4] == ("copy", nbytes, 6 * nbytes, nbytes)
    assert device.calls[5] == ("swap_in", 3 * nbytes, 2 * nbytes, nbytes)
    before, after = device.works()
    assert before.moves_only and before.sizes["num_moves"] == 16, "padded, so that few numbers come"
    assert not after.moves_only and after.sizes["num_moves"] == 0 and after.sizes["num_tokens"] == 1


def test_a_closed_player_refuses_and_closes_once() -> None:
    closed, device = player()
    closed.close()
    closed.close()
    assert device.calls == [("close",)]
    with pytest.raises(UsageError, match="closed"):
        closed.step(ScheduledBatch(decodes(1)))
    with pytest.raises(UsageError, match="closed"):
        closed.run("guesses", asked([0]))


@pytest.mark.parametrize(
    ("section", "inputs", "words"),
    [
        ("exit", {}, "no section 'exit'"),
        ("guesses", {"draft_rows": np.zeros(1)}, "is given draft_rows, hidden, not draft_rows"),
        ("guesses", asked([0, 1, 2, 3]), "asked for 4 rows, not for 1 to 3"),
        ("guesses", asked([0]) | {"hidden": np.zeros((2, 2))}, "asked for 1 rows and for 2"),
        ("guesses", asked([0]) | {"hidden": np.zeros((1, 3))}, r"input hidden of section 'guesses' has rows of \[2\]"),
    ],
)
def test_what_a_section_is_not_given_is_refused(section: str, inputs: dict[str, np.ndarray], words: str) -> None:
    played, _ = player()
    played.step(ScheduledBatch(decodes(3)))
    with pytest.raises(UsageError, match=words):
        played.run(section, inputs)


def test_a_device_that_cannot_be_prepared_is_closed() -> None:
    class Broken(Recorder):
        def expect(self, work: DeviceWork) -> None:
            raise OSError("no graph")

    broken: Any = Broken(PLAN)
    with pytest.raises(OSError, match="no graph"):
        Player(broken)
    assert broken.calls == [("close",)]


def test_no_section_has_a_meaning_of_its_own() -> None:
    """Only the users of a section know its name; code that formats, lowers, plays or runs programs does not, except for
    format 2."""
    root = Path(icc.__file__).parent
    places = ("runtime/format", "runtime/executor", "compiler/program", "compiler/graph", "compiler/backends")
    files = [file for place in places for file in (root / place).rglob("*.py") if file.name != "version2.py"]
    named = [file for file in files if re.search(r"\"(medusa|exit)\"|'(medusa|exit)'", file.read_text())]
    assert len(files) > 100 and not named
