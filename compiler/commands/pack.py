"""`icc pack` and `icc unpack`."""

from __future__ import annotations

from pathlib import Path

import click

from ...runtime.cli.fields import PATH
from ...runtime.cli.group import command
from ...runtime.format.present import ONE_FILE, check_present, engine_name
from ..interrupt import ends_at_once

_FORCE = "Replace an engine that exists at OUTPUT."


@command("pack")
@click.argument("engine", type=PATH)
@click.option("-o", "--output", type=PATH, show_default="NAME.icc beside ENGINE", help="File to write.")
@click.option(
    "--oci", type=PATH, metavar="DIR", help="Write an OCI image layout instead, for tools that push to registries."
)
@click.option("--force", is_flag=True, help=_FORCE)
def pack_command(engine: Path, output: Path | None, oci: Path | None, force: bool) -> None:
    """Pack ENGINE into one file, which every command accepts and Python runs: python FILE run -p TEXT.

    It is an uncompressed zip archive. Weights are mapped where they lie in it. All files are verified first. ENGINE may
    be an OCI image layout, too.
    """
    from ..engine.oci import is_layout
    from ..engine.packing import needs_late_python
    from ..packing import pack_engine, pack_layout

    if not is_layout(engine):
        check_present(engine)
    if oci is not None:
        if output is not None:
            raise click.UsageError("-o is for one file, --oci for a layout: give one of them")
        with ends_at_once():
            pack_layout(engine, oci, force)
        click.echo(f"wrote {oci}")
        return
    made = output or engine.resolve().with_name(engine_name(engine.resolve()) + ONE_FILE)
    with ends_at_once():
        pack_engine(engine, made, force)
    click.echo(f"wrote {made}")
    if needs_late_python(made):
        click.echo(f"warning: beyond 4 GiB, `python {made}` needs Python 3.13; `icc run` takes any", err=True)


@command("unpack")
@click.argument("engine", type=PATH)
@click.option("-o", "--output", type=PATH, show_default="NAME.engine beside ENGINE", help="Directory to write.")
@click.option("--force", is_flag=True, help=_FORCE)
def unpack_command(engine: Path, output: Path | None, force: bool) -> None:
    """Make ENGINE, one file or an OCI image layout, an engine directory again. All files are verified first."""
    from ..engine.oci import is_layout
    from ..packing import unpack_engine

    if not is_layout(engine):
        check_present(engine)
    made = output or engine.resolve().with_name(engine_name(engine.resolve()) + ".engine")
    with ends_at_once():
        unpack_engine(engine, made, force)
    click.echo(f"wrote {made}")
