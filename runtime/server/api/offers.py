"""Offer: which tools an answer may or must call, and how many, from all fields that state it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from ...reading.tools import Tools
from .conversation import AllowedTools, FunctionName, NamedTool, Tool, ToolFunction
from .errors import conflict
from .requests import ChatRequest


@dataclass(frozen=True)
class Offer(Tools):
    """The tools of a request. legacy: whether it uses OpenAI's older field names, and is answered in the older form."""

    legacy: bool = False


def offer_of(request: ChatRequest) -> Offer:
    """The offer of a request. HttpError 400 if it requires a tool that it does not define.

    If several tools have one name, the last counts. Tools that must not be called are not shown to the model.
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
    shown = [_shown(tool.function) for tool in tools.values()]
    return Offer(shown, {name: tool.function.parameters for name, tool in tools.items()}, must, most, legacy)


def _named(tools: dict[str, Tool], name: str, field: str) -> Tool:
    if name not in tools:
        kind = "functions" if field == "function_call" else "tools"
        raise conflict(f"{field}: {name!r} is none of `{kind}`", field)
    return tools[name]


def _shown(function: ToolFunction) -> dict[str, Any]:
    """A tool as the model sees it: models are trained on this order of fields, without empty ones."""
    fields = msgspec.to_builtins(function)
    return {"type": "function", "function": {name: value for name, value in fields.items() if value is not None}}
