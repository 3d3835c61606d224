"""The output of a compile: stages with progress and time left, and a summary at the end."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.table import Table

from ..runtime.progress.stream import open_display
from .options import CompileOptions
from .progress import Reporter
from .report import CompileReport
from .targets import Target, find_target


class ConsoleReporter(Reporter):
    """Progress on stderr; finished stages stay as lines."""

    def __init__(self) -> None:
        super().__init__()
        self._display = open_display()

    def __enter__(self) -> ConsoleReporter:
        self._display.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._display.close()

    def enter(self, name: str) -> None:
        self._display.enter(name)

    def leave(self, name: str, seconds: float) -> None:
        self._display.leave(name)
        self._display.say(f"{name:<9} {seconds:6.1f} s")

    def progress(self, text: str, done: int, total: int) -> None:
        self._display.update(text, done, total)

    def warn(self, text: str) -> None:
        self._display.say(f"warning: {text}")


def show_reports(done: Sequence[tuple[CompileOptions, CompileReport]], reporter: Reporter, as_json: bool) -> None:
    """Print what was compiled, as one JSON value or as text; several targets one after the other."""
    if as_json and len(done) > 1:
        print(json.dumps({"targets": {options.target: json.loads(report.to_json()) for options, report in done}}))
    for options, report in done:
        if not as_json:
            show_summary(options, report, reporter)
        elif len(done) == 1:
            print(report.to_json().decode(), end="")


def show_summary(options: CompileOptions, report: CompileReport, reporter: Reporter) -> None:
    """Print the summary of `icc compile`: time per stage, bytes, bits per weight, fusions, and weights left
    unquantized."""
    console = Console(highlight=False)
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_row("engine", f"{options.output}  ({_mib(report.engine_bytes)})")
    times = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in reporter.seconds.items())
    table.add_row("time", f"{sum(reporter.seconds.values()):.1f} s: {times}")
    weights = f"{_mib(report.weight_bytes)}, {report.bits_per_weight:.2f} bits per weight ({report.quant})"
    table.add_row("weights", f"{report.num_parameters / 1e6:.1f} M parameters, {weights}")
    for found, of in ((report.allocation, "weights"), (report.caches, "KV per sequence of full length")):
        if found:
            counts = Counter(choice["format"] for choice in found["choices"])
            chosen = ", ".join(f"{name} {count}" for name, count in sorted(counts.items()))
            table.add_row("chosen", f"{chosen}; {found['bytes'] / 1e6:.2f} MB of {of}, report.json says why")
    if report.given:
        table.add_row("as given", given_formats(report.given, find_target(options.target)))
    table.add_row(
        "memory", f"{report.arena_bytes_per_token} B arena and {report.kv_bytes_per_token:.0f} B KV per token"
    )
    if (policy := options.eviction) is not None:
        table.add_row("cache", f"lossy: {policy}, at most {policy.tokens} tokens of a sequence")
    table.add_row("program", f"{report.steps} steps, {report.kernels} kernels for {report.target}")
    fusions = ", ".join(f"{name} {count}" for name, count in report.fused.items() if count)
    table.add_row("rewrites", fusions or "none")
    for tree in (report.speculation or {}).get("trees", []):
        guesses = (
            f"{len(tree['parents'])} guesses, {tree['expected_tokens']:.2f} tokens per step, {tree['speedup']:.2f}x"
        )
        table.add_row(f"batch {tree['batch']}", guesses if tree["parents"] else "none pay (see --spec-guesses)")
    if report.refused:
        table.add_row("refused", "\n".join(f"tiling {line}" for line in report.refused))
    if report.launched:
        table.add_row("launched", "\n".join(report.launched))
    if report.quant != "none":
        table.add_row("kept", "\n".join(report.kept) or "nothing: every linear is quantized")
    console.print(table)


def given_formats(given: Mapping[str, int], target: Target) -> str:
    """The formats in which a checkpoint's weights are kept, and those stored in more bits than in the checkpoint."""
    from .weights.formats.float8 import Float8
    from .weights.formats.ggml import file_bits
    from .weights.formats.registry import find_format

    found: list[str] = []
    for name, count in given.items():
        form = find_format(name)
        own, kept = file_bits(name), form.bits_per_weight((1, 256))
        more = (
            f" (re-encoded without loss: {kept:.2f} bits per weight instead of {own:.2f})" if kept > 1.05 * own else ""
        )
        rounded = isinstance(form, Float8) and target.float8 and not form.alone
        floats = (
            f" (activations are {'rounded, too' if rounded else 'not rounded'})" if isinstance(form, Float8) else ""
        )
        found.append(f"{name} {count}{more}{floats}")
    return ", ".join(found)


def show_explanation(report: CompileReport, name: str) -> None:
    """Print where and why `name`, a pass or a rule, did not fire."""
    console, said = Console(highlight=False), False
    for entry in report.passes:
        for refusal in entry["refusals"]:
            if name in (entry["name"], refusal["rule"]):
                said = True
                console.print(f"{refusal['rule']} at {refusal['node']}: {refusal['reason']}")
        if entry["name"] == name:
            said = True
            console.print(f"{name}: {entry['counts'] or 'nothing to do'}")
    if not said:
        console.print(f"{name}: refused nothing, or no part of this compile")


def show_accuracy(output: Path, use: str, accuracy: Sequence[Sequence[float]]) -> None:
    """Print the summary of `icc train-heads`: on held-out text, how often the right token is among each head's best.
    use: how to use what was trained."""
    table = Table("head", *(f"top-{rank + 1}" for rank in range(len(accuracy[0]))), box=None, pad_edge=False)
    for number, ranks in enumerate(accuracy):
        table.add_row(str(number), *(f"{rate:.3f}" for rate in ranks))
    Console(highlight=False).print(table)
    print(f"{output}: {use}")


def show_checkpoint(model: Path) -> None:
    """Print, for `icc inspect MODEL`, the canonical graph that quantization works on."""
    from ..passes import pipelines
    from ..passes.base import PassContext
    from ..passes.manager import run_passes
    from .frontend.load import load_graph
    from .graph.printer import print_graph

    graph = load_graph(model)
    run_passes(graph, pipelines.canonicalize(), PassContext())
    info = graph.info
    print(f"{info.architecture}: {info.num_parameters / 1e6:.1f} M parameters, {info.num_layers} layers, {info.dtype}")
    print(print_graph(graph), end="")


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"
