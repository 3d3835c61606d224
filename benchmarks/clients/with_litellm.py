"""LiteLLM: OpenAI's and Anthropic's API, an agent's loop, and the fallback of a context that is too long."""

from __future__ import annotations

import json

import litellm
from features import WORDS, report, url

litellm.telemetry = False
USER = [{"role": "user", "content": "hi"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def ask(**fields):
    fields = {"messages": USER, "model": "openai/scripted", "api_base": f"{url()}/v1", "api_key": "none", **fields}
    return litellm.completion(**fields)


def chat() -> None:
    assert ask().choices[0].message.content == WORDS


def stream() -> None:
    assert "".join(chunk.choices[0].delta.content or "" for chunk in ask(stream=True)) == WORDS


def tool_loop() -> None:
    first = ask(tools=[TOOL]).choices[0].message
    [call] = first.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Oslo"}
    result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    assert ask(tools=[TOOL], messages=[*USER, first.model_dump(), result]).choices[0].message.content == WORDS


def structured() -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    assert isinstance(json.loads(ask(response_format=wanted).choices[0].message.content)["n"], int)


def context_fallback() -> None:
    try:
        ask(messages=[{"role": "user", "content": "a" * 20_000}])
    except litellm.ContextWindowExceededError:
        return
    raise AssertionError("no ContextWindowExceededError")


def anthropic_api() -> None:
    answer = ask(model="anthropic/scripted", api_base=url(), max_tokens=50)
    assert answer.choices[0].message.content == WORDS


def responses_api() -> None:
    answer = litellm.responses(model="openai/scripted", input="hi", api_base=f"{url()}/v1", api_key="none")
    assert answer.output[0].content[0].text == WORDS


report({f.__name__: f for f in (chat, stream, tool_loop, structured, context_fallback, anthropic_api, responses_api)})
