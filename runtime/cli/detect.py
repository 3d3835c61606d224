"""`icc detect`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import click

from ..errors import RequestError, UsageError
from ..format.present import check_present
from ..watermark.settings import FORM, Watermark, watermark
from .fields import Read
from .group import command


@command("detect")
@click.argument("engine", metavar="ENGINE", required=False)
@click.argument("text", metavar="[TEXT]", required=False)
@click.option("--engine", "named", metavar="ENGINE", help="The engine, if the only argument is TEXT.")
@click.option("--key", type=Read(watermark), required=True, metavar=FORM, help="The key that --watermark was given.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON value.")
def detect_command(engine: str | None, text: str | None, named: str | None, key: Watermark, as_json: bool) -> None:
    """Tell whether a text was marked with a key by --watermark. Without TEXT, or with -, standard input is read.

    The engine's tokenizer splits the text; any engine of the model that wrote it will do. Give the engine as the first
    of two arguments or with --engine.
    """
    if named is not None:
        if text is not None:
            raise UsageError("two engines are given: --engine and the first of two arguments")
        engine, text = named, engine
    if engine is None:
        raise UsageError("no engine is given: its tokenizer must split the text", "icc detect ENGINE TEXT --key KEY")
    check_present(Path(engine))
    from ..commands.prompt import read_standard_input
    from ..format.load import read_manifest
    from ..format.open_container import open_container
    from ..tokenizer import Tokenizer
    from ..watermark.detect import detect

    manifest = read_manifest(Path(engine))
    if manifest.tokenizer_dir is None:
        raise RequestError("the engine has no tokenizer to split the text")
    tokenizer = Tokenizer(open_container(Path(engine)).read(f"{manifest.tokenizer_dir}/tokenizer.json"))
    given = read_standard_input() if text in (None, "-") else text
    assert given is not None
    found = detect(tokenizer.encode(given, add_special_tokens=False), key, manifest.model.vocab_size)
    if as_json:
        click.echo(json.dumps({"method": key.method, **asdict(found), "marked": found.marked}))
        return
    green = "" if found.green is None else f", {found.green} green where {key.ratio * found.tokens:.1f} are expected"
    click.echo(f"z-score {found.z_score:.2f}, p-value {found.p_value:.2e}, {found.tokens} tokens{green}")
    click.echo("marked with this key" if found.marked else "no mark of this key found")
