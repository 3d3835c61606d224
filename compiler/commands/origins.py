"""`icc sbom` and `icc provenance`."""

from __future__ import annotations

from pathlib import Path

import click

from ...runtime.cli.fields import PATH
from ...runtime.cli.group import command
from ...runtime.format.present import PROVENANCE_FILE, SBOM_FILE, check_present
from ..interrupt import ends_at_once

_MODEL = "The checkpoint that ENGINE was compiled from."


@command("sbom")
@click.argument("engine", type=PATH)
@click.option("--model", type=PATH, required=True, help=_MODEL)
def sbom_command(engine: Path, model: Path) -> None:
    """Put a bill of materials (CycloneDX) beside ENGINE's manifest: compiler, checkpoint, licence, bundled packages."""
    check_present(engine)
    from ..origins import write_sbom

    with ends_at_once():
        write_sbom(engine, model)
    click.echo(f"wrote {SBOM_FILE} into {engine}")


@command("provenance")
@click.argument("engine", type=PATH)
@click.option("--model", type=PATH, required=True, help=_MODEL)
def provenance_command(engine: Path, model: Path) -> None:
    """Put a statement beside ENGINE's manifest (in-toto, SLSA): the digests of MODEL's files, and the options.

    The statement proves nothing by itself; icc verify ENGINE --rebuild MODEL checks it.
    """
    check_present(engine)
    from ..origins import write_provenance

    with ends_at_once():
        write_provenance(engine, model)
    click.echo(f"wrote {PROVENANCE_FILE} into {engine}")
