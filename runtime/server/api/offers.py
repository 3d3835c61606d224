"""Offer: which tools an answer may call, which of them it must, and how many, from all the fields that say so."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .conversation import AllowedTools, FunctionName, NamedTool, Tool
from .errors import conflict
from .requests import ChatRequest


@dataclass(frozen=True)
class Offer:
    """The tools that the model is shown. must: one of them has to be called. most: calls that are wanted. legacy:
    whether the client asked by the older names, and is answered in the older form."""

    tools: Sequence[Tool] = ()
    must: bool = False
    most: int | None = None
    legacy: bool = False

    @property
    def schemas(self) -> dict[str, Any]:
        """The schemas of the parameters, by name."""
        return {tool.function.name: tool.function.parameters for tool in self.tools}


def offer_of(request: ChatRequest) -> Offer:
    """What a request offers; HttpError 400 if it asks for a tool that it does not have.

    Of several tools of one name the last is meant. Tools that may not be called are not shown.
    """
    legacy = bool(request.functions) and not request.tools
    field = "function_call" if legacy else "tool_choice"
    given = [Tool(function) for function in request.functions or ()] if legacy else request.tools or ()
    tools = {tool.function.name: tool for tool in given}
    choice = request.function_call if legacy else request.tool_choice
    if choice == "none":
        return Offer()
    most = 1 if legacy or request.parallel_tool_calls is False else None
    must = choice == "required"
    if isinstance(choice, AllowedTools):
        names = [tool.function.name for tool in choice.allowed_tools.tools]
        tools = {name: _named(tools, name, field) for name in names}
        must = choice.allowed_tools.mode == "required"
    if isinstance(choice, NamedTool | FunctionName):
        name = (choice.function if isinstance(choice, NamedTool) else choice).name
        tools, must, most = {name: _named(tools, name, field)}, True, 1
    if must and not tools:
        raise conflict(f"{field}: there are no tools that could be called", field)
    return Offer(list(tools.values()), must, most, legacy)


def _named(tools: dict[str, Tool], name: str, field: str) -> Tool:
    if name not in tools:
        kind = "functions" if field == "function_call" else "tools"
        raise conflict(f"{field}: {name!r} is none of `{kind}`", field)
    return tools[name]
