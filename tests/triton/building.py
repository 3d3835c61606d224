"""Builds the program and plan of a GPU engine from a checkpoint, without compiling objects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
from icc.compiler.adapted import adapted_graph
from icc.compiler.adapter_slots import read_adapter_slots
from icc.compiler.backends.base import Built
from icc.compiler.backends.triton.backend import TritonBackend
from icc.compiler.backends.triton.plan import make_plan, plan_program
from icc.compiler.backends.triton.spec import LaunchSpec
from icc.compiler.backends.triton.tiling.choice import Tuner
from icc.compiler.engine.manifest import make_manifest
from icc.compiler.frontend.load import load_graph
from icc.compiler.frontend.source.source import open_source
from icc.compiler.graph.graph import Graph
from icc.compiler.measure.interpret import InterpretDevice
from icc.compiler.measure.interpret_ranks import RanksInterpreted
from icc.compiler.options import CompileOptions
from icc.compiler.program.lower import LowerOptions, lower
from icc.compiler.program.verify import verify_lowered, verify_plan
from icc.compiler.speculate.choice import SpecChoice
from icc.compiler.speculate.draft_layer import load_draft_layer
from icc.compiler.speculate.head_files import read_heads
from icc.compiler.speculate.tree import tree_of
from icc.compiler.targets import TARGETS, Target
from icc.compiler.weights.shards import of_rank
from icc.passes import pipelines
from icc.passes.base import PassContext
from icc.passes.manager import run_passes
from icc.passes.parallel.sequence import DivideRows
from icc.passes.speculate.insert_draft_layer import DraftLayer
from icc.runtime.executor.player import Player
from icc.runtime.format.manifest import EmbeddingFacts, GpuFacts, Limits, Manifest, QuantFacts
from icc.runtime.format.program import Program
from icc.runtime.format.speculation import Speculation
from icc.runtime.llm import LLM

TARGET = TARGETS["h100"]


@dataclass
class GpuEngine:
    """The content of a GPU engine, in memory; `graph` is the optimized graph that it was lowered from."""

    graph: Graph
    program: Program
    specs: dict[str, LaunchSpec]
    packed: dict[str, np.ndarray]
    limits: Limits
    manifest: Manifest
    others: list[dict[str, np.ndarray]]  # the weights of ranks from 1 on

    def executor(self, num_blocks: int = 32, host_blocks: int = 0) -> Player[InterpretDevice]:
        if self.others:
            return self.ranks(num_blocks)
        return Player(
            InterpretDevice(self.program, self.specs, self.packed, self.limits, num_blocks, host_blocks=host_blocks)
        )

    def ranks(self, num_blocks: int = 32, **options: Any) -> Player[InterpretDevice]:
        """A player over all ranks, interpreted in lockstep. options: those of RanksInterpreted."""
        every = [self.packed, *self.others]
        return Player(RanksInterpreted(self.program, self.specs, every, self.limits, num_blocks, **options))

    def llm(self, num_blocks: int = 32, host_blocks: int = 0) -> LLM:
        return LLM(self.manifest, self.executor(num_blocks, host_blocks))

    def engine(self) -> Any:
        """The parts of a loaded engine that an executor uses; instead of cubins, objects contain their own names."""
        files = SimpleNamespace(read=lambda path: Path(path).stem.encode())
        weights = SimpleNamespace(view=lambda name: self.packed[name])
        return SimpleNamespace(manifest=self.manifest, program=self.program, weights=weights, files=files)

    def objects(self) -> dict[bytes, LaunchSpec]:
        """The launch specs by the content of these objects, for FakeDriver."""
        assert self.program.plan is not None
        return {name.encode(): self.specs[name] for name in self.program.plan.objects}


def build(
    model: Path, quant: str = "none", limits: Limits | None = None, block_size: int = 8, heads: Path | None = None,
    exit_layers: int = 0, deterministic: bool = False, pooling: str | None = None, kv: str = "",
    kv_dtypes: Mapping[int, str] | None = None,
    target: Target = TARGET, adapters: str = "", tensors: int = 1, experts: int = 1,
    draft_layer: str = "", step_kernel: bool = False, rows: int = 0,
    group: int | None = None,
) -> GpuEngine:  # fmt: skip
    """A compile without objects. Calibrated methods use random tokens.

    limits: None: small ones. heads: the folder of draft heads, which get a small tree of guesses; None: no heads.
    exit_layers: layers of an early exit, 0 for none. pooling: that of an engine that embeds, scaled to length 1; None:
    it generates. kv: the type of the cache, by default that of the products. kv_dtypes: by layer, for layers whose
    cache has another type; None: none has. adapters: capacity for adapters, as --adapters takes it. tensors, experts:
    the number of ranks that divide these. draft_layer: a draft layer, as --spec takes it. step_kernel: steps of one
    sequence launch a layer's kernels as one. rows: the least number of rows that ranks divide, 0 for never. group: the
    group size of quantized weights; None: the usual.
    """
    limits = limits or Limits(max_seq_len=64, max_batch_size=4, max_step_tokens=24)
    graph = load_graph(model, task="generate" if pooling is None else "embed")  # one trace for all limits
    assert graph.max_seq_len >= limits.max_seq_len
    graph.max_seq_len = limits.max_seq_len
    phases = [pipelines.canonicalize()]
    if quant != "none":
        rng = np.random.default_rng(0)
        sequences = [rng.integers(0, graph.info.vocab_size, limits.max_seq_len).tolist() for _ in range(4)]
        phases.append(pipelines.quantize(quant, "int8", (), sequences, group))
    if heads is not None:
        phases.append(pipelines.speculate(read_heads(heads), 0, quant, "int8"))
    layer = load_draft_layer(SpecChoice.parse(draft_layer), open_source(model), graph)
    phases.append(pipelines.speculate((), exit_layers, quant, "int8", layer))
    for phase in phases:
        run_passes(graph, phase, PassContext())
    for phase in (pipelines.attention(), pipelines.parallel(tensors, experts), [DivideRows(rows)] if rows else []):
        run_passes(graph, phase, PassContext())
    adapted = adapted_graph(graph, read_adapter_slots(adapters), open_source(model)) if adapters else None
    run_passes(graph, pipelines.fuse(), PassContext())
    backend = TritonBackend(target, graph.info.weight_dtype)
    kept = {"kv_dtypes": kv_dtypes or {}, "max_seq_len": limits.max_seq_len}
    lowering = LowerOptions(kv or backend.kv_dtype, backend.profile, block_size, **kept)
    lowered = lower(graph, lowering, adapted=adapted)
    verify_lowered(lowered.program, backend.refusal)
    planned = plan_program(lowered.program, limits, Tuner(target), (), deterministic, step_kernel)
    program = msgspec.structs.replace(
        lowered.program,
        plan=make_plan(planned, target, {}),
        speculation=_with_trees(lowered.program, limits) or _with_block(layer),
    )
    verify_plan(program)
    packed = {name: backend.pack(source) for name, source in lowered.sources.items()}
    own = [{n: replace(s, handle=of_rank(s.handle, r)) for n, s in lowered.sources.items()} for r in range(graph.ranks)]
    others = [{name: backend.pack(source) for name, source in sources.items()} for sources in own[1:]]
    options = CompileOptions(
        model, model, target=target.name, max_batch_size=limits.max_batch_size, max_step_tokens=limits.max_step_tokens
    )
    built = Built(program, gpu=GpuFacts(target.arch, 12000))
    embedding = None if pooling is None else EmbeddingFacts(pooling, True, program.vocab_size)  # type: ignore[arg-type]
    manifest = make_manifest(graph, lowered, QuantFacts(quant, 0.0, []), options, target, built, None, embedding)
    return GpuEngine(graph, program, planned.specs(), packed, limits, manifest, others)


def _with_block(layer: DraftLayer | None) -> Speculation | None:
    """The speculation facts of a draft layer that guesses blocks; None for other layers."""
    return Speculation("", block=layer.block, mask_token=layer.mask_token) if layer and layer.block else None


def _with_trees(program: Program, limits: Limits) -> Speculation | None:
    found = next((section for section in program.sections if section.name == "medusa"), None)
    if found is None:
        return None
    heads, ranks = found.outputs["drafts"].shape
    rates = [[0.5 / (rank + 1) for rank in range(ranks)]] * heads
    trees = [tree_of(rates, batch, lambda *_: 1.0, 5) for batch in range(1, limits.max_batch_size + 1)]
    return Speculation("medusa", heads, ranks, rates, trees)
