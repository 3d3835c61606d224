"""`icc verify`."""

from __future__ import annotations

import json
from pathlib import Path

import click

from ..format.present import check_present
from .group import command


@command("verify")
@click.argument("engine", metavar="ENGINE")
@click.option(
    "--key", metavar="PUBLIC_KEY", help="Also check its signature, by this key: a file, or what stands in it."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON value.")
def verify_command(engine: str, key: str | None, as_json: bool) -> None:
    """Compare every file of an engine with the digest that its manifest has, whatever machine it is for.

    With --key, nothing may be in the engine that was not signed.
    """
    check_present(Path(engine))
    from ..format.load import open_verified

    container, manifest = open_verified(Path(engine))
    facts: dict[str, object] = {"files": len(manifest.files), "digest": manifest.digest}
    if key is not None:
        from ..trust.engine_signature import check_all_is_signed, check_signature, read_public_key

        public = read_public_key(key)
        facts |= {"signed_by": public.name, "trusted_comment": check_signature(container, manifest, public)}
        check_all_is_signed(container, manifest)
    if as_json:
        click.echo(json.dumps(facts))
        return
    click.echo(f"{facts['files']} files as they were written; {manifest.digest}")
    if key is not None:
        click.echo(f"signed by {facts['signed_by']}; {facts['trusted_comment']}".replace("\t", " "))
