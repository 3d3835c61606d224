"""Tools for models whose chat template does not support them, like llama.cpp's generic format: the tools, how to call
them, and the calls and results of a conversation are all described in words."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from .formats import CallFormat

GENERIC = CallFormat("object", before="<tool_call>\n", after="\n</tool_call>", separator="\n")
_RESULT = "<tool_response>\n{}\n</tool_response>"
_INSTRUCTION = """You can call these tools:
{tools}

To call tools, write a block like this for each call, and nothing behind the last one:
{before}{{"{name}":"NAME","{arguments}":{{"ARGUMENT":VALUE}}}}{after}
The results are given to you in <tool_response> blocks. Where no tool is needed, answer in words."""


def in_words(
    messages: Sequence[dict[str, Any]], tools: Sequence[Mapping[str, Any]] | None, system: bool
) -> list[dict[str, Any]]:
    """A conversation for a template without tools. messages: from `history.fitted`. tools: those that may be called;
    None: there are none. system: whether the template shows system messages; if not, the instruction goes to the first
    user message."""
    built: list[dict[str, Any]] = []
    names: dict[str, str] = {}
    after_result = False
    for given in messages:
        message, is_result = given, given["role"] == "tool"
        if is_result:
            message = {"role": "user", "content": _result(given, names)}
        elif calls := given.get("tool_calls"):
            names |= {call["id"]: call["function"]["name"] for call in calls}
            said = [given["content"], *map(_call, calls)]
            message = {name: value for name, value in given.items() if name != "tool_calls"}
            message["content"] = "\n".join(filter(None, said))
        if built and built[-1]["role"] == message["role"] == "user" and (is_result or after_result):
            built[-1] = {
                **built[-1],
                "content": f"{built[-1]['content']}\n{message['content']}",
            }  # results form one turn of the user
        else:
            built.append(message)
        after_result = is_result
    return _instructed(built, _instruction(tools), system) if tools else built


def _instructed(messages: list[dict[str, Any]], instruction: str, system: bool) -> list[dict[str, Any]]:
    """The messages with an instruction, appended to the system message or put before the first user message."""
    role = "system" if system else "user"
    at = next((place for place, message in enumerate(messages) if message["role"] == role), None)
    if at is None:
        return [{"role": role, "content": instruction}, *messages]
    content = messages[at]["content"]
    told = f"{content}\n\n{instruction}" if system else f"{instruction}\n\n{content}"
    return [*messages[:at], {**messages[at], "content": told}, *messages[at + 1 :]]


def _instruction(tools: Sequence[Mapping[str, Any]]) -> str:
    return _INSTRUCTION.format(
        tools="\n".join(_json(tool.get("function", tool)) for tool in tools),
        before=GENERIC.before,
        after=GENERIC.after,
        name=GENERIC.name_key,
        arguments=GENERIC.arguments_key,
    )


def _call(call: Mapping[str, Any]) -> str:
    function = call["function"]
    written = {GENERIC.name_key: function["name"], GENERIC.arguments_key: function["arguments"]}
    return f"{GENERIC.before}{_json(written)}{GENERIC.after}"


def _result(message: Mapping[str, Any], names: Mapping[str, str]) -> str:
    """A tool's result as text, with the tool's name if it is known."""
    name = names.get(message.get("tool_call_id", "")) or message.get("name")
    return _RESULT.format(f"{name}: {message['content']}" if name else message["content"])


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
