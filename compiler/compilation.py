"""A compile in progress: the state that its stages share, and the work of each stage. compiler/driver.py has their
order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import msgspec

from ..passes import pipelines
from ..passes.base import Pass, PassContext, Refusal
from ..passes.manager import run_passes
from ..passes.registry import parse_passes
from ..passes.speculate.insert_draft_layer import DraftLayer
from ..runtime.adapters.bases import published_name
from ..runtime.format.canaries import Canaries
from ..runtime.format.forms import CompiledForm
from ..runtime.format.manifest import Limits, Manifest, QuantFacts
from ..runtime.format.program import Program
from ..runtime.format.prompts import CompiledPrompt
from . import measure
from .adapted import adapted_graph
from .backends.base import Backend, Built
from .backends.errors import CodegenError
from .caches import choose_caches
from .calibration import load_calibration
from .calibrations import Calibrations, open_calibrations
from .canaries import make_canaries
from .engine import directory as writer
from .engine.earlier import EarlierEngine
from .engine.manifest import embedding_facts, make_manifest
from .errors import UsageError
from .frontend.source.pooling import Pooling
from .frontend.source.source import ModelSource
from .gates import GatePlan
from .graph.graph import Graph
from .kv_formats import read_cache_option
from .options import CompileOptions
from .phases import Phases
from .prefixes import compiled_prompts, write_prompts
from .program.context import LowerOptions
from .program.lower import Lowered, lower
from .program.stages import weights_of
from .program.verify import verify_lowered, verify_plan
from .progress import Reporter
from .prompt_files import PromptTokens
from .quantization import find_quantization
from .report import CompileReport, make_report, token_seconds
from .request import CompileRequest, tokenizer_file
from .sizing import auto_passes
from .speculate.acceptance import DRAFTS
from .speculate.cost import modelled_cost
from .speculate.head_files import MedusaHead
from .speculate.plan import acceptance_of, speculation, with_speculation
from .weights.handles import is_quantized


@dataclass
class Compilation:
    """The graph, which stages change in place, and the inputs and settings that they read.

    source: the model that the graph was read from; its directory of files lasts as long as it does. options: the
    checked options, with that directory as the model. texts: the directory with the tokenizer. calibrations: results
    that an interrupted compile may have left, and that this one keeps until it is done. draft_layer: the draft layer to
    insert. earlier: the engine whose program and kernels these weights are for; None if the compile makes its own.
    prompts: prompts whose KV the engine is to hold. forms: forms that answers may follow. kept: an engine whose prompts
    and forms are kept, too.
    """

    request: CompileRequest
    source: ModelSource
    options: CompileOptions
    texts: Path
    graph: Graph
    backend: Backend
    limits: Limits
    lowering: LowerOptions
    pooling: Pooling | None
    gates: GatePlan | None
    reporter: Reporter
    calibrations: Calibrations = field(default_factory=Calibrations)
    acceptance: list[list[float]] = field(default_factory=list)
    draft_layer: DraftLayer | None = None
    earlier: EarlierEngine | None = None
    kept: EarlierEngine | None = None
    prompts: Sequence[PromptTokens] = ()
    forms: Sequence[CompiledForm] = ()

    def __post_init__(self) -> None:
        self._context = PassContext(progress=self.reporter.progress)
        self.phases = Phases(self.graph, self._context, self.options.dump_passes)

    @property
    def is_delta(self) -> bool:
        """Whether the output is a delta engine: only the weights that differ from those of an earlier engine."""
        return self.earlier is not None and self.earlier.as_base

    def write_weights(self, lowered: Lowered, built: Built, stage: Path) -> None:
        """Write all weights, packed; of a delta engine only those that its base does not have."""
        facts = stage, built.program, lowered.sources, self.backend.pack, self.reporter.progress
        stages, parts = self.graph.stages, self.graph.parts
        held = [weights_of(lowered.program, number) for number in range(stages)] if stages > 1 else ()
        if self.earlier is not None and self.is_delta:
            writer.write_delta(*facts, self.earlier, parts=parts, held=held)
        else:
            writer.write_weights(*facts, parts=parts, held=held)

    def optimize(self) -> None:
        """Bring the graph into the form that all later phases expect. To fail before minutes of quantizing: UsageError
        if nothing divides among ranks, CodegenError if the back end lacks a kernel."""
        self.phases.run("canonicalize", pipelines.canonicalize())
        self.phases.run("packages", pipelines.packages(parse_passes(self.options.passes)))
        program = lower(self._prepared(), self.lowering).program
        for step in program.kernel_steps.values():
            if reason := self.backend.refusal(step):
                raise CodegenError(f"{step.op}: {reason}")

    def quantize(self) -> None:
        """Quantize as --quant asks."""
        chosen = find_quantization(self.options.quant)
        if chosen is None:
            return
        if any(map(is_quantized, self.graph.weights.values())):
            self.reporter.warn(
                f"the model comes quantized: --quant {self.options.quant} starts from its quantized values"
            )
        with self.reporter.stage("quantize"):
            sequences = self._calibration if chosen.calibrated else ()
            if sequences:
                self.calibrations = open_calibrations(self.request.options, sequences)
            self._context.calibrations = self.calibrations.folder
            self.phases.run("quantize", self._quantization(sequences))

    def choose_caches(self) -> None:
        """Choose the cache types of the layers for --kv-bits."""
        if self.options.kv_bits is None:
            return
        with self.reporter.stage("caches"):
            rough, bits = self._prepared(), self.options.kv_bits
            whole = self._prepared(divided=False) if self.options.ranks > 1 else rough
            self.lowering, self.phases.caches = choose_caches(
                rough, whole, self.lowering, self.backend, bits, self._calibration, self.reporter.progress
            )

    def _prepared(self, divided: bool = True) -> Graph:
        """A copy of the current graph in the form that is lowered; without `divided` as if there were one rank.
        UsageError if nothing of it divides among ranks."""
        rough, context = self.graph.copy(), PassContext()
        run_passes(rough, pipelines.attention(self.options.eviction), PassContext())
        if divided:
            run_passes(rough, self._parallel(), context)
            self._check_divided(rough, context.refusals)
        run_passes(rough, pipelines.fuse(), PassContext())
        return rough

    def _check_divided(self, graph: Graph, refusals: Sequence[Refusal]) -> None:
        """Raise UsageError unless every rank has a part of the graph. refusals: those of the passes that divide it."""
        if graph.ranks < self.options.ranks:
            names = {division.name for division in self._parallel()}
            hint = "it has no experts that they could share evenly: --tensor-parallel divides columns and heads"
            raise UsageError(
                f"nothing of this model divides among {self.options.ranks} ranks",
                next((one.reason for one in reversed(refusals) if one.rule in names), hint),
            )

    def _parallel(self) -> list[Pass]:
        """The passes that divide the graph among ranks."""
        options, seconds = self.options, token_seconds(self.request.target, self.backend.profile)
        counts = options.tensor_parallel or 1, options.expert_parallel or 1, options.pipeline_parallel or 1
        return pipelines.parallel(*counts, seconds, options.sequence_parallel)

    def answers(self) -> Canaries:
        """The canaries: answers that the engine must give on any machine."""
        kinds = (self.lowering.kv_dtype, *self.lowering.kv_dtypes.values(), self.lowering.state_dtype)
        return make_canaries(self.graph, tokenizer_file(self.texts), kinds)

    def speculate(self, heads: Sequence[MedusaHead]) -> None:
        """Add draft heads, an early exit or a draft layer, if --spec asks for them."""
        choice = self.request.choice
        layers = choice.layers if choice else 0
        added = pipelines.speculate(heads, layers, self.options.quant, self.options.quant_head, self.draft_layer)
        if not added:
            return
        with self.reporter.stage("speculate"):
            self.phases.run("speculate", added)
            sequences = self._calibration if heads else ()
            self.acceptance = acceptance_of(self.graph, sequences, self.reporter.progress)

    def lower(self) -> Lowered:
        """The program, with attention and everything that can be fused as single steps of it."""
        self.phases.run("attention", pipelines.attention(self.options.eviction))
        self.phases.run("parallel", self._parallel())
        self._check_divided(self.graph, self._context.refusals)
        slots = self.options.adapter_slots
        adapted = None if slots is None else adapted_graph(self.graph, slots, self.source)
        self.phases.run("fuse", pipelines.fuse())
        lowered = lower(self.graph, self.lowering, self.phases.observe, adapted=adapted)
        verify_lowered(lowered.program, self.backend.refusal)
        return lowered

    def build(self, lowered: Lowered, stage: Path) -> Built:
        """The kernels, in the engine directory `stage`. MismatchError if they come from an earlier engine whose program
        differs."""
        if self.earlier is not None:
            self.earlier.copy("kernels", stage)
            return self.earlier.built(lowered.program, self.limits)
        built = self.backend.build(lowered.program, self.limits, stage / "kernels", self.reporter.progress)
        verify_plan(built.program)
        return built

    def tune(self, built: Built, stage: Path) -> tuple[Built, list[str]]:
        """With --tune, the kernels that are fastest on this machine, and the choices that are not the default; else
        `built` and an empty list."""
        if not self.options.tune or self.earlier is not None:
            return built, []
        with self.reporter.stage("tune"):
            return measure.tune(stage, self.request.target, built, self.limits, self.reporter.progress)

    def write(
        self, lowered: Lowered, built: Built, tuned: list[str], canaries: Canaries, stage: Path
    ) -> tuple[CompileReport, Manifest]:
        """Write everything but the kernels and weights: the program, the report, tokenizer, runtime, canaries,
        manifest."""
        options, target = self.options, self.request.target
        program = self._with_speculation(built, stage)
        report = make_report(self.graph, program, self.phases, options, target, self.backend.profile, tuned)
        report = replace(report, refused=list(built.refused), launched=list(built.launched))
        if options.adapter_slots is not None:
            report = replace(report, model=published_name(self.request.options.model))
        if not self.is_delta:
            writer.write_program(stage, program)
        (stage / "report.json").write_bytes(report.to_json())
        tokenizer = writer.copy_tokenizer(stage, self.texts, bool(self.pooling and self.pooling.lower_case))
        if tokenizer is None and self.earlier is not None:
            tokenizer = self.earlier.engine.manifest.tokenizer_dir
            self.earlier.copy("tokenizer", stage)
        (writer.copy_main if self.is_delta else writer.copy_runtime)(stage)
        facts = QuantFacts(options.quant, report.bits_per_weight, report.kept)
        embedding = embedding_facts(stage, self.graph, options, self.pooling)
        answers = writer.write_canaries(stage, canaries)
        writer.write_forms(stage, self.forms if self.kept is None else self.kept.forms_and(self.forms))
        manifest = make_manifest(self.graph, lowered, facts, options, target, built, tokenizer, embedding, answers)
        if self.earlier is not None and self.is_delta:
            programs = self.earlier.engine.manifest.programs
            manifest = msgspec.structs.replace(manifest, base=self.earlier.base_of(stage), programs=programs)
        return report, writer.write_manifest(stage, manifest)

    def prompts_for(self, lowered: Lowered) -> list[CompiledPrompt]:
        """The prompts whose KV the engine is to hold. UsageError for a prompt that does not fit its cache."""
        return compiled_prompts(self.prompts, self.kept, lowered, self.limits, self.reporter)

    def write_prompts(self, manifest: Manifest, prompts: Sequence[CompiledPrompt], stage: Path) -> Manifest:
        """Compute and write the KV of prompts, if the engine can run on this machine; else the engine does so when it
        is loaded."""
        return write_prompts(manifest, prompts, stage, self.request.target, self.reporter)

    def gate(self, original: Graph, quantized: Graph, manifest: Manifest, stage: Path) -> None:
        """Measure what --gate asks for on the built engine; GateError if it loses more than allowed."""
        if self.gates is None:
            return
        with self.reporter.stage("gate"):
            progress = self.reporter.progress
            loss = measure.measure_loss(stage, self.gates, original, quantized, self.phases.records, progress)
            writer.seal(stage, msgspec.structs.replace(manifest, gate=loss))

    def check_answers(self, stage: Path) -> None:
        """Check that an engine with an earlier one's kernels gives the answers of its own weights, if it can run on
        this machine."""
        if self.earlier is not None:
            with self.reporter.stage("verify"):
                measure.check_answers(stage, self.request.target)

    def _with_speculation(self, built: Built, stage: Path) -> Program:
        """The program with the trees of its drafter; an earlier engine's program already has them."""
        if self.earlier is not None:
            return built.program
        cost = modelled_cost(self.graph, self.request.target, self.backend.profile, DRAFTS)
        if self.acceptance and self.request.target.is_here and self.graph.ranks == 1:  # ranks are not measured
            cost = measure.step_cost(stage, self.request.target, built, self.limits)
        guesses = self.options.spec_guesses
        found = speculation(self.request.choice, self.acceptance, self.limits, guesses, cost, self.draft_layer)
        return with_speculation(built.program, found)

    def _quantization(self, sequences: Sequence[Sequence[int]]) -> list[Pass]:
        """The quantization passes; calibrated methods read `sequences`."""
        options = self.options
        if options.quant == "auto":
            kv_dtype = read_cache_option(options.kv_cache) or self.backend.kv_dtype
            return auto_passes(options, self.graph, self.backend, kv_dtype, sequences)
        asked = (options.quant, options.quant_head, options.keep, sequences, options.group_size, options.device)
        cpu = self.request.target.backend == "cpu"
        encodes = options.task != "generate" and cpu
        return pipelines.quantize(*asked, rotate=options.rotate, encodes=encodes, cpu=cpu)

    @cached_property
    def _calibration(self) -> Sequence[Sequence[int]]:
        """Token sequences of the calibration text, made at the first call; a warning about them is shown once."""
        calibration = load_calibration(
            self.options.calib,
            tokenizer_file(self.texts),
            self.graph.info.vocab_size,
            num_sequences=self.options.calib_sequences,
            sequence_length=min(self.options.calib_length, self.graph.max_seq_len),
            seed=self.options.seed,
        )
        if calibration.warning:
            self.reporter.warn(calibration.warning)
        return calibration.sequences
