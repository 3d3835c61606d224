"""Options of a conversation besides its messages and sampling parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    from .reading.tools import ToolChoice


class TemplateOptions(TypedDict, total=False):
    """Inputs of a template besides messages and tools. add_generation_prompt: the answer begins after the last message
    (default); continue_final_message: the answer continues the last message instead. chat_template: the name of one of
    the model's templates, such as "rag" (by default "tool_use" if there are tools, else "default").
    chat_template_kwargs: more variables of the template, such as enable_thinking. documents: the texts that a template
    for retrieval shows the model."""

    chat_template: str | None
    documents: Sequence[Mapping[str, Any]] | None
    add_generation_prompt: bool
    continue_final_message: bool
    chat_template_kwargs: Mapping[str, Any] | None


class RenderOptions(TemplateOptions, total=False):
    """How a conversation is rendered to a text: see TemplateOptions; tools: the tools that the model may call, as in
    OpenAI's API."""

    tools: Sequence[Mapping[str, Any]] | None


class ChatOptions(RenderOptions, total=False):
    """How a conversation is answered: see RenderOptions; tool_choice: "auto" (default), "none", "required", or the tool
    that must be called, by its name or as in OpenAI's API; parallel_tool_calls: whether an answer may have several
    calls; adapter: the name of a loaded adapter to compute the answer with, "" for none."""

    tool_choice: ToolChoice | None
    parallel_tool_calls: bool
    adapter: str
