"""The whole compile on one screen: checkpoint -> graph -> passes -> program -> kernels -> engine."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

from ..runtime.format.open_container import open_container
from .engine.atomic import engine_output
from .engine.earlier import EarlierEngine
from .options import CompileOptions
from .progress import Reporter
from .refit import as_delta
from .report import CompileReport
from .request import check
from .tracing import trace


def compile_engine(
    options: CompileOptions,
    reporter: Reporter,
    earlier: EarlierEngine | None = None,
    kept: EarlierEngine | None = None,
) -> CompileReport:
    """Run every stage and report each to `reporter`. Returns the report behind report.json and the summary.

    earlier: take program and kernels from this engine, which was compiled with these options; None: make them, or take
    them from the engine that the option `like` names. kept: take compiled prompts and forms of answers from this
    engine; None: from `earlier`. MismatchError if they do not fit.
    """
    if options.like is not None:
        earlier, options = as_delta(options)
        with closing(earlier):
            return compile_engine(options, reporter, earlier)
    request = check(options, earlier is not None and earlier.engine.manifest.tokenizer_dir is not None)
    for warning in request.warnings:
        reporter.warn(warning)
    heads = request.choice.read_heads() if request.choice else ()
    job = trace(request, reporter, earlier, kept or earlier)
    with reporter.stage("optimize"):
        job.optimize()
    original = job.graph.copy()
    job.quantize()
    job.choose_caches()
    with reporter.stage("answers"):
        quantized, canaries = job.graph.copy(), job.answers()
    job.speculate(heads)
    with reporter.stage("lower"):
        lowered = job.lower()
        prompts = job.prompts_for(lowered)
    output = request.options.output
    with engine_output(output) as stage:
        with reporter.stage("kernels"):
            built = job.build(lowered, stage)
        with reporter.stage("weights"):
            job.write_weights(lowered, built, stage)
        built, tuned = job.tune(built, stage)
        with reporter.stage("engine"):
            report, manifest = job.write(lowered, built, tuned, canaries, stage)
        manifest = job.write_prompts(manifest, prompts, stage)
        job.gate(original, quantized, manifest, stage)
        job.check_answers(stage)
    job.calibrations.done()
    return replace(report, engine_bytes=sum(open_container(output).sizes().values()))
