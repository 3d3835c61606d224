"""What a caller may say of a conversation besides its messages and parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    from .reading.tools import ToolChoice


class TemplateOptions(TypedDict, total=False):
    """What a template is given besides messages and tools. add_generation_prompt: the answer begins behind the last
    message (default); continue_final_message: it goes on with the last message instead. chat_template: one of several
    templates by its name, such as "rag" (else "tool_use" is taken where there are tools, or "default").
    chat_template_kwargs: more variables of the template, such as enable_thinking. documents: what a template for
    retrieval shows the model."""

    chat_template: str | None
    documents: Sequence[Mapping[str, Any]] | None
    add_generation_prompt: bool
    continue_final_message: bool
    chat_template_kwargs: Mapping[str, Any] | None


class RenderOptions(TemplateOptions, total=False):
    """How a conversation becomes a text: see TemplateOptions; tools: what the model may call, as in OpenAI's API."""

    tools: Sequence[Mapping[str, Any]] | None


class ChatOptions(RenderOptions, total=False):
    """How a conversation is answered: see RenderOptions; tool_choice: "auto" (default), "none", "required", or the
    tool that must be called, by its name or as in OpenAI's API; parallel_tool_calls: whether several may be; adapter:
    the name of a loaded one that the answer is computed with, "" for none."""

    tool_choice: ToolChoice | None
    parallel_tool_calls: bool
    adapter: str
