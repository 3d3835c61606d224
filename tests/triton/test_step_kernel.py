"""A layer's launches as one kernel: bit-equal, in whichever order its programs continue."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import numpy as np
import pytest
from building import TARGET, GpuEngine, build
from fake_cuda import FakeDriver
from icc import SamplingParams
from icc.compiler.backends.triton import fallback
from icc.compiler.backends.triton.fallback import Objects, TilingSearch
from icc.compiler.backends.triton.interpreter import launch
from icc.compiler.backends.triton.lockstep import Lockstep, StuckError
from icc.compiler.backends.triton.objects.compile import Compiled
from icc.compiler.backends.triton.plan import Planned, PlannedPhase, make_plan, plan_program
from icc.compiler.backends.triton.spec import LaunchSpec, Shape
from icc.compiler.backends.triton.step_kernel.schedule import faults
from icc.compiler.backends.triton.tiling import whole
from icc.compiler.backends.triton.tiling.choice import Tuner
from icc.compiler.errors import UsageError, VerifyError
from icc.compiler.measure import interpret
from icc.compiler.options import CompileOptions
from icc.compiler.program.program import decode_program
from icc.compiler.program.verify import verify_plan
from icc.runtime.executor.cuda.device import CudaDevice
from icc.runtime.executor.cuda.driver import Cuda
from icc.runtime.executor.player import Player
from icc.runtime.format.manifest import Limits
from icc.runtime.format.plan import COUNTERS, CallArg, OperandArg
from icc.runtime.llm import LLM
from races import Race
from rank_races import run_racing
from sizes import soak

pytestmark = pytest.mark.slow
LIMITS = Limits(max_seq_len=40, max_batch_size=2, max_step_tokens=8)
PROMPT = [5, 9, 23, 7, 11]


@pytest.fixture(scope="module")
def engine(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> GpuEngine:
    path: Path = tmp_path_factory.mktemp("model")
    tiny.save_tiny(tiny.tiny_configs()["llama-mqa_tied_biases_llama3"], path, "bfloat16")
    return build(path, "rtn4", LIMITS, step_kernel=True)


def phase_of(engine: GpuEngine) -> PlannedPhase:
    [phase] = plan_program(engine.program, LIMITS, Tuner(TARGET), [Shape(1, True)], step_kernel=True).phases
    return phase


def test_a_layer_is_a_run_and_the_rest_says_why_not(engine: GpuEngine) -> None:
    """Two layers: the last product of the first is followed by a norm of fewer warps, in a separate launch."""
    phase = phase_of(engine)
    found = {run.first: [stage.name for stage in run.stages] for run in phase.runs}
    attended = ["linear_q_0", "attention_0", "linear_q_1", "linear_q_2"]
    assert found == {2: attended, 7: [*attended, "linear_q_4"]}
    assert "4 warps" in phase.untiled["linear_q_3"] and "in a step alone" in phase.untiled["select_rows_0"]
    for run in phase.runs:
        assert not list(faults(run.stages)) and run.spec.dependent == run.spec.resident is True
        assert [spec.entry for spec in run.ahead] == ["kv_move"]
        tiles = {stage.name: stage.tiles for stage in run.stages}
        for name, count in tiles.items():
            [spec] = [spec for spec in phase.specs[name] if spec.entry != "kv_move"]
            assert np.prod([dim.value({"num_tokens": 1, "num_seqs": 1}) for dim in spec.grid]) == count
    plan = engine.program.plan
    assert plan is not None and [bool(phase.runs) for phase in plan.phases] == [True, False, False]
    [grid] = {run.launches[-1].grid for run in plan.phases[0].runs}
    assert grid[0].constant == TARGET.multiprocessors == plan.phases[0].runs[0].multiprocessors
    users = {row["object"]: row["kernels"] for row in plan.resources()}
    assert users[plan.phases[0].runs[0].launches[-1].object] == attended
    assert decode_program(msgspec.json.encode(engine.program), "program.json") == engine.program


def test_without_the_flag_nothing_changes(engine: GpuEngine) -> None:
    """The plan's bytes are equal except for the parts that the flag adds."""
    plan = engine.program.plan
    assert plan is not None
    without = make_plan(plan_program(engine.program, LIMITS, Tuner(TARGET)), TARGET, {})
    assert b'"runs"' not in msgspec.json.encode(without) and without.counters(2) == 2 * COUNTERS
    added = {name for name in plan.objects if name.startswith("step_")}
    assert plan.objects.keys() - without.objects.keys() == added and len(added) == 2
    stripped = [msgspec.structs.replace(phase, runs=()) for phase in plan.phases]
    assert msgspec.json.encode(stripped) == msgspec.json.encode(without.phases)


@contextmanager
def on_device(multiprocessors: int, launcher: Callable[..., None] = launch) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpret, "_MULTIPROCESSORS", multiprocessors)
        patch.setattr(interpret, "launch", launcher)
        yield


def answers(engine: GpuEngine, multiprocessors: int, launcher: Callable[..., None] = launch) -> list[Any]:
    """Tokens of two requests, one after the other, and their log-probabilities, to the last bit."""
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, logprobs=4)
    with on_device(multiprocessors, launcher):
        with LLM(engine.manifest, engine.executor()) as llm:
            found = [llm.generate([prompt], params)[0] for prompt in (PROMPT, PROMPT[:2])]
    return [(one.token_ids, one.logprobs) for one in found]


@pytest.fixture(scope="module")
def launched(engine: GpuEngine) -> list[Any]:
    """The answers of an engine with separate launches."""
    return answers(engine, TARGET.multiprocessors - 1)


def test_the_same_bits_as_launches(engine: GpuEngine, launched: list[Any]) -> None:
    entries: list[str] = []

    def noted(spec: LaunchSpec, *rest: Any) -> None:
        entries.append(spec.entry)
        launch(spec, *rest)

    assert answers(engine, TARGET.multiprocessors, noted) == launched
    assert entries.count("step") == 2 * 2 * 3, "two runs, in three decode steps of each request"


@pytest.mark.parametrize(("programs", "seed"), [(7, 2), *soak((2, 1), (16, 3))])
def test_whoever_goes_on_the_bits_are_the_same_and_nothing_races(
    programs: int, seed: int, engine: GpuEngine, launched: list[Any]
) -> None:
    """Fewer programs than tiles, and more than any stage has; their counters order all accesses."""
    random, ran = Random(seed), []

    def racing(spec: LaunchSpec, grid: tuple[int, ...], args: Sequence[Any]) -> None:
        if not spec.resident or len(ran) == 2:  # one step has two runs
            return launch(spec, grid, args)
        ran.append(spec)
        every = [(spec, (1, 1, 1), lambda _: args)]
        return run_racing(programs, every, Lockstep(random.choice), programs=True)

    assert answers(engine, TARGET.multiprocessors, racing) == launched
    assert len(ran) == 2


def _without_a_wait(spec: LaunchSpec) -> LaunchSpec:
    lines = spec.source.splitlines(keepends=True)
    at = next(n for n, line in enumerate(lines) if "await_count(step_ptr + 1" in line)
    return replace(spec, source="".join([*lines[:at], *lines[at + 1 :]]))


def _waits_for_too_many(spec: LaunchSpec) -> LaunchSpec:
    return replace(spec, source=spec.source.replace("await_count(step_ptr + 0, 6)", "await_count(step_ptr + 0, 7)"))


def _counts_without_release(spec: LaunchSpec) -> LaunchSpec:
    return replace(spec, source=spec.source.replace('sem="release"', 'sem="relaxed"'))


@pytest.mark.parametrize(
    ("planted", "error"),
    [(_without_a_wait, Race), (_waits_for_too_many, StuckError), (_counts_without_release, Race)],
)
def test_a_planted_fault_shows(planted: Callable[[LaunchSpec], LaunchSpec], error: type, engine: GpuEngine) -> None:
    def racing(spec: LaunchSpec, grid: tuple[int, ...], args: Sequence[Any]) -> None:
        if not spec.resident:
            return launch(spec, grid, args)
        changed = planted(spec)
        assert changed.source != spec.source
        lockstep = Lockstep(Random(0).choice)
        lockstep.patience = 2000
        return run_racing(3, [(changed, (1, 1, 1), lambda _: args)], lockstep, programs=True)

    with pytest.raises(error):
        answers(engine, TARGET.multiprocessors, racing)


def test_a_run_that_wants_what_is_not_there_is_refused(engine: GpuEngine) -> None:
    verify_plan(engine.program)
    plan = engine.program.plan
    assert plan is not None
    first, run = plan.phases[0], plan.phases[0].runs[0]
    args = run.launches[-1].args
    at = next(n for n, arg in enumerate(args) if isinstance(arg, CallArg))
    wrong = (*args[:at], CallArg(0, OperandArg("other")), *args[at + 1 :])
    launches = (*run.launches[:-1], msgspec.structs.replace(run.launches[-1], args=wrong))
    nowhere = msgspec.structs.replace(run.launches[-1], object="x")
    for changed, words in (
        (msgspec.structs.replace(run, launches=launches), "wants operand 'other'"),
        (msgspec.structs.replace(run, count=99), "has 99 steps"),
        (msgspec.structs.replace(run, launches=(nowhere,)), "object x is not"),
    ):
        phase = msgspec.structs.replace(first, runs=(changed,))
        bad = msgspec.structs.replace(plan, phases=(phase, *plan.phases[1:]))
        with pytest.raises(VerifyError, match=f"the run from step 2 on.*{words}"):
            verify_plan(msgspec.structs.replace(engine.program, plan=bad))


class Faked(TilingSearch):
    """A search whose objects are not compiled: `facts` gives their properties, or the reason of a refusal, by spec."""

    facts: Callable[[LaunchSpec], dict[str, int] | str]

    def _compile(self, planned: Planned) -> None:
        for key, spec in planned.specs().items():
            found = self.facts(spec) if spec.resident else {}
            if isinstance(found, str):
                self.reasons[key] = found
            else:
                fine = Compiled(spec.entry, b"", 1 << 10, 40, 0, 12000, ir="module {\n}\n")
                self.compiled[key] = replace(fine, **found)


def searched(engine: GpuEngine, facts: Callable[[LaunchSpec], dict[str, int] | str]) -> Objects:
    def plan(tuner: Tuner) -> Planned:
        return plan_program(engine.program, LIMITS, tuner, [Shape(1, True)], step_kernel=True)

    search = Faked(engine.program, LIMITS, TARGET, plan, lambda *_: None)
    search.facts = facts
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fallback, "check_addresses", lambda *_: {})
        return search.run(Tuner(TARGET))


def chosen(found: Objects) -> list[int]:
    return [run.choice[1]["resident"] for run in found.planned.phases[0].runs]


def test_a_kernel_that_lets_fewer_programs_in_than_reckoned_is_cut_anew(engine: GpuEngine) -> None:
    """The next tilings of the whole kernel are taken, and the report says why; as many programs run as fit."""
    first = chosen(searched(engine, lambda _: {}))
    assert len(first) == 2 and min(first) > 2
    room = searched(engine, lambda _: {"shared_bytes": 80 << 10, "registers": 157})
    assert set(chosen(room)) <= {1, 2} and room.refused
    assert "holds 2 of its programs, not" in str(room.refused[0]) and "step kernel of linear_q_0" in room.refused[0].key
    for run in make_plan(room.planned, TARGET, room.compiled).phases[0].runs:
        assert run.launches[-1].grid[0].constant == 2 * TARGET.multiprocessors
    spilling = searched(engine, lambda spec: {"spill_bytes": 8} if 0 < spec.max_registers < 200 else {})
    assert 0 < len(chosen(spilling)) and all("spills 8 bytes" in str(one) for one in spilling.refused)


@pytest.mark.parametrize(
    ("facts", "words"),
    [({"spill_bytes": 8}, "spills 8 bytes"), ({"shared_bytes": 300 << 10}, "of shared memory"), ("planted", "planted")],
)
def test_what_passes_no_check_stays_launches(facts: dict[str, int] | str, words: str, engine: GpuEngine) -> None:
    found = searched(engine, lambda _: facts)
    assert not found.planned.phases[0].runs and len(found.refused) >= 2
    run = "linear_q_0, attention_0, linear_q_1, linear_q_2: no step kernel passes the checks, the first "
    assert any(line.startswith(run) and words in line for line in found.launched)
    assert not any(spec.resident for spec in found.planned.specs().values())


def test_launches_that_are_faster_by_the_model_are_taken_and_the_report_says_so(
    engine: GpuEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whole, "BETWEEN", -0.9e-6)
    found = searched(engine, lambda _: {})
    assert not found.planned.phases[0].runs and not found.refused
    [line, _] = [line for line in found.launched if "by the model" in line]
    assert re.search(r"linear_q_2: launches are faster by the model, [\d.]+ us to [\d.]+$", line)


def test_what_is_asked_for_before_a_stage_waits_is_written_by_none_before_it(engine: GpuEngine) -> None:
    stages = list(phase_of(engine).runs[0].stages)
    stages[2] = replace(stages[2], early=stages[1].writes)
    assert list(faults(stages)) == ["linear_q_1 asks for what attention_0 writes before it waits"]


@pytest.mark.parametrize("resident", [3, *soak(1)])
def test_however_the_whole_is_cut_the_bits_are_those_of_launches(
    resident: int, engine: GpuEngine, launched: list[Any]
) -> None:
    tuner = Tuner(TARGET, {key: {"resident": resident} for key, _ in (run.choice for run in phase_of(engine).runs)})
    planned = plan_program(engine.program, LIMITS, tuner, (), step_kernel=True)
    runs = planned.phases[0].runs
    assert {run.choice[1]["resident"] for run in runs} == {resident}
    assert [run.spec for run in runs] != [run.spec for run in phase_of(engine).runs]
    program = msgspec.structs.replace(engine.program, plan=make_plan(planned, TARGET, {}))
    other = replace(engine, program=program, specs=planned.specs())
    assert answers(other, TARGET.multiprocessors) == launched


@pytest.mark.parametrize(("more", "runs"), [(0, True), (-1, False)])
def test_a_device_of_fewer_multiprocessors_takes_launches(more: int, runs: bool, engine: GpuEngine) -> None:
    driver = FakeDriver(engine.objects(), dry=True)
    driver.multiprocessors = TARGET.multiprocessors + more
    executor = Player(CudaDevice(engine.engine(), cuda=Cuda(bindings=driver)))
    device, plan = executor.device, engine.program.plan
    assert plan is not None
    launches = [launch.object for launch, _ in device.walker.launches(plan.phases[0])]
    assert sum(name.startswith("step_") for name in launches) == (2 if runs else 0)
    executor.close()
    assert not driver.live and not driver.memory


def test_graphs_of_the_executor_give_the_tokens_of_launches(engine: GpuEngine, launched: list[Any]) -> None:
    driver = FakeDriver(engine.objects())
    with LLM(engine.manifest, Player(CudaDevice(engine.engine(), cuda=Cuda(bindings=driver)))) as llm:
        [found] = llm.generate([PROMPT], SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True))
    assert found.token_ids == launched[0][0] and driver.graph_launches > 0


@pytest.mark.parametrize("target", ["cpu", "mi300x"])
def test_other_targets_refuse_the_flag(target: str) -> None:
    with pytest.raises(UsageError, match=f"--step-kernel is for NVIDIA GPUs: --target {target} is none"):
        CompileOptions(Path("m"), Path("e"), target=target, step_kernel=True)
