"""`icc cache`: the engines that were compiled because a model was run or served."""

from __future__ import annotations

import json
import re
from dataclasses import asdict

import click
from rich.console import Console
from rich.table import Table

from ...runtime.cli.group import command
from ...runtime.format.footprint import size_text
from .. import calibrations
from ..cache import store
from ..cache.store import CacheEntry
from ..errors import UsageError
from ..identity import sources_digest

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


@command("cache list")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON value.")
def list_command(as_json: bool) -> None:
    """List the engines in the cache: models, options, sizes, and when each was last used."""
    found = store.entries()
    if as_json:
        rows = [
            {
                "key": entry.key,
                "path": str(entry.path),
                "bytes": entry.nbytes,
                "unused_s": round(entry.age),
                "stale": _stale(entry),
                **({} if entry.facts is None else asdict(entry.facts)),
            }
            for entry in found
        ]
        click.echo(json.dumps(rows))
        return
    table = Table("key", "model", "options", "size", "unused for", "", box=None, pad_edge=False)
    for entry in found:
        facts = entry.facts
        options = "" if facts is None else " ".join(f"{name}={value}" for name, value in facts.options.items())
        model = "(a compile that did not end)" if facts is None else facts.model
        table.add_row(
            entry.key[:12],
            model,
            options,
            size_text(entry.nbytes),
            _age(entry.age),
            "of another icc" if _stale(entry) else "",
        )
    if found:
        Console(highlight=False).print(table)
    total = size_text(sum(entry.nbytes for entry in found))
    click.echo(f"{len(found)} engine{'' if len(found) == 1 else 's'}, {total} in {store.cache_root()}")


@command("cache prune")
@click.option("--older-than", metavar="AGE", help="Remove engines that were not used for this long: 12h, 30d, 8w.")
@click.option("--all", "everything", is_flag=True, help="All of them.")
@click.option("--dry-run", is_flag=True, help="Say what would be removed.")
def prune_command(older_than: str | None, everything: bool, dry_run: bool) -> None:
    """Remove engines from the cache: without options those of another icc version and incomplete ones; with --all every
    engine, and the results of interrupted calibrations."""
    least = None if older_than is None else _seconds(older_than)
    found = [
        entry for entry in store.entries() if everything or _stale(entry) or (least is not None and entry.age >= least)
    ]
    removed = [(entry, True) for entry in found] if dry_run else list(store.remove(found))
    for entry, gone in removed:
        what = entry.facts.model if entry.facts else "a compile that did not end"
        verb = ("would remove" if dry_run else "removed") if gone else "in use, kept:"
        click.echo(f"{verb} {entry.key[:12]} {what} ({size_text(entry.nbytes)}, unused for {_age(entry.age)})")
    if everything and not dry_run and (count := calibrations.prune()):
        click.echo(f"removed what {count} interrupted calibration{'' if count == 1 else 's'} had found")
    total = sum(entry.nbytes for entry, gone in removed if gone)
    click.echo(f"{'would free' if dry_run else 'freed'} {size_text(total)}")


def _stale(entry: CacheEntry) -> bool:
    """Whether no compile can use it any more: another icc version compiled it, or it is incomplete."""
    return entry.facts is None or entry.facts.icc != sources_digest()


def _seconds(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", text.strip())
    if found is None:
        raise UsageError(f"--older-than {text!r} is not an age like 12h, 30d or 8w")
    return float(found[1]) * _UNITS[found[2]]


def _age(seconds: float) -> str:
    for unit, size in reversed(_UNITS.items()):
        if seconds >= size and unit != "w":
            return f"{seconds / size:.0f} {unit}"
    return "0 s"
