"""TemplateInput: the input of a chat template for one conversation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from ..errors import RequestError

if TYPE_CHECKING:
    from .template import ChatTemplate


class TemplateInput(msgspec.Struct, frozen=True, tag="render"):
    """A conversation for a template. messages: from `reading.history.fitted`. tools: None if there are none.
    add_generation_prompt: the text ends where the answer begins; continue_final_message: it ends within the last
    message, which the answer continues. variables: further variables by name. template: the name of a template, None
    for the usual one."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: dict[str, Any] = {}
    template: str | None = None


def rendered(template: ChatTemplate, given: TemplateInput) -> str:
    """Render a conversation. RequestError if the template refuses or cannot use it."""
    try:
        return template.render(
            given.messages,
            given.tools,
            given.add_generation_prompt,
            given.continue_final_message,
            given.template,
            **given.variables,
        )
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        message = f"the chat template cannot use these messages: {error}"
        raise RequestError(message, field="messages") from error
