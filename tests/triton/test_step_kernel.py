"""A layer's launches as one kernel: the same bits, in whatever order its programs go on."""

from __future__ import annotations

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
from icc.compiler.backends.triton.fallback import without_bad_runs
from icc.compiler.backends.triton.interpreter import launch
from icc.compiler.backends.triton.lockstep import Lockstep, StuckError
from icc.compiler.backends.triton.objects.compile import Compiled, spec_key
from icc.compiler.backends.triton.plan import PlannedPhase, make_plan, plan_program
from icc.compiler.backends.triton.spec import LaunchSpec, Shape
from icc.compiler.backends.triton.step_kernel.schedule import faults
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
    """Of two layers: the last product of the first has a norm of fewer warps behind it, in a launch of its own."""
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
    """Not a byte of the plan, but for what the flag adds."""
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
    """Tokens of two requests one behind the other and their log probabilities, to the last bit."""
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, logprobs=4)
    with on_device(multiprocessors, launcher):
        with LLM(engine.manifest, engine.executor()) as llm:
            found = [llm.generate([prompt], params)[0] for prompt in (PROMPT, PROMPT[:2])]
    return [(one.token_ids, one.logprobs) for one in found]


@pytest.fixture(scope="module")
def launched(engine: GpuEngine) -> list[Any]:
    """What launches one by one answer."""
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
    """Fewer programs than tiles, and more than any stage has; all that they touch is ordered by what they count."""
    random, ran = Random(seed), []

    def racing(spec: LaunchSpec, grid: tuple[int, ...], args: Sequence[Any]) -> None:
        if not spec.resident or len(ran) == 2:  # the runs of one step
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


def test_programs_are_as_many_as_fit_and_what_does_not_fit_is_launched(engine: GpuEngine) -> None:
    planned = plan_program(engine.program, LIMITS, Tuner(TARGET), [Shape(1, True)], step_kernel=True)
    fine = {key: Compiled(spec.entry, b"", 80 << 10, 157, 0, 12000) for key, spec in planned.specs().items()}
    kept, lines = without_bad_runs(planned, fine, {}, TARGET)
    assert kept == planned and [line.partition(":")[0] for line in lines] == list(planned.phases[0].untiled)
    for run in make_plan(kept, TARGET, fine).phases[0].runs:
        assert run.launches[-1].grid[0].constant == 2 * TARGET.multiprocessors
    first, second = (spec_key(run.spec) for run in planned.phases[0].runs)
    spilling, large = (replace(fine[first], **change) for change in ({"spill_bytes": 8}, {"shared_bytes": 300 << 10}))
    for bad, words in ((spilling, "spills 8 bytes"), (large, "of shared memory"), (None, "planted")):
        reasons = {} if bad else {first: "planted"}
        left, lines = without_bad_runs(planned, fine | ({first: bad} if bad else {}), reasons, TARGET)
        assert [spec_key(run.spec) for run in left.phases[0].runs] == [second]
        assert lines[0].startswith("linear_q_0, attention_0, linear_q_1, linear_q_2: ") and words in lines[0]
        assert first not in left.specs() and second in left.specs()


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
