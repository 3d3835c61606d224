"""`icc run`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from ..errors import IccError
from ..options import LoadOptions
from ..requests.params import SamplingParams
from ..values import integers
from .fields import Read, field_options, taken
from .group import Option, command
from .load import loads

if TYPE_CHECKING:
    from ..speculate.speculator import Speculator


@command("run")
@click.option("-p", "--prompt", metavar="TEXT", cls=Option, needs="tokenizer", help="Text to complete.")
@click.option("--ids", type=Read(integers), metavar="N,N", help="Token ids to complete, instead of a text.")
@field_options(SamplingParams)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON value.")
@loads
def run_command(
    load: LoadOptions, prompt: str | None, ids: Sequence[int] | None, as_json: bool, **parameters: Any
) -> None:
    """Complete a prompt with an engine, streamed."""
    start = time.perf_counter()
    if (prompt is None) == (ids is None):
        raise click.UsageError("give either --prompt or --ids")
    params = SamplingParams(**taken(SamplingParams, parameters))
    from ..commands.run import as_json as shown
    from ..commands.run import run_prompt
    from ..llm import open_llm

    with open_llm(load) as llm:
        load_s = time.perf_counter() - start
        asked = ids if prompt is None else prompt
        result = run_prompt(llm, asked or "", params, (lambda text: None) if as_json else _show)
        speculator = llm.loop.speculator
    click.echo(json.dumps(shown(result, load_s), ensure_ascii=False) if as_json else "")
    completion = result.completion
    click.echo(
        f"load {load_s:.2f} s, first token {result.ttft_s * 1e3:.1f} ms, "
        f"prompt {len(completion.prompt_token_ids)} tokens at {result.prompt_tokens_per_s:.1f} tok/s, "
        f"decode {len(completion.token_ids)} tokens at {result.decode_tokens_per_s:.1f} tok/s, "
        f"ended by {completion.finish_reason}",
        err=True,
    )
    if speculator is not None:
        click.echo(f"{speculator.drafter.name}: {_accepted(speculator)}", err=True)
    if completion.finish_reason == "error":
        raise IccError("the model gave logits that are not numbers", "the engine or its checkpoint may be damaged")


def _accepted(speculator: Speculator) -> str:
    counts = speculator.counts
    if not counts.drafts:
        return f"no guesses in {counts.steps} steps, where they were not expected to pay"
    return (
        f"{counts.tokens_per_step:.2f} tokens per step, {counts.accepted} of {counts.guesses} guesses accepted "
        f"in {counts.drafts} of {counts.steps} steps"
    )


def _show(text: str) -> None:
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
    sys.stdout.flush()
