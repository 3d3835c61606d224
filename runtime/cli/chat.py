"""`icc chat`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ..options import LoadOptions
from ..requests.params import SamplingParams
from .fields import PATH, field_options, taken
from .group import command
from .load import loads


@command("chat")
@click.option("--system", metavar="TEXT", default="", help="System message of the conversation.")
@click.option(
    "--chat-template", type=PATH, metavar="FILE|NAME", help="Chat template to use, or one of the model's by name."
)
@click.option("--max-tokens", type=int, default=512, help="Most tokens of an answer.")
@click.option("--lora", type=PATH, metavar="DIR", help="Answer with this adapter; needs an engine with --adapters.")
@field_options(SamplingParams, leave_out=["max_tokens", "min_tokens", "ignore_eos"])
@click.option("--markdown/--plain", default=True, help="Show answers as Markdown, at a terminal.")
@loads
def chat_command(
    load: LoadOptions,
    system: str,
    chat_template: Path | None,
    max_tokens: int,
    lora: Path | None,
    markdown: bool,
    **parameters: Any,
) -> int:
    """Talk to an engine: answers are streamed, Ctrl-C stops one, /help lists the commands.

    Through a pipe every line is a message, and standard output gets the answers alone. If neither the options nor the
    model's generation_config.json say how to sample, the values are those of llama.cpp and Ollama: temperature 0.8,
    top_k 40, top_p 0.95, min_p 0.05.
    """
    settings = {"max_tokens": max_tokens, **taken(SamplingParams, parameters)}
    given = {name: value for name, value in settings.items() if value not in (None, ())}
    SamplingParams(**given)  # wrong parameters are refused before the engine is loaded
    from ..opening import begin
    from ..templates.source import read_template_file

    template = None if chat_template is None else read_template_file(chat_template)
    begun = begin(load)  # before the slow imports
    from ..chat.chat import chat
    from ..loading import open_llm

    with open_llm(load, begun) as llm:
        if lora is not None:
            llm.use_adapter(lora)
        if template is not None:
            llm.prompting.use_template(template)
        return chat(llm, system, given, markdown)
