"""Clients as people use them, against a server that runs: a table of client x feature.

    python -m venv build/clients && build/clients/bin/pip install -r benchmarks/clients/requirements.txt
    .venv/bin/icc serve build/pystd.engine --chat-template benchmarks/clients/hermes.jinja
    build/clients/bin/python benchmarks/clients/try.py --out benchmarks/results/clients.md

The model need not be able to chat: what is tried is that requests are taken and answers have the forms that the clients
read. Every call is the client's own; nothing is patched.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import openai
from pydantic import BaseModel

PACKAGES = {"langchain": "langchain-openai", "llama-index": "llama-index-core", "pydantic-ai": "pydantic-ai-slim"}
FEATURES: dict[tuple[str, str], Callable[[Server], None]] = {}


class Server:
    def __init__(self, url: str) -> None:
        self.url = url
        self.client = openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=120)
        self.model = next(iter(self.client.models.list())).id


class Place(BaseModel):
    name: Literal["Oslo", "Rome"]


class Trip(BaseModel):
    """A trip from one place to another."""

    first: Place
    second: Place
    days: Literal[3, 5]


def book(first: Place, second: Place) -> str:
    """Book a trip."""
    return "booked"


book.__annotations__ = {"first": Place, "second": Place, "return": str}  # llama-index reads no texts
USER = {"role": "user", "content": "Plan a trip."}


def feature(client: str, name: str) -> Callable[[Callable[[Server], None]], Callable[[Server], None]]:
    def add(check: Callable[[Server], None]) -> Callable[[Server], None]:
        FEATURES[client, name] = check
        return check

    return add


# -- openai ----------------------------------------------------------------------------------------------------------


@feature("openai", "chat")
def openai_chat(server: Server) -> None:
    answer = server.client.chat.completions.create(model=server.model, messages=[USER], max_tokens=8)
    assert answer.usage and answer.usage.completion_tokens > 0


@feature("openai", "stream")
def openai_stream(server: Server) -> None:
    chunks = list(server.client.chat.completions.create(model=server.model, messages=[USER], max_tokens=8, stream=True))
    assert chunks[-1].choices[0].finish_reason in ("length", "stop")


@feature("openai", "structured output")
def openai_parse(server: Server) -> None:
    answer = server.client.chat.completions.parse(
        model=server.model, messages=[USER], response_format=Trip, max_tokens=200
    )
    assert isinstance(answer.choices[0].message.parsed, Trip)


@feature("openai", "tool loop")
def openai_tools(server: Server) -> None:
    messages: list[Any] = [USER]
    for _ in range(2):
        answer = server.client.chat.completions.parse(
            model=server.model,
            messages=messages,
            tools=[openai.pydantic_function_tool(Trip)],
            tool_choice="required",
            parallel_tool_calls=False,
            max_tokens=300,
        )
        message = answer.choices[0].message
        [call] = message.tool_calls or []
        assert isinstance(call.function.parsed_arguments, Trip)
        messages += [message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "booked"}]


@feature("openai", "context overflow")
def openai_overflow(server: Server) -> None:
    try:
        server.client.chat.completions.create(model=server.model, messages=[{**USER, "content": "x " * 100_000}])
    except openai.BadRequestError as error:
        assert error.code == "context_length_exceeded"
    else:
        raise AssertionError("not refused")


# -- instructor ------------------------------------------------------------------------------------------------------


def _instructor(server: Server, mode: str) -> None:
    import instructor

    client = instructor.from_openai(server.client, mode=getattr(instructor.Mode, mode))
    trip = client.chat.completions.create(
        model=server.model, messages=[USER], response_model=Trip, max_tokens=300, max_retries=0
    )
    assert isinstance(trip, Trip)


@feature("instructor", "tool loop")
def instructor_tools(server: Server) -> None:
    _instructor(server, "TOOLS")


@feature("instructor", "structured output")
def instructor_schema(server: Server) -> None:
    _instructor(server, "JSON_SCHEMA")


# -- pydantic-ai -----------------------------------------------------------------------------------------------------


def _agent(server: Server, output: Any) -> Any:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel(server.model, provider=OpenAIProvider(base_url=server.url, api_key="none"))
    return Agent(model, output_type=output, model_settings={"max_tokens": 300})


@feature("pydantic-ai", "chat")
def agent_chat(server: Server) -> None:
    assert _agent(server, str).run_sync("Hello", model_settings={"max_tokens": 16}).usage.output_tokens


@feature("pydantic-ai", "tool loop")
def agent_tools(server: Server) -> None:
    assert isinstance(_agent(server, Trip).run_sync("Plan a trip.").output, Trip)


@feature("pydantic-ai", "structured output")
def agent_native(server: Server) -> None:
    from pydantic_ai import NativeOutput

    assert isinstance(_agent(server, NativeOutput(Trip)).run_sync("Plan a trip.").output, Trip)


@feature("pydantic-ai", "stream")
def agent_stream(server: Server) -> None:
    async def run() -> str:
        async with _agent(server, str).run_stream("Hello", model_settings={"max_tokens": 16}) as result:
            return "".join([piece async for piece in result.stream_text(delta=True)])

    assert asyncio.run(run())


# -- litellm ---------------------------------------------------------------------------------------------------------


def _litellm(server: Server, **fields: Any) -> Any:
    import litellm

    model = f"openai/{server.model}"
    return litellm.completion(model=model, api_base=server.url, api_key="none", **{"messages": [USER], **fields})


@feature("litellm", "chat")
def litellm_chat(server: Server) -> None:
    assert _litellm(server, max_tokens=8).usage.completion_tokens > 0


@feature("litellm", "stream")
def litellm_stream(server: Server) -> None:
    assert [chunk for chunk in _litellm(server, max_tokens=8, stream=True)]


@feature("litellm", "structured output")
def litellm_schema(server: Server) -> None:
    answer = _litellm(server, response_format=Trip, max_tokens=200)
    assert Trip.model_validate_json(answer.choices[0].message.content)


@feature("litellm", "tool loop")
def litellm_tools(server: Server) -> None:
    messages: list[Any] = [USER]
    tool = openai.pydantic_function_tool(Trip)
    for _ in range(2):
        fields = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 300}
        message = _litellm(server, messages=messages, **fields).choices[0].message
        [call] = message.tool_calls
        Trip.model_validate_json(call.function.arguments)
        messages += [message.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "booked"}]


@feature("litellm", "context overflow")
def litellm_overflow(server: Server) -> None:
    """Its fallback to a model with more context fires."""
    import litellm

    try:
        _litellm(server, messages=[{**USER, "content": "x " * 100_000}])
    except litellm.ContextWindowExceededError:
        pass
    else:
        raise AssertionError("not refused")


# -- langchain -------------------------------------------------------------------------------------------------------


def _langchain(server: Server) -> Any:
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(model=server.model, base_url=server.url, api_key="none", max_tokens=300, max_retries=0)


@feature("langchain", "chat")
def langchain_chat(server: Server) -> None:
    assert _langchain(server).invoke("Hello", max_tokens=8).usage_metadata["output_tokens"] > 0


@feature("langchain", "stream")
def langchain_stream(server: Server) -> None:
    assert list(_langchain(server).stream("Hello", max_tokens=8))


@feature("langchain", "structured output")
def langchain_schema(server: Server) -> None:
    assert isinstance(_langchain(server).with_structured_output(Trip, method="json_schema").invoke("Plan."), Trip)


@feature("langchain", "tool loop")
def langchain_tools(server: Server) -> None:
    from langchain_core.messages import HumanMessage, ToolMessage

    model = _langchain(server).bind_tools([Trip], tool_choice="any", strict=True, parallel_tool_calls=False)
    messages: list[Any] = [HumanMessage("Plan a trip.")]
    for _ in range(2):
        answer = model.invoke(messages)
        [call] = answer.tool_calls
        Trip.model_validate(call["args"])
        messages += [answer, ToolMessage("booked", tool_call_id=call["id"])]


# -- llama-index -----------------------------------------------------------------------------------------------------


def _llama_index(server: Server) -> Any:
    from llama_index.llms.openai_like import OpenAILike

    return OpenAILike(
        model=server.model, api_base=server.url, api_key="none", is_chat_model=True, is_function_calling_model=True,
        max_tokens=300, context_window=2048, max_retries=0,
    )  # fmt: skip


@feature("llama-index", "chat")
def llama_index_chat(server: Server) -> None:
    assert _llama_index(server).complete("Hello", max_tokens=8).raw.usage.completion_tokens > 0


@feature("llama-index", "stream")
def llama_index_stream(server: Server) -> None:
    assert list(_llama_index(server).stream_complete("Hello", max_tokens=8))


@feature("llama-index", "tool loop")
def llama_index_tools(server: Server) -> None:
    from llama_index.core.tools import FunctionTool

    tool = FunctionTool.from_defaults(fn=book)
    response = _llama_index(server).chat_with_tools([tool], user_msg="Plan a trip.", tool_required=True)
    assert _llama_index(server).get_tool_calls_from_response(response)


def table(results: dict[tuple[str, str], str]) -> str:
    clients = list(dict.fromkeys(client for client, _ in results))
    features = list(dict.fromkeys(name for _, name in results))
    lines = ["| client | " + " | ".join(features) + " |", "|---" * (len(features) + 1) + "|"]
    for client in clients:
        package = {
            "langchain": "langchain-openai",
            "llama-index": "llama-index-core",
            "pydantic-ai": "pydantic-ai-slim",
        }
        version = importlib.metadata.version(package.get(client, client))
        lines.append(f"| {client} {version} | " + " | ".join(results.get((client, one), "") for one in features) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Try clients against a server.")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    server = Server(options.url)
    results: dict[tuple[str, str], str] = {}
    for key, check in FEATURES.items():
        try:
            check(server)
            results[key] = "works"
        except Exception as error:
            results[key] = f"fails: {type(error).__name__}"
            print(*key, json.dumps(str(error)[:500]))
    shown = table(results)
    print(shown)
    if options.out is not None:
        options.out.write_text(f"# Clients\n\n`benchmarks/clients/try.py`, every call the client's own.\n\n{shown}\n")


if __name__ == "__main__":
    main()
