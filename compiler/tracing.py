"""Starts a compile: traces the model and collects the facts that its engine depends on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from . import measure
from .backends.registry import backend_for
from .caches import lower_options
from .calibration import read_tokenizer
from .compilation import Compilation
from .engine.earlier import EarlierEngine
from .engine.manifest import make_limits, read_bos
from .errors import UsageError
from .frontend.ending import ending_of
from .frontend.load import load_graph
from .frontend.source.pooling import read_pooling
from .frontend.source.scoring import read_scoring
from .frontend.source.source import open_source
from .frontend.source.unplaced import in_words
from .gates import GatePlan, gate_sequences, parse_gates
from .graph.graph import Graph
from .merging import merge_from
from .options import CompileOptions
from .progress import Reporter
from .request import CompileRequest, tokenizer_file
from .speculate.draft_layer import load_draft_layer


def trace(
    request: CompileRequest,
    reporter: Reporter,
    earlier: EarlierEngine | None = None,
    kept: EarlierEngine | None = None,
) -> Compilation:
    """Trace the model, and collect the facts that its engine depends on.

    earlier: an engine whose program the model must fit, else MismatchError; kept: an engine whose prompts the new one
    keeps; None for none. UsageError if the model lacks a tokenizer that --prefix, --schema or --grammar needs.
    """
    if request.options.gate:
        measure.check_device(request.target)
    with reporter.stage("trace"):
        source = open_source(request.options.model, request.options.task)
        options = replace(request.options, model=source.files)
        if (tokenizer := tokenizer_file(source.files)) is not None:
            read_tokenizer(tokenizer)  # raise now, not after minutes
        if source.told:
            reporter.warn(source.told)
        pooling = read_pooling(options.model, options.pooling) if options.task == "embed" else None
        meant = read_scoring(options.model).max_tokens if options.task == "rerank" else pooling and pooling.max_tokens
        graph = load_graph(
            source,
            options.max_seq_len,
            meant=meant or 0,
            task=options.task,
            ending=pooling and ending_of(pooling),
            policy=options.eviction,
        )
        if source.unread:
            reporter.warn(in_words(list(source.unread)))
        draft_layer = load_draft_layer(request.choice, source, graph)
        texts = options.model if options.lora is None else merge_from(options.lora, graph, source, request, reporter)
        if source.told and (named := (*request.prompts, *request.forms)):
            raise UsageError(f"{named[0].option} needs a tokenizer, and {source.told}", "leave it out")
        prompts = measure.read_prompts(request.prompts, texts) if request.prompts else ()
        forms = measure.lower_forms(request.forms) if request.forms else ()
        if request.forms and tokenizer is not None:
            measure.check_readable(request.forms[0], tokenizer, graph.info.vocab_size)
    if earlier is not None:
        earlier.check_model(graph.info)
    kernels = options.deterministic, options.isa, options.os, options.step_kernel
    backend = backend_for(request.target, graph.info.weight_dtype, *kernels)
    limits = make_limits(graph, options)
    lowering = lower_options(graph, options, backend, limits)
    gates = _gates(options, graph, texts)
    stages = request, source, options, texts, graph, backend, limits, lowering, pooling, gates, reporter
    return Compilation(*stages, draft_layer=draft_layer, earlier=earlier, kept=kept, prompts=prompts, forms=forms)


def _gates(options: CompileOptions, graph: Graph, texts: Path) -> GatePlan | None:
    """What --gate asks for, with its text tokenized; None without --gate."""
    if not options.gate:
        return None
    bos = read_bos(options.model)
    length = graph.max_seq_len
    sequences = gate_sequences(options.gate_text, tokenizer_file(texts), graph.info.vocab_size, bos, length)
    return GatePlan(parse_gates(options.gate), sequences, str(options.gate_text or "bundled"))
