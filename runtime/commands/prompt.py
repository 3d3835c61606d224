"""The prompt of `run`: a text from the command line or standard input, through the chat template or unchanged."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from ..errors import IccError, MissingExtraError, UsageError

if TYPE_CHECKING:
    from ..llm import LLM
    from ..requests.params import SamplingParams
    from ..templates.messages import Messages

RAW_TOKENS, ANSWER_TOKENS = 128, 512  # default max_tokens without and with the chat template


class Asked(msgspec.Struct, frozen=True):
    """prompt: a text, or token ids. chat: whether a text goes through the chat template; None: if there is one. system:
    the system message of a conversation. max_tokens: None for RAW_TOKENS or ANSWER_TOKENS. template: the text of a chat
    template instead of the engine's."""

    prompt: str | Sequence[int]
    chat: bool | None = None
    system: str | None = None
    max_tokens: int | None = None
    template: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.prompt, str) and self.chat:
            raise UsageError("--chat: token ids are taken as they are", "give a text with --prompt")
        if self.template is not None and (self.chat is False or not isinstance(self.prompt, str)):
            raise UsageError("--chat-template: only a conversation has one", "leave out --raw and --ids")
        if self.system is not None and (self.chat is False or not isinstance(self.prompt, str)):
            raise UsageError("--system: only a conversation has a system message", "leave out --raw and --ids")


def read_standard_input() -> str:
    """All of standard input, without the last line's end. UsageError if it is not text."""
    try:
        text = sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"standard input is not UTF-8 text: {error}") from error
    return text.removesuffix("\n").removesuffix("\r")


def standard_input_is_given() -> bool:
    """Whether standard input is a file or pipe, not a terminal."""
    return sys.stdin is not None and not sys.stdin.closed and not sys.stdin.isatty()


def prepare(llm: LLM, asked: Asked, params: SamplingParams) -> tuple[list[int], SamplingParams]:
    """The token ids of the prompt, and the parameters with their max_tokens.

    IccError if the template is required and unusable; if it is optional, a warning is printed and the prompt is
    completed unchanged.
    """
    if not isinstance(asked.prompt, str) or not _through_template(llm, asked):
        return llm.encode(asked.prompt), replace(params, max_tokens=asked.max_tokens or RAW_TOKENS)
    messages: Messages = [{"role": "user", "content": asked.prompt}]
    if asked.system is not None:
        messages = [{"role": "system", "content": asked.system}, *messages]
    encoded = llm.prompting.encode_chat(messages)
    return encoded, replace(params, max_tokens=asked.max_tokens or ANSWER_TOKENS)


def _through_template(llm: LLM, asked: Asked) -> bool:
    if asked.template is not None:
        llm.prompting.use_template(asked.template)
    if asked.chat is not None:
        return asked.chat
    try:
        found = llm.prompting.template is not None
    except IccError as error:
        if asked.system is not None:
            raise
        hint = f" ({error.hint})" if isinstance(error, MissingExtraError) else ""
        print(f"warning: {error.message}{hint}: the prompt is completed as it is", file=sys.stderr)
        return False
    if asked.system is not None and not found:
        raise UsageError("--system: the engine has no chat template", "put it into the prompt")
    return found
