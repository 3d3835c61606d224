"""`icc verify`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ..format.present import check_present
from .group import command

if TYPE_CHECKING:
    from ..format.container import Container
    from ..format.manifest import Manifest


@command("verify")
@click.argument("engine", metavar="ENGINE")
@click.option("--key", metavar="PUBLIC_KEY", help="Also check the signature with this key: a file, or the key itself.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON value.")
def verify_command(engine: str, key: str | None, as_json: bool) -> None:
    """Compare every file of an engine with its digest in the manifest. Works on any machine.

    With --key, the engine must contain nothing that was not signed.
    """
    check_present(Path(engine))
    from ..format.load import verify_all
    from ..format.targets import TargetFiles

    rows = {
        container.target if isinstance(container, TargetFiles) else "": _facts(container, manifest, key)
        for container, manifest in verify_all(Path(engine))
    }
    if as_json:
        click.echo(json.dumps(rows.get("", {"targets": rows})))
        return
    for target, row in rows.items():
        start = f"{target}: " if target else ""
        click.echo(f"{start}{row['files']} files as they were written; {row['digest']}")
        if key is not None:
            click.echo(f"{start}signed by {row['signed_by']}; {row['trusted_comment']}".replace("\t", " "))


def _facts(container: Container, manifest: Manifest, key: str | None) -> dict[str, object]:
    facts: dict[str, object] = {"files": len(manifest.files), "digest": manifest.digest}
    if key is not None:
        from ..trust.engine_signature import check_all_is_signed, check_signature, read_public_key

        public = read_public_key(key)
        facts |= {"signed_by": public.name, "trusted_comment": check_signature(container, manifest, public)}
        check_all_is_signed(container, manifest)
    return facts
