"""TemplateInput: what a chat template is given for one conversation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from ..errors import RequestError

if TYPE_CHECKING:
    from .template import ChatTemplate


class TemplateInput(msgspec.Struct, frozen=True, tag="render"):
    """A conversation for a template. messages: as `reading.history.fitted` leaves them. add_generation_prompt: the text
    ends where the answer begins; continue_final_message: it ends in the last message, which the answer goes on with.
    variables: what else the template knows by name. template: one of several by its name, None for the usual one."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: dict[str, Any] = {}
    template: str | None = None


def rendered(template: ChatTemplate, given: TemplateInput) -> str:
    """The text of a conversation. RequestError if the template refuses it, or cannot use it."""
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
