"""Prints a plan for people: a table with one column per target."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence

from rich.console import Console
from rich.table import Table

from ...runtime.format.footprint import size_text
from .devices import DevicesPlan
from .plan import Plan, TargetPlan
from .speed import Rate

_WIDEST = 160  # characters of a table of devices with the longest names: with fewer, numbers would be cut off


def as_text(plan: Plan) -> str:
    """The options, and for each target bytes, what fits, limits of speed, and the effort of the compile."""
    first = plan.targets[0].planned
    info, limits = first.graph.info, first.limits
    text = io.StringIO()
    console = Console(file=text, width=max(120, 26 + 18 * len(plan.targets)), highlight=False)
    console.print(f"{info.architecture}: {info.num_parameters / 1e6:.1f} M parameters, {info.num_layers} layers")
    console.print(f"--quant {plan.options.quant}, sequences of {limits.max_seq_len} tokens\n")
    table = Table(box=None, pad_edge=False, show_edge=False)
    table.add_column("")
    for found in plan.targets:
        table.add_column(found.target.name, justify="right")

    def row(name: str, value: Callable[[TargetPlan], str]) -> None:
        table.add_row(name, *map(value, plan.targets))

    row("sequences at once", lambda t: str(t.planned.limits.max_batch_size))
    row("tokens of a step", lambda t: str(t.planned.limits.max_step_tokens))
    row("weights", lambda t: size_text(sum(w.nbytes for w in t.planned.program.stored.values())))
    row("KV cache, per token", lambda t: size_text(t.planned.program.kv.bytes_per_token()))
    row("KV cache, one sequence", lambda t: size_text(t.planned.memory.kv_sequence))
    row("KV cache, all sequences", lambda t: size_text(t.planned.memory.kv_batch))
    if any(found.planned.memory.adapters for found in plan.targets):
        row("adapters", lambda t: size_text(t.planned.memory.adapters))
    row("arena, scratch, logits", lambda t: size_text(_working(t)))
    row("in all", lambda t: size_text(t.planned.memory.fixed + t.planned.memory.kv_batch))
    row("memory", lambda t: size_text(t.memory) + ("" if t.target.memory_gib else " free here"))
    row("fits", lambda t: "yes" if t.fits else "no")
    row("sequences that fit", lambda t: str(t.sequences))
    row("longest that fits", lambda t: str(t.longest))
    for number in range(len(plan.targets[0].rates)):
        row(
            _name([t.rates[number] for t in plan.targets]),
            lambda t, n=number: f"{_number(t.rates[n].tokens_per_s)} tok/s",
        )
    row("at GB/s", lambda t: f"{t.target.bandwidth:.0f}")
    row("compile, about", lambda t: _time(t.effort.seconds))
    row("compile, memory", lambda t: size_text(t.effort.memory))
    console.print(table)
    for found in plan.targets:
        if found.devices is not None:
            _show_devices(console, found.devices)
    console.print("\nSpeeds are limits of memory and arithmetic that no engine exceeds; expect half to nine tenths.")
    if first.kept:
        console.print("left as stored: " + "; ".join(first.kept))
    return text.getvalue().rstrip("\n")


def _show_devices(console: Console, plan: DevicesPlan) -> None:
    """Print a line for each arrangement, and which to choose."""
    console.print(f"\n{plan.devices} x {plan.target.name}, {plan.sequences} sequences at once, in all:")
    console.width = max(console.width, _WIDEST)
    table = Table(box=None, pad_edge=False, show_edge=False)
    for name in ("", "weights each", "fit", "ms a token", "of it links", "read a token", "prefill, ms", "tok/s in all"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for found in plan.arranged:
        table.add_row(
            found.arrangement.name,
            size_text(found.weights),
            str(found.sequences),
            f"{1e3 * found.decode_seconds:.2f}",
            f"{1e3 * found.link_seconds:.2f}",
            size_text(found.link_bytes),
            f"{1e3 * found.prefill_seconds:.1f}",
            _number(found.tokens_per_s) if found.fits else "-",
        )
    console.print(table)
    if plan.best is None or plan.quickest is None:
        console.print("Nothing fits: use more devices, fewer sequences, or fewer bits.")
        return
    best, quickest = plan.best.arrangement.options, plan.quickest.arrangement.options
    console.print(f"Take {best}: most tokens per second of those that fit.")
    if quickest != best:
        console.print(f"For the least time per token: {quickest}.")


def _working(target: TargetPlan) -> int:
    """The bytes of the buffers of a step."""
    memory = target.planned.memory
    return memory.fixed - memory.weights - memory.adapters


def _name(rates: Sequence[Rate]) -> str:
    """The name of a row with one rate per target; the number of sequences may differ between targets."""
    rate, batches = rates[0], {rate.sequences for rate in rates}
    if rate.kind == "prefill":
        return f"prefill of {rate.length}, at most"
    return f"decode x{rate.sequences if len(batches) == 1 else ' all'} after {rate.length}, at most"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _time(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
