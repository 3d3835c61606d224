"""`icc keygen` and `icc sign`."""

from __future__ import annotations

from pathlib import Path

import click

from ...runtime.cli.fields import PATH
from ...runtime.cli.group import command
from ...runtime.format.present import check_present
from ..interrupt import ends_at_once


@command("keygen")
@click.argument("key", type=PATH)
def keygen_command(key: Path) -> None:
    """Make a key to sign engines with: KEY, which is secret and not encrypted, and KEY.pub, in minisign's format.

    Keys of `minisign -G` also work; icc asks for their passwords.
    """
    from ..signing import make_keys

    made = make_keys(key)
    click.echo(f"wrote {key} (keep it to yourself) and {key}.pub, key {made.public.name}")


@command("sign")
@click.argument("engine", type=PATH)
@click.option("--key", type=PATH, metavar="FILE", help="The secret key, made by icc keygen or minisign -G.")
@click.option("--new-key", type=PATH, metavar="FILE", help="First make a key as icc keygen does, then sign with it.")
def sign_command(engine: Path, key: Path | None, new_key: Path | None) -> None:
    """Sign ENGINE: verify all its files, then write a signature beside engine.json.

    engine.json has the digest of every file. icc verify ENGINE --key PUBLIC_KEY checks the signature, and so does
    minisign.
    """
    if (key is None) == (new_key is None):
        raise click.UsageError("give either --key or --new-key")
    check_present(engine)
    from ..signing import make_keys, read_secret_key, sign_engine

    def password() -> bytes:
        return click.prompt("Password of the key", hide_input=True, err=True).encode()

    secret = make_keys(new_key) if new_key is not None else read_secret_key(key or Path(), password)
    with ends_at_once():
        sign_engine(engine, secret)
    click.echo(f"signed {engine} with key {secret.public.name}")
