"""The text that the model reads of a request for decisions: the input, followed by one question at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec

from ....nesting import depth
from .. import limits
from ..errors import HttpError, conflict
from ..openresponses.chat import messages_of
from ..openresponses.request import (
    FunctionCallItem,
    FunctionCallOutput,
    InputMessage,
    Item,
    ResponseRefusalPart,
    text_of,
)
from .labels import Labels
from .request import (
    ChoiceQuestion,
    CustomCall,
    CustomCallOutput,
    DecisionItem,
    DecisionMessage,
    DecisionPart,
    DecisionRequest,
    InputJson,
    PredicateQuestion,
    Question,
)

LAST_WORDS = "\nAnswer with the label only, and with nothing before it or after it."
_encoder = msgspec.json.Encoder()


class Worded(NamedTuple):
    """A question as the model reads it. labels: the tokens of its answers, in their order."""

    text: str
    labels: tuple[int, ...]


def conversation(request: DecisionRequest) -> list[dict[str, Any]]:
    """The input as messages. HttpError 400 for a tool result without its call, and for JSON that is too large."""
    if isinstance(request.input, str):
        return [{"role": "user", "content": request.input}]
    calls: set[str] = set()
    for place, item in enumerate(request.input):
        if isinstance(item, FunctionCallItem | CustomCall):
            calls.add(item.call_id)
        elif not isinstance(item, DecisionMessage) and item.call_id not in calls:
            raise conflict(f"input[{place}].call_id: there is no call with this id before it", "input")
    return messages_of(None, [_item(item) for item in request.input])


def worded(question: Question, labels: Labels) -> Worded:
    """The question with its labels. HttpError 400 for equal choices, and if there are too few labels."""
    asked = _text(question.instructions)
    if isinstance(question, PredicateQuestion):
        found = labels.yes_and_no()
        yes, no = found
        text = f"Is this statement true of what stands above?\n{asked}\n{yes}: it is true\n{no}: it is not true"
        return Worded(text + LAST_WORDS, tuple(found.values()))
    options = question.choices if isinstance(question, ChoiceQuestion) else question.levels
    values = [(type(one.value), one.value) for one in options] if isinstance(question, ChoiceQuestion) else ()  # type: ignore[union-attr]
    if len(set(values)) < len(values):
        raise conflict("questions: a choice is there twice", "questions")
    found = labels.letters(len(options))
    kind = "Choices" if isinstance(question, ChoiceQuestion) else "Levels, from the lowest to the highest"
    lines = [
        f"{label}: {option.shown}" + (f" ({option.description})" if option.description else "")
        for label, option in zip(found, options, strict=True)
    ]
    return Worded("\n".join([asked, f"{kind}:", *lines]) + LAST_WORDS, tuple(found.values()))


def plain(messages: Sequence[dict[str, Any]]) -> str:
    """Messages as text, for a model without a chat template. A single user message is unchanged."""
    if [message["role"] for message in messages] == ["user"]:
        return messages[0]["content"]
    lines = []
    for message in messages:
        said = [message.get("content") or ""]
        for call in message.get("tool_calls", ()):
            said.append(f"{call['function']['name']} {call['function']['arguments']}")
        lines.append(f"{message['role']}: {' '.join(filter(None, said))}")
    return "\n".join(lines)


def _item(item: DecisionItem) -> Item:
    """An item of the input in the form of /v1/responses."""
    if isinstance(item, DecisionMessage):
        return InputMessage(item.role, _text(item.content))
    if isinstance(item, CustomCall):
        return FunctionCallItem(item.call_id, item.name, _encoder.encode({"input": item.input}).decode())
    if isinstance(item, CustomCallOutput):
        return FunctionCallOutput(item.call_id, text_of(item.output))
    return item


def _text(content: str | Sequence[DecisionPart]) -> str:
    return content if isinstance(content, str) else "\n".join(map(_part, content))


def _part(part: DecisionPart) -> str:
    if isinstance(part, InputJson):
        return _json(part.data)
    return part.refusal if isinstance(part, ResponseRefusalPart) else part.text


def _json(data: Any) -> str:
    """Compact JSON. HttpError 400 beyond the bounds of the API."""
    text = _encoder.encode(data)
    levels, values = limits.JSON_LEVELS, limits.JSON_VALUES
    if depth(data) > levels or len(text) > limits.JSON_BYTES or sum(1 for _ in _values(data)) > values:
        raise HttpError(
            400,
            f"input_json: at most {levels} levels, {values} values and {limits.JSON_BYTES} bytes",
            "input",
            "invalid_value",
        )
    return text.decode()


def _values(data: Any) -> Iterator[Any]:
    inside = data.values() if isinstance(data, dict) else data if isinstance(data, list) else ()
    for value in inside:
        yield value
        yield from _values(value)
