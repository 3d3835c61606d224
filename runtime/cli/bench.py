"""`icc bench`."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from ..commands.options import BatchingOptions, BenchOptions
from ..errors import UsageError
from ..options import LoadOptions
from ..progress.stream import open_display
from ..values import integers
from .fields import PATH, Read, field_options, taken
from .group import EngineOption, command
from .load import loads_but, thread_warnings, warn


@command("bench")
@field_options(BenchOptions)
@field_options(BatchingOptions)
@click.option(
    "--prompts",
    type=PATH,
    cls=EngineOption,
    needs="generate",
    metavar="FILE",
    help="A JSON list of texts: compare the drafters of --spec A,B on them.",
)
@click.option(
    "--always",
    is_flag=True,
    cls=EngineOption,
    needs="generate",
    help="With --prompts: always draft, even where it slows decoding.",
)
@click.option(
    "--threads",
    type=Read(integers),
    cls=EngineOption,
    needs="cpu",
    metavar="N,N",
    show_default="physical cores",
    help="Kernel threads; several are measured one after the other.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON value.")
@loads_but("threads")
def bench_command(
    load: LoadOptions,
    prompts: Path | None,
    always: bool,
    threads: Sequence[int] | None,
    as_json: bool,
    **parameters: Any,
) -> None:
    """Measure an engine's latency and throughput."""
    options = BenchOptions(**taken(BenchOptions, parameters))
    batching = BatchingOptions(**taken(BatchingOptions, parameters))
    if batching.batching and prompts is not None:
        raise UsageError("--batching and --prompts cannot be combined", "give one of them")
    loads = [replace(load, threads=count) for count in threads or (None,)]
    if len(loads) == 1:
        warn(thread_warnings(load := loads[0]))
    elif batching.batching or prompts is not None:
        raise UsageError("--batching and --prompts take a single number of threads", "give one --threads")
    if batching.batching:
        return _compare_batching(load, options, batching, as_json)
    if batching != BatchingOptions():
        raise UsageError(
            "--requests, --rate, --window and --html are of --batching", "give --batching static,continuous"
        )
    if prompts is not None:
        return _compare_drafters(load, options, prompts, always, as_json)
    from ..commands import bench
    from ..loading import open_llm

    results = []
    for each in loads:
        with open_llm(each) as llm, open_display() as display, display.stage("bench") as progress:
            results += bench.run_bench(llm, options, progress, each.threads)
    click.echo(json.dumps(bench.as_json(results)) if as_json else bench.as_table(results))


def _compare_drafters(load: LoadOptions, options: BenchOptions, prompts: Path, always: bool, as_json: bool) -> None:
    from ..commands import bench_spec
    from ..loading import open_llm

    drafters = re.split(r",(?!\d)", load.spec or "ngram")  # numbers are options of a drafter
    with open_llm(replace(load, spec="none")) as llm:
        texts = bench_spec.read_prompts(llm, prompts)
        asked = bench_spec.SpecBenchOptions(
            drafters, texts, options.output_tokens, options.batch_sizes or (1,), rounds=options.rounds, always=always
        )
        with open_display() as display, display.stage("bench") as progress:
            results = bench_spec.run_spec_bench(llm, asked, progress)
    click.echo(json.dumps(bench_spec.as_json(results)) if as_json else bench_spec.as_table(results))


def _compare_batching(load: LoadOptions, options: BenchOptions, batching: BatchingOptions, as_json: bool) -> None:
    from ..commands import batching as command
    from ..loading import open_llm

    html = batching.html
    if html is not None and not html.parent.is_dir():  # rather than after the measurement
        raise UsageError(f"--html {html}: {html.parent} is not a directory", "create it first")
    with open_llm(load) as llm:
        with open_display() as display, display.stage("bench") as progress:
            results = command.run_batching(llm, options, batching, progress)
        page = command.as_html(llm, options, batching, results)
    if html is not None:
        try:
            html.write_text(page)
        except OSError as error:
            raise UsageError(f"--html {html} cannot be written: {error.strerror}", "give another file") from error
    click.echo(json.dumps(command.as_json(results)) if as_json else command.as_table(results))
