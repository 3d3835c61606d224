"""A caller's tools: which there are, and whether one must be called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import RequestError

ToolChoice = str | Mapping[str, Any]  # "auto", "none", "required", or the tool that must be called
_HINT = 'a tool is like {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}'


@dataclass(frozen=True)
class Tools:
    """The tools of a request. shown: in the form that templates take. schemas: of their parameters, by tool. must:
    whether one must be called. most: how many calls are wanted; None: any number."""

    shown: list[dict[str, Any]] = field(default_factory=list)
    schemas: dict[str, Any] = field(default_factory=dict)
    must: bool = False
    most: int | None = None


def offered(tools: Sequence[Mapping[str, Any]] | None, choice: ToolChoice | None, parallel: bool) -> Tools:
    """The tools to show to the model; of several with one name, the last. tools: None if there are none. choice: as in
    OpenAI's API, None for "auto", or the name of the tool that must be called. RequestError if an entry is no tool, or
    if the tool that must be called is missing."""
    functions = {function["name"]: function for function in map(_function, tools or ())}
    most = None if parallel else 1
    if choice == "none":
        return Tools()
    if choice not in (None, "auto", "required"):
        name = _chosen(choice)
        if name not in functions:
            raise RequestError(f"tool_choice: {name!r} is none of the tools", field="tool_choice")
        functions, most = {name: functions[name]}, 1
    must = choice not in (None, "auto")
    if must and not functions:
        raise RequestError("tool_choice: there are no tools that could be called", field="tool_choice")
    shown = [{"type": "function", "function": function} for function in functions.values()]
    return Tools(shown, {name: one.get("parameters") for name, one in functions.items()}, must, most)


def _function(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = tool.get("function", tool) if isinstance(tool, Mapping) else tool
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise RequestError("tools: one of them has no name", _HINT, field="tools")
    if not isinstance(function.get("parameters", {}), Mapping | None):
        raise RequestError(f"tools: the parameters of {function['name']} are no JSON schema", _HINT, field="tools")
    return dict(function)


def _chosen(choice: Any) -> Any:
    """The name in {"type": "function", "function": {"name": NAME}}, or the name itself."""
    if isinstance(choice, Mapping):
        function = choice.get("function", choice)
        return function.get("name") if isinstance(function, Mapping) else None
    return choice
