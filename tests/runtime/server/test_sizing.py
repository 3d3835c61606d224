"""`icc plan --traffic`: simulates fleets of replicas, with the scheduler of the server."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner
from icc.compiler.cli import main
from icc.runtime.batch.scheduled import ScheduledBatch, ScheduledSequence
from icc.runtime.errors import UsageError
from icc.runtime.llm import LLM
from icc.runtime.loop.fake import FakeExecutor
from icc.runtime.server.sizing.calibrate import calibrate
from icc.runtime.server.sizing.simulate import Fleet, simulate
from icc.runtime.server.sizing.sizing import ServiceLevel, best, percentiles, read_slo, size
from icc.runtime.server.sizing.step_table import StepTable, TableGroup
from icc.runtime.server.sizing.traffic import Arrival, read_traffic, write_traffic

TABLE = StepTable(
    decode=[(1, 0.01), (8, 0.024)], prompt=[(16, 0.02), (256, 0.26)], decode_context=0.0, prompt_context=0.0,
    row=0.001, taken=1e-5, max_batch_size=8, max_step_tokens=256, max_logit_rows=64,
    groups=[TableGroup(1024, 32)],
)  # fmt: skip


def step(*sequences: tuple[int, int, int]) -> ScheduledBatch:
    """A step of sequences, each as (tokens in the step, position of the first one, tokens of the prompt)."""
    return ScheduledBatch(
        tuple(ScheduledSequence(n, (0,) * one[0], one[1], ((),), 1, prompt=one[2]) for n, one in enumerate(sequences))
    )


def test_steps_between_and_beyond_those_that_were_measured() -> None:
    table = msgspec.structs.replace(TABLE, decode_context=1e-6, prompt_context=1e-8)
    assert table.seconds(step((1, 1000, 10))) == pytest.approx(0.01 + 1e-3)
    assert table.seconds(step(*[(1, 0, 0)] * 4)) == pytest.approx(0.016)
    assert table.seconds(step((136, 0, 500))) == pytest.approx(0.14)
    assert table.seconds(step((256, 1000, 1500))) == pytest.approx(0.26 + 256e-5)
    assert table.seconds(step((99, 0, 99), (1, 500, 10))) == pytest.approx(0.02 + 0.001 * 84 + 0.001 + 5e-4)
    assert table.seconds(step((512, 0, 512))) == pytest.approx(0.516)


def test_a_request_alone_takes_its_steps() -> None:
    [served] = simulate(TABLE, [Arrival(2.0, 512, 4)], Fleet(1))
    assert served.times == pytest.approx([2.52, 2.53, 2.54, 2.55])
    assert served.first == pytest.approx(0.52) and served.gaps == pytest.approx([0.01] * 3)


def test_what_is_cached_is_not_computed() -> None:
    traffic = [Arrival(at, 512, 1, "system", 480) for at in (0.0, 5.0, 10.0)]
    firsts = [served.first for served in simulate(TABLE, traffic, Fleet(2))]
    assert firsts[0] == pytest.approx(0.52) and firsts[1] == firsts[2] == pytest.approx(0.036)  # and sent there
    apart = [msgspec.structs.replace(one, prefix=str(number)) for number, one in enumerate(traffic)]
    assert [served.first for served in simulate(TABLE, apart, Fleet(2))] == pytest.approx([0.52] * 3)


def mixed(chats: int = 40) -> list[Arrival]:
    """`chats` chats, ten per second, and long prompts after 1, 2 and 3 s."""
    found = [Arrival(0.1 * number, 16, 60) for number in range(chats)]
    return sorted([*found, *(Arrival(float(at), 1500, 4) for at in range(1, 4))], key=lambda one: one.time)


# a 135M model on one core of a busy machine, see benchmarks/results/roles.md
CORE = StepTable(
    decode=[(1, 0.008), (16, 0.07)], prompt=[(16, 0.0544), (256, 0.87)], decode_context=0.0, prompt_context=0.0,
    row=0.0041, taken=6e-5, max_batch_size=16, max_step_tokens=256, max_logit_rows=64, groups=[TableGroup(1024, 32)],
)  # fmt: skip


def p99s(fleet: Fleet, long: int, every: float, chats_per_s: float = 0.7) -> tuple[float, float]:
    """The 99th percentiles of chats in seconds: time between tokens, and time to the first token. long: how many
    prompts of 4,000 tokens arrive at once, after each `every` seconds."""
    source, traffic, at = random.Random(0), list[Arrival](), 0.0
    while at < 180:
        traffic.append(Arrival(at, 48, 96))
        at += source.expovariate(chats_per_s)
    traffic += [Arrival(every * (number + 0.5), 4000, 16) for number in range(int(180 / every)) for _ in range(long)]
    served = simulate(CORE, sorted(traffic, key=lambda one: one.time), fleet)
    chats = [one for one in served if one.arrival.prompt_tokens == 48]
    gaps, firsts = [gap for one in chats for gap in one.gaps], [one.first for one in chats]
    return percentiles(gaps)["p99"], percentiles(firsts)["p99"]


@pytest.mark.parametrize("chats_per_s", [0.7, 1.0])
def test_roles_are_no_worse_than_none_where_one_long_prompt_runs_at_a_time(chats_per_s: float) -> None:
    """On two cores, one of which a role would take: a long prompt is answered where it is computed, so that chats have
    both. At one chat per second, 0.9 % of the chats' steps hold another chat's prompt; a little more would be 1 %, and
    decide p99."""
    plain, roles = p99s(Fleet(2), 1, 30, chats_per_s), p99s(Fleet(2, 1), 1, 30, chats_per_s)
    assert roles[0] <= 1.05 * plain[0] and roles[1] <= 1.1 * plain[1]


def test_roles_keep_long_prompts_that_overlap_from_chats() -> None:
    plain, roles = p99s(Fleet(2), 3, 90), p99s(Fleet(2, 1), 3, 90)
    assert roles[0] <= 1.05 * plain[0] and roles[1] < 0.1 * plain[1]


def test_who_gives_kv_does_nothing_else_meanwhile() -> None:
    """Two long prompts, one of which waits for the other: the time to give the KV is added."""
    traffic = [Arrival(0.0, 48, 1), *[Arrival(0.5 + 0.2 * n, 48, 30) for n in range(20)]]
    traffic += [Arrival(2.0, 4000, 4)] * 2
    traffic.sort(key=lambda one: one.time)

    def ends(given: float) -> float:
        table = msgspec.structs.replace(CORE, given=given)
        return max(one.times[-1] for one in simulate(table, traffic, Fleet(2, 1)) if one.arrival.prompt_tokens == 4000)

    assert ends(1e-4) - ends(0.0) == pytest.approx(0.4, abs=0.1)


def test_the_same_traffic_gives_the_same_times() -> None:
    one, other = (simulate(TABLE, mixed(), Fleet(3, 1)) for _ in range(2))
    assert [served.times for served in one] == [served.times for served in other]


def test_the_fewest_replicas_that_keep_the_level() -> None:
    strict, loose = ServiceLevel(ttft=4.0, itl=0.12), ServiceLevel(ttft=20.0, itl=1.0)
    found = size(TABLE, mixed(), strict, 4)
    chosen = best(found, strict)
    assert chosen.meets and chosen.fleet.prefills > 0
    assert all(one.fleet.replicas <= chosen.fleet.replicas for one in found)
    assert not any(one.meets for one in found if one.fleet.replicas < chosen.fleet.replicas)
    assert best(size(TABLE, mixed(), loose, 4), loose).fleet == Fleet(1)
    hopeless = ServiceLevel(ttft=1e-6, itl=1e-6)
    assert not best(size(TABLE, mixed(4), hopeless, 2), hopeless).meets
    fixed = msgspec.structs.replace(TABLE, taken=None)  # an engine whose KV cannot be moved
    assert all(one.fleet.prefills == 0 for one in size(fixed, mixed(4), hopeless, 3))


def test_a_table_is_measured_on_an_engine(toy_manifest: Any, tmp_path: Path) -> None:
    """Every field is measured, and written to the file; the steps of the fake device take real time."""
    executor = FakeExecutor(max_batch_size=4, max_step_tokens=32, num_blocks=256, max_logit_rows=32)
    with LLM(toy_manifest(), executor) as llm:
        table = calibrate(llm)
    assert [count for count, _ in table.decode] == [1, 2, 4] and min(s for _, s in table.decode) > 0
    assert [tokens for tokens, _ in table.prompt] == [16, 32]
    assert table.taken is not None and table.taken > 0 and table.given is not None and table.given > 0
    assert (table.max_batch_size, table.max_step_tokens, table.max_logit_rows) == (4, 32, 32)
    assert table.max_seq_len == toy_manifest().limits.max_seq_len
    assert table.groups == [TableGroup(256, 4)] and table.config.groups == executor.groups
    table.write(tmp_path / "table")
    assert StepTable.read(tmp_path / "table") == table
    assert simulate(table, [Arrival(0, 40, 3)], Fleet(1))[0].times


# -- the command -----------------------------------------------------------------------------------------------------


def run(*arguments: Any) -> Any:
    return CliRunner().invoke(main, ["plan", *map(str, arguments)])


def test_the_command_says_what_to_take(tmp_path: Path) -> None:
    TABLE.write(tmp_path / "costs")
    write_traffic(tmp_path / "traffic", mixed())
    asked = ("nothing.engine", "--traffic", tmp_path / "traffic", "--step-costs", tmp_path / "costs")
    found = run(*asked, "--slo", "ttft=4s,itl=120ms")
    assert found.exit_code == 0, found.output
    lines = found.output.splitlines()
    assert lines[-1].startswith("take --replicas") and "--prefill-replicas" in lines[-1]
    assert any("2: 1 prefill, 1 decode" in line for line in lines)
    as_json = json.loads(run(*asked, "--slo", "ttft=4,itl=0.12", "--json").stdout)
    assert as_json["take"]["meets"] and as_json["take"]["fleet"]["prefills"] > 0
    nearest = run(*asked, "--slo", "ttft=1us,itl=1ms")
    assert nearest.exit_code == 2 and "no service level like" in nearest.output
    nearest = run(*asked, "--slo", "ttft=1ms,itl=1ms", "--max-replicas", 2)
    assert "no fleet of up to 2 replicas keeps it" in nearest.output


def test_what_is_wrong_is_told_in_a_line(tmp_path: Path) -> None:
    TABLE.write(tmp_path / "costs")
    (tmp_path / "bad").write_text('{"time": 0, "prompt_tokens": 3, "output_tokens": 2}\n{"time": 1}\n')
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "unknown").write_text('{"time": 0, "prompt_tokens": 3, "output_tokens": 2, "prefix_token": 2}\n')
    (tmp_path / "milliseconds").write_text('{"time": 1764360000000, "prompt_tokens": 3, "output_tokens": 2}\n')
    short = msgspec.structs.replace(TABLE, max_seq_len=600)
    short.write(tmp_path / "short")
    (tmp_path / "vast").write_text('{"time": 0, "prompt_tokens": 99999999999, "output_tokens": 2}\n')
    (tmp_path / "long").write_text('{"time": 0, "prompt_tokens": 40000, "output_tokens": 2}\n')
    write_traffic(tmp_path / "good", mixed())
    costs, slo = ("--step-costs", tmp_path / "costs"), ("--slo", "ttft=1,itl=1")
    for arguments, said in (
        (("--traffic", tmp_path / "none", *slo, *costs), "none"),
        (("--traffic", tmp_path / "bad", *slo, *costs), "line 2"),
        (("--traffic", tmp_path / "empty", *slo, *costs), "holds no requests"),
        (("--traffic", tmp_path / "vast", *slo, *costs), "line 1: Expected `int` <= 16777216"),
        (("--traffic", tmp_path / "long", *slo, *costs), "cannot run"),
        (("--traffic", tmp_path / "good", *slo, "--step-costs", tmp_path / "short"), "the engine takes 600"),
        (("--traffic", tmp_path / "unknown", *slo, *costs), "line 1: Object contains unknown field `prefix_token`"),
        (("--traffic", tmp_path / "milliseconds", *slo, *costs), "line 1: Expected `float` <= 10000000000"),
        (("--traffic", tmp_path / "good", *costs), "needs a service level"),
        (("--traffic", tmp_path / "good", *slo), "is no engine"),
        (("--traffic", tmp_path / "good", *slo, "--step-costs", tmp_path / "bad"), "--step-costs"),
        (("--traffic", tmp_path / "good", *slo, "--write-step-costs", tmp_path / "no" / "x"), "is no directory"),
        (("--traffic", tmp_path / "good", *slo, *costs, "--write-step-costs", tmp_path), "--write-step-costs"),
    ):
        found = run("nothing.engine", *arguments)
        assert found.exit_code == 2 and said in found.output, (arguments, found.output)
        assert "Traceback" not in found.output


def test_traffic_comes_back_as_it_was_written(tmp_path: Path) -> None:
    write_traffic(tmp_path / "traffic", mixed())
    assert read_traffic(tmp_path / "traffic") == mixed()
    assert read_slo("itl=50ms,ttft=1.5s") == ServiceLevel(1.5, 0.05)
    for text in ("ttft=1", "ttft=1,itl=0", "ttft=1,ttft=2", "itl=1,ttft=-1", ""):
        with pytest.raises(ValueError, match="no service level"):
            read_slo(text)
    with pytest.raises(UsageError, match="cannot run"):
        simulate(TABLE, [Arrival(0.0, 40_000, 1)], Fleet(1))
