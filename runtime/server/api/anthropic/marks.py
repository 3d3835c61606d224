"""cache_control: the marks of a request of /v1/messages, each at the end of a prefix to keep in the cache for some
time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ....errors import RequestError
from ..requests import ChatRequest
from .chat import chat_request
from .request import AssistantTurn, CacheControl, MessagesRequest, TextBlock, TextOnly, ToolResultBlock, UserTurn

_MOST = 4  # Anthropic's limit
_TTL_S = {"5m": 300.0, "1h": 3600.0}
_OTHER = " \u2260\u2260"  # put behind a mark, so that the prefix that both prompts share ends there


def marks_of(request: MessagesRequest) -> list[tuple[ChatRequest, float]]:
    """For each mark: a conversation that equals the request's up to the mark and differs behind it, and for how many
    seconds to keep that prefix. RequestError for more than _MOST marks."""
    found = [*_of_tools(request), *_of_system(request), *_of_turns(request)]
    if request.cache_control is not None:  # of the request itself: it marks the last block
        last = len(request.messages) - 1
        found.append((_cut(request, last, None), request.cache_control))
    if len(found) > _MOST:
        raise RequestError(f"cache_control: {len(found)} marks, at most {_MOST}", field="cache_control")
    return [(chat_request(other), _TTL_S[control.ttl or "5m"]) for other, control in found]


Marks = list[tuple[MessagesRequest, CacheControl]]


def _of_tools(request: MessagesRequest) -> Marks:
    control = next((tool.cache_control for tool in reversed(request.tools or ()) if tool.cache_control), None)
    if control is None:
        return []
    if request.system:
        text = request.system if isinstance(request.system, str) else "".join(one.text for one in request.system)
        return [(msgspec.structs.replace(request, system=_OTHER + text), control)]
    return [(msgspec.structs.replace(request, messages=[UserTurn(_OTHER), *request.messages[1:]]), control)]


def _of_system(request: MessagesRequest) -> Marks:
    blocks = [] if request.system is None or isinstance(request.system, str) else request.system
    found: Marks = []
    for number, block in enumerate(blocks):
        if block.cache_control is not None:
            text = "".join(one.text for one in blocks[: number + 1])
            found.append((msgspec.structs.replace(request, system=text + _OTHER), block.cache_control))
    return found


def _of_turns(request: MessagesRequest) -> Marks:
    found: Marks = []
    for place, turn in enumerate(request.messages):
        blocks: Sequence[Any] = () if isinstance(turn.content, str) else turn.content
        for number, block in enumerate(blocks):
            if (control := getattr(block, "cache_control", None)) is not None:
                found.append((_cut(request, place, number), control))
    return found


def _cut(request: MessagesRequest, place: int, number: int | None) -> MessagesRequest:
    """The request up to a block of a turn, followed by other words. place: index of the turn. number: index of the
    block, None for the last."""
    turn = request.messages[place]
    content = turn.content
    if isinstance(content, str):
        changed: Any = content + _OTHER
    else:
        blocks = list(content if number is None else content[: number + 1])
        last = blocks[-1]
        if isinstance(last, TextBlock | TextOnly):
            changed = [*blocks[:-1], msgspec.structs.replace(last, text=last.text + _OTHER)]
        elif isinstance(last, ToolResultBlock):
            given = last.content or ""
            text = given if isinstance(given, str) else "".join(one.text for one in given)
            changed = [*blocks[:-1], msgspec.structs.replace(last, content=text + _OTHER)]
        else:  # a tool_use block: a turn of other words follows
            behind = UserTurn(_OTHER) if isinstance(turn, AssistantTurn) else AssistantTurn(_OTHER)
            return msgspec.structs.replace(request, messages=[*request.messages[: place + 1], behind])
    messages = [*request.messages[:place], msgspec.structs.replace(turn, content=changed)]
    return msgspec.structs.replace(request, messages=messages)
