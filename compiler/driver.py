"""The whole compile on one screen: checkpoint -> graph -> passes -> program -> kernels -> engine directory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from ..passes import pipelines
from ..passes.base import Pass, PassContext
from ..passes.manager import run_passes
from ..runtime.format.manifest import QuantFacts
from . import measure
from .backends.base import Backend
from .backends.errors import CodegenError
from .backends.registry import backend_for
from .caches import lower_options
from .calibration import load_calibration
from .calibrations import Calibrations, open_calibrations
from .canaries import make_canaries
from .engine import directory as writer
from .engine.manifest import embedding_facts, make_limits, make_manifest, read_bos
from .eviction import read_eviction
from .frontend.ending import ending_of
from .frontend.load import load_graph
from .frontend.source.pooling import read_pooling
from .frontend.source.scoring import read_scoring
from .frontend.source.source import open_source
from .gates import GatePlan, gate_sequences, parse_gates
from .graph.graph import Graph
from .options import KV_DTYPES, CompileOptions
from .phases import Phases
from .program.context import LowerOptions
from .program.lower import lower
from .program.verify import verify_lowered, verify_plan
from .progress import Reporter
from .quantization import QUANTIZATIONS
from .report import CompileReport, make_report
from .request import check
from .sizing import auto_passes
from .speculate.cost import modelled_cost
from .speculate.plan import acceptance_of, speculation, with_speculation
from .targets import Target, find_target
from .weights.formats.dense import short_dtype
from .weights.handles import is_quantized


def compile_engine(options: CompileOptions, reporter: Reporter) -> CompileReport:
    """Run every stage; `reporter` hears of them. Returns what report.json and the summary are made of."""
    request = check(options)
    options, target, choice = request.options, request.target, request.choice
    for warning in request.warnings:
        reporter.warn(warning)
    heads = choice.read_heads() if choice else ()
    source = open_source(options.model, options.task)
    options = replace(options, model=source.files)
    pooling = read_pooling(options.model, options.pooling) if options.task == "embed" else None
    with reporter.stage("trace"):
        policy = read_eviction(options.kv_policy)
        scored = options.task == "rerank"
        meant = read_scoring(options.model).max_tokens if scored else pooling.max_tokens if pooling else 0
        ending = pooling and ending_of(pooling)
        graph = load_graph(source, options.max_seq_len, meant=meant, task=options.task, ending=ending, policy=policy)
    backend = backend_for(target, weight_dtype(graph), options.deterministic)
    limits = make_limits(graph, options)
    lowering = lower_options(graph, options, backend, limits)
    gates = _gates(options, graph, target)
    with reporter.stage("optimize"):
        context = PassContext(progress=reporter.progress)
        phases = Phases(graph, context, options.dump_passes)
        phases.run("canonicalize", pipelines.canonicalize())
        _refuse_early(graph, options.kv_policy, lowering, backend)
    original = graph.copy()
    kept = Calibrations()
    if (chosen := QUANTIZATIONS[options.quant]) is not None:
        if any(map(is_quantized, graph.weights.values())):
            reporter.warn(f"the model comes quantized: --quant {options.quant} starts from its quantized values")
        with reporter.stage("quantize"):
            sequences = _calibration(options, graph, reporter) if chosen.calibrated else ()
            kept = open_calibrations(request.options, sequences) if sequences else kept
            context.calibrations = kept.folder
            phases.run("quantize", _quantize(options, graph, backend, sequences))
    with reporter.stage("answers"):
        kinds = (lowering.kv_dtype, lowering.state_dtype)
        quantized, canaries = graph.copy(), make_canaries(graph, _tokenizer(options), kinds)
    acceptance: list[list[float]] = []
    if added := pipelines.speculate(heads, choice.layers if choice else 0, options.quant, options.quant_head):
        with reporter.stage("speculate"):
            phases.run("speculate", added)
            sequences = _calibration(options, graph, reporter) if heads else ()
            acceptance = acceptance_of(graph, sequences, reporter.progress)
    with reporter.stage("lower"):
        phases.run("attention", pipelines.attention(options.kv_policy))
        phases.run("fuse", pipelines.fuse())
        lowered = lower(graph, lowering)
        verify_lowered(lowered.program, backend.refusal)
    with writer.engine_directory(options.output) as stage:
        with reporter.stage("kernels"):
            built = backend.build(lowered.program, limits, stage / "kernels", reporter.progress)
            verify_plan(built.program)
        with reporter.stage("weights"):
            writer.write_weights(stage, built.program, lowered.sources, backend.pack, reporter.progress)
        tuned: list[str] = []
        if options.tune:
            with reporter.stage("tune"):
                built, tuned = measure.tune(stage, target, built, limits, reporter.progress)
        with reporter.stage("engine"):
            cost = modelled_cost(graph, target, backend.profile)
            if heads and target.is_here:
                cost = measure.step_cost(stage, target, built, limits)
            found = speculation(choice, acceptance, limits, options.spec_guesses, cost)
            program = with_speculation(built.program, found)
            report = make_report(graph, program, phases, options, target, backend.profile, tuned)
            writer.write_program(stage, program)
            (stage / "report.json").write_bytes(report.to_json())
            tokenizer = writer.copy_tokenizer(stage, options.model, bool(pooling and pooling.lower_case))
            writer.copy_runtime(stage)
            facts = QuantFacts(options.quant, report.bits_per_weight, report.kept)
            embedding = embedding_facts(stage, graph, options, pooling)
            answers = writer.write_canaries(stage, canaries)
            manifest = make_manifest(graph, lowered, facts, options, target, built, tokenizer, embedding, answers)
            manifest = writer.write_manifest(stage, manifest)
        if gates:
            with reporter.stage("gate"):
                loss = measure.measure_loss(stage, gates, original, quantized, phases.records, reporter.progress)
                writer.seal(stage, msgspec.structs.replace(manifest, gate=loss))
    kept.done()
    return replace(report, engine_bytes=sum(p.stat().st_size for p in options.output.rglob("*") if p.is_file()))


def _refuse_early(graph: Graph, policy: str, lowering: LowerOptions, backend: Backend) -> None:
    """CodegenError for an op that the back end has no kernel of, before minutes of quantizing."""
    rough = graph.copy()
    for phase in (pipelines.attention(policy), pipelines.fuse()):
        run_passes(rough, phase, PassContext())
    for step in lower(rough, lowering).program.kernel_steps.values():
        if reason := backend.refusal(step):
            raise CodegenError(f"{step.op}: {reason}")


def _quantize(
    options: CompileOptions, graph: Graph, backend: Backend, sequences: Sequence[Sequence[int]]
) -> list[Pass]:
    """The quantization passes; `sequences` are what calibrated methods read."""
    if options.quant == "auto":
        return auto_passes(options, graph, backend, KV_DTYPES[options.kv_cache] or backend.kv_dtype, sequences)
    asked = (options.quant, options.quant_head, options.keep, sequences, options.group_size, options.device)
    encodes = options.task != "generate" and find_target(options.target).backend == "cpu"
    return pipelines.quantize(*asked, rotate=options.rotate, encodes=encodes)


def _calibration(options: CompileOptions, graph: Graph, reporter: Reporter) -> Sequence[Sequence[int]]:
    """Token sequences of the calibration text."""
    calibration = load_calibration(
        options.calib,
        _tokenizer(options),
        graph.info.vocab_size,
        num_sequences=options.calib_sequences,
        sequence_length=min(options.calib_length, graph.max_seq_len),
        seed=options.seed,
    )
    if calibration.warning:
        reporter.warn(calibration.warning)
    return calibration.sequences


def _gates(options: CompileOptions, graph: Graph, target: Target) -> GatePlan | None:
    """What --gate asks for, its text tokenized; None without it."""
    if not options.gate:
        return None
    measure.check_device(target)
    bos = read_bos(options.model)
    length = graph.max_seq_len
    sequences = gate_sequences(options.gate_text, _tokenizer(options), graph.info.vocab_size, bos, length)
    return GatePlan(parse_gates(options.gate), sequences, str(options.gate_text or "bundled"))


def _tokenizer(options: CompileOptions) -> Path | None:
    """The model's tokenizer.json, if it has one."""
    file = options.model / "tokenizer.json"
    return file if file.is_file() else None


def weight_dtype(graph: Graph) -> str:
    """The element type of the checkpoint's weights: f32, bf16 or f16."""
    found = short_dtype(graph.info.dtype)
    return found if found in ("bf16", "f16") else "f32"
