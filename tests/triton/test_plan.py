"""The plan: every step that the scheduler can emit has a phase, arguments resolve, gaps fail the build."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from building import TARGET, GpuEngine, build
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from icc.compiler.backends.errors import CodegenError
from icc.compiler.backends.triton import fallback
from icc.compiler.backends.triton.bounds.addresses import IndexFault
from icc.compiler.backends.triton.fallback import TilingSearch, refusals
from icc.compiler.backends.triton.objects.compile import Compiled, spec_key
from icc.compiler.backends.triton.plan import Planned, make_plan, occupancy, phase_shapes, plan_program
from icc.compiler.backends.triton.spec import LaunchSpec
from icc.compiler.backends.triton.tiling.choice import RefusedTiling, Tuner
from icc.compiler.options import CompileOptions
from icc.compiler.planning.plan import make_plan as plan_model
from icc.compiler.program.program import decode_program
from icc.compiler.program.steps.base import Step
from icc.compiler.targets import TARGETS, Target
from icc.runtime.errors import EngineFieldError
from icc.runtime.executor.walk import LaunchPointer, Walker
from icc.runtime.format.batch import PLAN_ARRAYS
from icc.runtime.format.footprint import batch_limits
from icc.runtime.format.kv import KVMemory
from icc.runtime.format.manifest import Limits
from icc.runtime.format.operands import Operand, OutputOperand
from icc.runtime.format.plan import COUNTERS, SIZES, Extent, LaunchPlan, Term, extent
from icc.runtime.format.program import LOGITS
from icc.runtime.format.program import Step as UntypedStep
from icc.runtime.format.programs import decode_program as read_untyped

LIMITS = Limits(max_seq_len=64, max_batch_size=6, max_step_tokens=24)


@pytest.fixture(scope="module")
def engine(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> GpuEngine:
    path: Path = tmp_path_factory.mktemp("model")
    tiny.save_tiny(tiny.tiny_configs()["mixtral"], path, "bfloat16")
    return build(path, "rtn4", LIMITS)


def test_extents() -> None:
    sizes = {"num_tokens": 17, "num_seqs": 3}
    assert extent("num_tokens", 16).value(sizes) == 2
    assert Extent(1, (Term("num_tokens", 8, 2), Term("num_seqs"))).value(sizes) == 1 + 6 + 3
    assert Extent(5).value({}) == 5


def test_phases_cover_the_limits() -> None:
    shapes = phase_shapes(LIMITS)
    assert [s.max_tokens for s in shapes if s.decode] == [1, 2, 4, 6]
    assert [s.max_tokens for s in shapes if not s.decode] == [16, 24]


def test_kernels_wait_themselves_from_sm_90_on(engine: GpuEngine) -> None:
    for target in ("h100", "b200", "a100", "l4", "mi300x"):
        specs = plan_program(engine.program, LIMITS, Tuner(TARGETS[target])).specs().values()
        assert {spec.dependent for spec in specs} == {target in ("h100", "b200")}
        assert all(spec.dependent == ("gdc_wait()" in spec.source) for spec in specs)
    plan = engine.program.plan
    assert plan is not None and all(found.dependent for found in plan.objects.values())


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_every_step_is_bound(data: st.DataObject, engine: GpuEngine) -> None:
    plan = engine.program.plan
    assert plan is not None
    seqs = data.draw(st.integers(1, LIMITS.max_batch_size))
    tokens = data.draw(st.one_of(st.just(seqs), st.integers(seqs, LIMITS.max_step_tokens)))
    rows = data.draw(st.integers(0, tokens))
    sizes = {
        "num_tokens": tokens,
        "num_seqs": seqs,
        "num_logit_rows": rows,
        "max_blocks": 8,
        "num_moves": data.draw(st.integers(0, tokens)),
    }
    phase = plan.phase(tokens, seqs)
    assert phase.max_tokens >= tokens and (not phase.decode or tokens == seqs)
    spaces = {
        "arena": engine.program.arena_bytes_per_token * LIMITS.max_step_tokens,
        "kv": engine.program.kv.groups[0].block_bytes() * 32, "scratch": plan.scratch_bytes,
        "logits": 4 * LIMITS.max_step_tokens * engine.program.vocab_size,
        "counters": 4 * COUNTERS * LIMITS.max_batch_size,
    }  # fmt: skip
    cache, limits = KVMemory(engine.program.kv, (32,)), batch_limits(engine.program, LIMITS, 1 << 40)
    for bound in Walker(engine.program, plan, cache, limits).walk(phase, sizes):
        assert all(0 < n < 2**31 for n in bound.grid)
        types = plan.objects[bound.launch.object].types
        assert len(types) == len(bound.args)
        for value, kind in zip(bound.args, types, strict=True):
            assert isinstance(value, LaunchPointer) == kind.startswith("*")
            assert not isinstance(value, LaunchPointer) or value.space in {*spaces, *PLAN_ARRAYS, "weight"}
            if isinstance(value, LaunchPointer) and value.space in spaces:
                assert 0 <= value.offset < max(spaces[value.space], 1)


class Odd(Step, frozen=True, kw_only=True, tag="odd"):
    """An op that no back end knows."""

    y: Operand


def test_a_step_without_a_kernel_fails_the_build(engine: GpuEngine) -> None:
    odd = Odd(kernel="odd_0", y=OutputOperand(LOGITS, "f32", 5))
    program = msgspec.structs.replace(engine.program, kernels={"odd_0": "odd"}, steps=(odd,))
    with pytest.raises(CodegenError, match=r"kernel odd_0 \(odd\): the Triton backend has no kernel of op 'odd'"):
        plan_program(program, LIMITS, Tuner(TARGET))


def test_a_runtime_walks_ops_that_it_has_never_heard_of(engine: GpuEngine) -> None:
    """The runtime needs only the call of a step; from the steps of program.json it reads the kernels' names."""
    raw = msgspec.json.decode(msgspec.json.encode(engine.program))
    for step in raw["steps"]:
        step["op"], step["surprise"] = "odd", {"x": 1}
    program = read_untyped(msgspec.json.encode(raw), "program.json")
    assert program.plan == engine.program.plan and type(program.steps[0]) is UntypedStep
    phase, sizes = program.plan.phases[0], dict.fromkeys(SIZES, 1)
    places = KVMemory(program.kv, (32,)), batch_limits(program, LIMITS, 1 << 40)
    found, known = (
        [(bound.launch, bound.args) for bound in Walker(one, program.plan, *places).walk(phase, sizes)]
        for one in (program, engine.program)
    )
    assert found == known
    with pytest.raises(EngineFieldError, match="odd"):
        decode_program(msgspec.json.encode(raw), "program.json")


def test_icc_plan_knows_the_scratch_of_config_json_alone(engine: GpuEngine, tiny: Any, tmp_path: Path) -> None:
    """The bytes of scratch memory are those of the engine's launch plan."""
    tiny.save_tiny(tiny.tiny_configs()["mixtral"], tmp_path, "bfloat16")
    for weights in tmp_path.glob("*.safetensors"):
        weights.unlink()
    limits = {name: getattr(LIMITS, name) for name in ("max_seq_len", "max_batch_size", "max_step_tokens")}
    options = CompileOptions(model=tmp_path, output=Path(), target=TARGET.name, quant="rtn4", **limits)
    [planned] = plan_model(options, [TARGET.name]).targets
    assert engine.program.plan is not None
    assert planned.planned.memory.scratch == engine.program.plan.scratch_bytes > 0


def test_a_plan_survives_json(engine: GpuEngine) -> None:
    assert decode_program(msgspec.json.encode(engine.program), "program.json") == engine.program
    assert isinstance(engine.program.plan, LaunchPlan)


def _fine(planned: Planned) -> dict[str, Compiled]:
    return {key: Compiled(spec.entry, b"", 1024, 64, 0, 12000) for key, spec in planned.specs().items()}


def test_what_exceeds_the_target_or_spills_while_decoding_is_refused(engine: GpuEngine) -> None:
    planned = plan_program(engine.program, LIMITS, Tuner(TARGET))
    fine = _fine(planned)
    assert refusals(planned, fine, {}, TARGET) == []
    assert make_plan(planned, TARGET, fine).resources()[0]["registers"] == 64
    decode, mixed = planned.phases[0], planned.phases[-1]
    key = next(key for key in decode.all() if key.startswith("linear_decode") and key not in mixed.all())
    bad = Compiled("x", b"", 0, 255, 8, 12000)
    [found] = {r.config["decode"] for r in refusals(planned, {**fine, key: bad}, {}, TARGET)}
    assert found == 1 and "spills 8 bytes" in str(refusals(planned, {**fine, key: bad}, {}, TARGET)[0])
    large = replace(bad, shared_bytes=300 << 10, spill_bytes=0)
    assert "bytes of shared memory" in refusals(planned, {**fine, key: large}, {}, TARGET)[0].reason
    decoding = {key for phase in planned.phases if phase.shape.decode for key in phase.all()}
    only = min(mixed.all().keys() - decoding)
    assert refusals(planned, {**fine, only: bad}, {}, TARGET) == [], "prompts may spill"
    norm = next(key for key in decode.all() if key.startswith("norm"))
    with pytest.raises(CodegenError, match="spills 8 bytes"):  # has only one form
        refusals(planned, {**fine, norm: bad}, {}, TARGET)


def test_of_tilings_that_all_spill_the_least_evil_is_taken(engine: GpuEngine) -> None:
    """The tiling that spills least is taken rather than none; tilings refused for other reasons stay excluded."""
    configs = [{"m": 16, "n": n} for n in (16, 32, 64)]
    refused = [RefusedTiling("k", config, "spills", spills) for config, spills in zip(configs, (56, 8, 0), strict=True)]
    tuner = Tuner(TARGET, refused=tuple(refused))
    assert tuner.pick("k", configs, lambda config: config["n"]) == configs[1]
    with pytest.raises(CodegenError, match="all 1 tilings of k"):
        replace(tuner, refused=(refused[2],)).pick("k", configs[2:], lambda config: 1.0)
    planned = plan_program(engine.program, LIMITS, Tuner(TARGET))
    key = next(key for key in planned.phases[0].all() if key.startswith("linear_decode"))
    compiled = {**_fine(planned), key: Compiled("x", b"", 0, 255, 8, 12000)}
    [found] = refusals(planned, compiled, {}, TARGET)
    assert found.spills == 8 and refusals(planned, compiled, {}, TARGET, [found]) == []
    assert refusals(planned, compiled, {key: "is wrong"}, TARGET, [found]), "that it is back excuses spills alone"


def _compile(engine: GpuEngine, monkeypatch: pytest.MonkeyPatch, planted: Callable[[LaunchSpec], str]) -> Any:
    """A compile whose objects are refused for the reasons that `planted` gives."""

    def compile_specs(specs: Any, target: Target, progress: Any, refused: dict[str, str]) -> dict[str, Compiled]:
        found = {spec_key(spec): spec for spec in specs}
        assert not found.keys() & tried, "nothing is compiled twice"
        tried.update(found)
        refused.update({key: reason for key, spec in found.items() if (reason := planted(spec))})
        return {key: Compiled(s.entry, b"", 1024, 64, 0, 12000) for key, s in found.items() if key not in refused}

    tried: set[str] = set()
    monkeypatch.setattr(fallback, "compile_specs", compile_specs)
    monkeypatch.setattr(fallback, "check_launch", lambda *_: None)
    monkeypatch.setattr(fallback, "plan_faults", lambda *_: {})
    plan = partial(plan_program, engine.program, LIMITS)
    return TilingSearch(engine.program, LIMITS, TARGET, plan, lambda *_: None).run(Tuner(TARGET))


def test_a_tiling_that_is_refused_is_out_and_the_next_one_is_taken(
    engine: GpuEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: the first tiling of each product in the first phase is refused."""
    first = plan_program(engine.program, LIMITS, Tuner(TARGET))
    bad = {key for key in first.phases[0].all() if key.startswith("linear_decode")}
    objects = _compile(engine, monkeypatch, lambda spec: "does not compile: planted" if spec_key(spec) in bad else "")
    assert (
        bad and not bad & objects.planned.specs().keys() and objects.compiled.keys() == objects.planned.specs().keys()
    )
    assert {r.reason for r in objects.refused} == {f"does not compile: planted ({key})" for key in bad}
    taken = {key: config for phase in objects.planned.phases for key, config in phase.picks.values()}
    for refusal in objects.refused:
        assert taken[refusal.key] != refusal.config and str(refusal.config["warps"]) in str(refusal)
    others = {key for key, *_ in map(astuple, objects.refused)}
    before = {key: config for phase in first.phases for key, config in phase.picks.values()}
    assert all(taken[key] == config for key, config in before.items() if key not in others), "other choices stay"


def test_only_where_no_tiling_is_left_a_compile_ends(engine: GpuEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        CodegenError, match=r"all \d+ tilings of linear .* are refused, the first because it planted"
    ) as e:
        _compile(engine, monkeypatch, lambda spec: "planted" if spec.entry.startswith("linear_") else "")
    assert "\n" not in e.value.message and e.value.exit_code == 30


def test_an_index_beyond_32_bits_refuses_its_tiling(engine: GpuEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    first = plan_program(engine.program, LIMITS, Tuner(TARGET))
    bad = next(key for key in first.phases[0].all() if key.startswith("linear_decode"))
    reasons: dict[str, str] = {}
    with monkeypatch.context() as patch:
        fault = IndexFault("x + y may leave 32 bits")
        patch.setattr(fallback, "plan_faults", lambda *_: {bad: {fault: "decode up to 1"}})
        fallback.check_addresses(engine.program, LIMITS, first, {}, reasons)
    assert "32 bits, in decode up to 1" in reasons[bad]
    assert refusals(first, _fine(first), reasons, TARGET)[0].reason.startswith("x + y")


def test_occupancy_is_what_the_scarcest_resource_allows() -> None:
    assert occupancy(Compiled("x", b"", 0, 32, 0, 0), 4, TARGET) == 1.0
    assert occupancy(Compiled("x", b"", 0, 255, 0, 0), 4, TARGET) == 0.125  # two blocks of 128 threads
    assert occupancy(Compiled("x", b"", 200 << 10, 32, 0, 0), 8, TARGET) == 0.125
    assert occupancy(Compiled("x", b"", TARGET.shared_memory_kib << 10, 32, 0, 0), 8, TARGET) == 0.125  # the limit


def test_a_table_that_is_also_the_head_is_stored_once(tiny: Any, tmp_path: Path) -> None:
    config = tiny.tiny_configs()["llama-mqa_tied_biases_llama3"]
    tiny.save_tiny(config, tmp_path, "bfloat16")
    program = build(tmp_path, "rtn4", LIMITS).program
    tables = [name for name, weight in program.weights.items() if weight.shape[0] == config.vocab_size]
    readers = {s.op for s in program.steps for o in s.operands.values() if o.name == tables[0]}
    assert len(tables) == 1 and program.weights[tables[0]].format == "gq8"
    assert readers == {"embedding", "linear_q"}
