"""`icc opt`: the graph after some passes."""

from __future__ import annotations

from pathlib import Path

import click

from ...runtime.cli.group import command
from ..choices import TASKS

SOURCE = click.Path(exists=True, path_type=Path)


@command("opt")
@click.argument("source", metavar="MODEL|GRAPH.txt", type=SOURCE)
@click.option("-p", "--passes", metavar="PASS[,PASS...]", help="Passes as in quantize-rtn{group=32}, or phases.")
@click.option(
    "--target",
    default="native",
    show_default=True,
    help="Target whose steps are printed, if -p ends in rewrites of steps.",
)
@click.option(
    "--strict",
    is_flag=True,
    help="Refuse a pass whose requirements are not met, instead of running the passes that meet them.",
)
@click.option("--verify", is_flag=True, help="Also check that a second run of each pass changes nothing.")
@click.option("--run", is_flag=True, help="Compare the logits before and after, within the passes' tolerance.")
@click.option("--explain", metavar="PASS", help="Print where and why a pass or rule refused, instead of the graph.")
@click.option("--modules", is_flag=True, help="Show the module that each node comes from.")
@click.option(
    "--max-seq-len",
    type=int,
    show_default="the model's, at most 4096",
    help="Length of a checkpoint's position tables, in tokens.",
)
@click.option("--task", type=click.Choice(list(TASKS)), default="generate", show_default=True, help="As of compile.")
def opt_command(
    source: Path,
    passes: str | None,
    target: str,
    strict: bool,
    verify: bool,
    run: bool,
    explain: str | None,
    modules: bool,
    max_seq_len: int | None,
    task: str,
) -> None:
    """Print the graph of a checkpoint or of a text file after PASSES.

    The passes that a pass requires are run first. PASSES may end in "lower" and rewrites of steps (fuse-epilogues,
    join-adapters, add-changes, join-norms, code-rows); the steps of --target's program are then printed.

    A text file that names its passes, as the golden tests do, needs no -p; the graph before, the passes and the graph
    after are printed.
    """
    from ...passes.registry import check_explainable, check_names, parse_passes
    from ..opt_names import split

    passes, rewrites = split(passes) if passes is not None else (None, ())
    check_names(passes or "")  # before torch is imported
    if explain:
        check_explainable(explain)
    from .. import opt

    graph, own = opt.read_graph(source, max_seq_len, task)
    whole = passes is None and bool(own)
    chosen = parse_passes(own if passes is None else passes)
    found = opt.optimize(graph, chosen, check=verify, compare=run, strict=strict)
    if found.added:
        click.echo(f"ran first, as they are required: {', '.join(found.added)}", err=True)
    if explain:
        click.echo(opt.explain(found.reports, explain))
    elif whole:
        click.echo(str(opt.GraphFile.parse(source.read_text()).after_passes(found)), nl=False)
    elif rewrites:
        from ..opt_steps import lowered_text

        text, notes = lowered_text(found.graph, source, target, rewrites, check=verify)
        click.echo(text, nl=False)
        click.echo(notes, err=True, nl=bool(notes))
    else:
        click.echo(opt.print_graph(found.graph, modules), nl=False)
    if found.difference is not None:
        bound = "no bound: a pass changes numbers on purpose" if found.bound is None else f"allowed {found.bound:.1e}"
        click.echo(f"logits differ by {found.difference:.1e} ({bound})", err=True)
