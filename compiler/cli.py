"""The `icc` command: a skin over compile_engine and over the runtime's own commands."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from .. import __version__
from ..runtime.errors import IccError
from .commands.cache import cache_command
from .commands.opt import opt_command
from .commands.plan import plan_command
from .options import KV_DTYPES, POOLINGS, TASKS
from .quantization import HEAD_FORMATS, QUANTIZATIONS

PATH = click.Path(path_type=Path)
COMPILE_MODULES = ("torch", "transformers", "safetensors", "jinja2")  # what the extra `compile` installs
MISSING_MODULE = 3
RUNTIME_SETTINGS: dict[str, Any] = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}


class _Group(click.Group):
    """Turns an IccError into one line, a hint and its exit code; --debug shows the traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ModuleNotFoundError as error:
            if ctx.params.get("debug") or error.name not in COMPILE_MODULES:
                raise
            click.echo(f"error: this needs {error.name}, which is not installed", err=True)
            click.echo("hint: pip install 'icc[compile]'; an engine that exists runs without it", err=True)
            ctx.exit(MISSING_MODULE)
        except IccError as error:
            if ctx.params.get("debug"):
                raise
            click.echo(f"error: {error.message}", err=True)
            if error.hint:
                click.echo(f"hint: {error.hint}", err=True)
            ctx.exit(error.exit_code)


@click.group(cls=_Group)
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.version_option(__version__, prog_name="icc")
def main(debug: bool) -> None:
    """icc compiles language models ahead of time and runs the engines."""


@main.command("compile")
@click.argument("model", type=PATH)
@click.option("-o", "--output", type=PATH, help="Engine directory to write (default: MODEL.engine).")
@click.option("--target", default="cpu", show_default=True, help="What to compile for.")
@click.option("--task", type=click.Choice(TASKS), default="generate", show_default=True, help="Text, or embeddings.")
@click.option("--pooling", type=click.Choice(POOLINGS), help="With --task embed (default: the checkpoint's, or last).")
@click.option("--quant", type=click.Choice(list(QUANTIZATIONS)), default="none", show_default=True)
@click.option(
    "--quant-head", type=click.Choice(list(HEAD_FORMATS)), default="int8", show_default=True, help="The LM head."
)
@click.option("--keep", multiple=True, metavar="PATTERN", help="Leave matching linears unquantized (repeatable).")
@click.option("--calib", type=PATH, help="UTF-8 text to calibrate on (default: a bundled one).")
@click.option("--calib-sequences", default=32, show_default=True)
@click.option("--calib-length", default=512, show_default=True, help="Tokens per calibration sequence.")
@click.option("--kv-cache", type=click.Choice(tuple(KV_DTYPES)), default="auto", show_default=True)
@click.option("--max-seq-len", type=int, help="Longest sequence, prompt included (default: the model's, at most 4096).")
@click.option("--max-batch-size", default=16, show_default=True)
@click.option("--max-step-tokens", default=512, show_default=True, help="Tokens of one step, prompts and decodes.")
@click.option("--spec", default="none", show_default=True, help="Drafter: medusa:DIR, layer-skip:LAYERS or ngram.")
@click.option("--spec-guesses", type=int, help="Guesses of draft heads per step, paying or not (default: what pays).")
@click.option("--deterministic", is_flag=True, help="GPUs: same bits whatever else is in a batch (CPUs: always so).")
@click.option("--tune", is_flag=True, help="Choose CPU kernels by time, here (--target native; takes a minute or two).")
@click.option("--seed", default=0, show_default=True)
@click.option("--dump-passes", type=PATH, help="Write the graph after each pass into this directory.")
@click.option("--explain", metavar="PASS", help="Print where and why a pass or rule refused.")
@click.option("--force", is_flag=True, help="Replace an engine that exists.")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON instead of the summary.")
def compile_command(model: Path, output: Path | None, explain: str | None, as_json: bool, **options: Any) -> None:
    """Compile the checkpoint MODEL, a directory or a model of the Hugging Face hub, to an engine directory."""
    from ..passes.registry import check_explainable
    from .options import CompileOptions, default_output
    from .request import check

    if explain:
        check_explainable(explain)
    # what torch is not needed for, before it is imported
    chosen = check(CompileOptions(model=model, output=output or default_output(model), **options)).options
    from .console import ConsoleReporter, show_explanation, show_summary
    from .driver import compile_engine

    warnings.filterwarnings("ignore", category=FutureWarning)  # torch's own, about its internals
    with ConsoleReporter() as reporter:
        report = compile_engine(chosen, reporter)
    if as_json:
        click.echo(report.to_json().decode(), nl=False)
    else:
        show_summary(chosen, report, reporter)
    if explain:
        show_explanation(report, explain)


main.add_command(opt_command)
main.add_command(plan_command)
main.add_command(cache_command)


@main.command("tune")
@click.argument("engine", type=PATH)
@click.option("-o", "--output", type=PATH, help="Tuning file to write (default: ENGINE's target, with .json).")
def tune_command(engine: Path, output: Path | None) -> None:
    """Measure kernel tilings on this machine's GPU; later compiles read the file that ICC_TUNING names."""
    from .console import ConsoleReporter
    from .measure import tune_engine

    with ConsoleReporter() as reporter, reporter.stage("tune"):
        file, found = tune_engine(engine, output, reporter.progress)
    click.echo(f"{file}: {len(found.tilings)} tilings measured on {found.device}; use it with ICC_TUNING={file}")


@main.command("train-heads")
@click.argument("model", type=PATH)
@click.option("--text", type=PATH, required=True, help="UTF-8 text to train on.")
@click.option("-o", "--output", type=PATH, required=True, help="Directory to write the heads to.")
@click.option("--heads", default=4, show_default=True, help="Tokens guessed beyond the next one.")
@click.option("--layers", default=1, show_default=True, help="Residual blocks of each head.")
@click.option("--own-lm-head", is_flag=True, help="An LM head per head; otherwise all share the model's.")
@click.option("--generate", is_flag=True, help="Train on what the model writes itself after the text's beginnings.")
@click.option("--temperature", default=0.0, show_default=True, help="Of that writing; 0 is greedy.")
@click.option("--sequences", default=4096, show_default=True, help="Windows of the text, at most.")
@click.option("--length", default=256, show_default=True, help="Tokens of a window.")
@click.option("--epochs", default=1, show_default=True)
@click.option("--batch", default=8, show_default=True, help="Windows per step.")
@click.option("--rate", default=2e-3, show_default=True, help="Peak learning rate.")
@click.option("--seed", default=0, show_default=True)
@click.option("--device", default="cpu", show_default=True, help="Where torch runs: cpu or cuda.")
def train_heads_command(**options: Any) -> None:
    """Train Medusa heads for the checkpoint directory MODEL; the same command goes on where it was cut off."""
    from .console import ConsoleReporter, show_accuracy
    from .speculate.train import TrainHeadsOptions, train_heads

    with ConsoleReporter() as reporter:
        accuracy = train_heads(TrainHeadsOptions(**options), reporter)
    show_accuracy(options["output"], accuracy)


def _runtime_command(name: str, text: str) -> Callable[..., None]:
    @main.command(name, context_settings=RUNTIME_SETTINGS, help=text)
    @click.pass_context
    def command(ctx: click.Context) -> None:
        from ..runtime.commands.cli import main as runtime_main

        ctx.exit(runtime_main([name, *ctx.args], prog="icc"))

    return command


_runtime_command("run", "Complete a prompt with an engine, streamed.")
_runtime_command("serve", "Serve the OpenAI API over HTTP.")
_runtime_command("batch", "Answer a file of requests with an engine, without a server.")
_runtime_command("bench", "Measure an engine's latency and throughput, or (bench serve) those of any OpenAI server.")


@main.command("eval", context_settings=RUNTIME_SETTINGS)
@click.pass_context
@click.argument("engine", type=PATH)
@click.option("--baseline", type=PATH, help="Also evaluate this unquantized checkpoint and compare.")
@click.option("--text", type=PATH, required=True)
def eval_command(ctx: click.Context, engine: Path, baseline: Path | None, text: Path) -> None:
    """Perplexity of an engine on a text."""
    from ..runtime.commands.cli import main as runtime_main

    code = runtime_main(["eval", str(engine), "--text", str(text), *ctx.args], prog="icc")
    if code or baseline is None:
        ctx.exit(code)
    from .measure import perplexity

    result = perplexity(baseline, engine, text)
    click.echo(
        f"baseline {baseline}: nll per token {result.nll_per_token:.5f} nats, perplexity {result.perplexity:.4f}, "
        f"bits per byte {result.bits_per_byte:.5f}"
    )


@main.command("inspect", context_settings=RUNTIME_SETTINGS)
@click.pass_context
@click.argument("path", type=PATH)
def inspect_command(ctx: click.Context, path: Path) -> None:
    """Show what is inside an engine, or the graph of a checkpoint."""
    if (path / "config.json").is_file() and not (path / "engine.json").is_file():
        from .console import show_checkpoint

        show_checkpoint(path)
        return
    from ..runtime.commands.cli import main as runtime_main

    ctx.exit(runtime_main(["inspect", str(path), *ctx.args], prog="icc"))


if __name__ == "__main__":
    sys.exit(main())
