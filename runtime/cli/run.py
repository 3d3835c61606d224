"""`icc run`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..errors import IccError
from ..options import LoadOptions
from ..requests.params import SamplingParams
from ..values import integers
from .fields import PATH, Read, field_options, taken
from .group import EngineOption, command
from .load import loads

if TYPE_CHECKING:
    from ..speculate.speculator import Speculator


@command("run")
@click.option(
    "-p",
    "--prompt",
    metavar="TEXT",
    cls=EngineOption,
    needs="tokenizer",
    help="Text to answer or complete; - reads it from standard input, as does a pipe without this option.",
)
@click.option("--ids", type=Read(integers), metavar="N,N", help="Token ids to complete, instead of a text.")
@click.option(
    "--chat/--raw",
    default=None,
    cls=EngineOption,
    needs="tokenizer",
    show_default="--chat if there is a template",
    help="Answer the text through the model's chat template, or complete it as it is.",
)
@click.option("--system", metavar="TEXT", cls=EngineOption, needs="tokenizer", help="System message before the text.")
@click.option(
    "--chat-template",
    type=PATH,
    metavar="FILE|NAME",
    cls=EngineOption,
    needs="tokenizer",
    help="Chat template to use instead of the model's, or one of its own by name.",
)
@click.option(
    "--max-tokens",
    type=int,
    show_default="128; of an answer 512",
    help="Most tokens to generate.",
)
@field_options(SamplingParams, leave_out=["max_tokens"])
@click.option("--lora", type=PATH, metavar="DIR", help="Answer with this adapter; needs an engine with --adapters.")
@click.option("--best-of", type=click.IntRange(1, 16), default=1, metavar="N", help="Show the best of so many answers.")
@click.option("--judge", type=PATH, metavar="ENGINE", help="Choose the best answer with this engine of --task rerank.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON value.")
@loads
def run_command(
    load: LoadOptions,
    prompt: str | None,
    ids: Sequence[int] | None,
    chat: bool | None,
    system: str | None,
    chat_template: Path | None,
    max_tokens: int | None,
    lora: Path | None,
    best_of: int,
    judge: Path | None,
    as_json: bool,
    **parameters: Any,
) -> None:
    """Answer or complete a text with an engine, streamed.

    If neither the options nor the model's generation_config.json say how to sample, decoding is greedy. With --beams or
    --best-of, the text is printed when it is complete.
    """  # fmt: skip
    start = time.perf_counter()
    from ..commands.prompt import Asked, prepare
    from ..opening import begin

    template = None
    if chat_template is not None:
        from ..templates.source import read_template_file

        template = read_template_file(chat_template)
    asked = Asked(_given(prompt, ids), chat, system, max_tokens, template)
    limit = {} if max_tokens is None else {"max_tokens": max_tokens}
    params = SamplingParams(**limit, **taken(SamplingParams, parameters), n=best_of)
    if judge is not None and best_of == 1:
        raise click.UsageError("--judge: there is one answer only; give --best-of N")
    begun = begin(load)  # before the slow imports
    from ..commands.run import as_json as shown
    from ..commands.run import run_prompt
    from ..loading import open_llm

    with open_llm(load, begun) as llm:
        if lora is not None:
            llm.use_adapter(lora)
        load_s = time.perf_counter() - start
        chosen = (lambda text: None) if as_json else _show
        if best_of == 1:
            result = run_prompt(llm, *prepare(llm, asked, params), chosen)
        else:
            from ..commands.best import run_best

            result = run_best(
                llm, *prepare(llm, asked, params), chosen, None if judge is None else (judge, asked.prompt)
            )
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


def _given(prompt: str | None, ids: Sequence[int] | None) -> str | Sequence[int]:
    """The prompt from the command line, or else from standard input."""
    from ..commands.prompt import read_standard_input, standard_input_is_given

    if prompt is not None and ids is not None:
        raise click.UsageError("give either --prompt or --ids")
    if ids is not None:
        return ids
    if prompt is not None and prompt != "-":
        return prompt
    text = read_standard_input() if prompt == "-" or standard_input_is_given() else ""
    if prompt is None and not text:
        raise click.UsageError("give either --prompt or --ids, or a text on standard input")
    return text


def _accepted(speculator: Speculator) -> str:
    counts = speculator.counts
    if not counts.drafts:
        return f"no guesses in {counts.steps} steps: they would not have made decoding faster"
    return (
        f"{counts.tokens_per_step:.2f} tokens per step, {counts.accepted} of {counts.guesses} guesses accepted "
        f"in {counts.drafts} of {counts.steps} steps"
    )


def _show(text: str) -> None:
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
    sys.stdout.flush()
