"""`icc export`: the graph after some passes, as an ONNX file."""

from __future__ import annotations

import warnings
from pathlib import Path

import click

from ...runtime.cli.fields import PATH
from ...runtime.cli.group import command
from ..choices import TASKS
from ..interrupt import ends_at_once


@command("export")
@click.argument("source", metavar="MODEL|GRAPH.txt", type=PATH)
@click.option("--onnx", "output", metavar="FILE", type=PATH, required=True, help="The ONNX file to write.")
@click.option("-p", "--passes", metavar="PASS[,PASS...]", help="Passes as in quantize-rtn{group=32}, or phases.")
@click.option(
    "--max-seq-len",
    type=int,
    show_default="the model's, at most 4096",
    help="Length of a checkpoint's position tables, in tokens.",
)
@click.option("--task", type=click.Choice(list(TASKS)), default="generate", show_default=True, help="As of compile.")
@click.option("--external-data", is_flag=True, help="Write weights to FILE.data; always done if they exceed 256 MiB.")
@click.option("--force", is_flag=True, help="Replace FILE.")
def export_command(
    source: Path,
    output: Path,
    passes: str | None,
    max_seq_len: int | None,
    task: str,
    external_data: bool,
    force: bool,
) -> None:
    """Write the graph of a model, or of a text file of `icc opt`, as ONNX: as it is traced, or after PASSES.

    The ops are standard ones of opset 23, and MatMulNBits of com.microsoft where a weight has 4 or 8 bits: any runtime
    that has these runs the file, and Netron shows it. It takes input_ids and position_ids [batch, sequence] and gives
    logits [batch, sequence, vocabulary], without a KV cache; with --task embed last_hidden_state [batch, sequence,
    width], with --task rerank logits [batch, labels].
    """
    from ...passes.registry import check_names, parse_passes
    from ..request import check_export

    check_names(passes or "")  # before torch is imported
    source = check_export(source, output, force)
    with ends_at_once():
        from .. import opt
        from ..onnx.export import export_graph
        from ..onnx.write import write_model

        warnings.filterwarnings("ignore", category=FutureWarning)  # torch warns about its own internals
        graph, own = opt.read_graph(source, max_seq_len, task)
        chosen = parse_passes(own if passes is None else passes)
        opt.optimize(graph, chosen)
        for name in opt.uncalibrated(chosen):
            click.echo(f"warning: {name} was calibrated with random tokens", err=True)
        exported = export_graph(graph)
        written = write_model(exported, output, external_data)
    for name, count in exported.decoded.items():
        click.echo(f"warning: {count} weights of format {name} are stored as the values that they stand for", err=True)
    files = ", ".join(f"{path} ({size / 2**20:.1f} MiB)" for path, size in written.files.items())
    click.echo(f"{files}: {written.nodes} nodes, {', '.join(i.name for i in exported.graph.input)} -> "
               f"{', '.join(o.name for o in exported.graph.output)}")  # fmt: skip
