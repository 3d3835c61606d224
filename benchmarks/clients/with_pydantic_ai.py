"""pydantic-ai: agents with tools and typed answers over OpenAI's two APIs and Anthropic's."""

from __future__ import annotations

import asyncio

from features import WORDS, report, url
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

OPENAI = OpenAIProvider(base_url=f"{url()}/v1", api_key="none")
CHAT = OpenAIChatModel("scripted", provider=OPENAI)


class Address(BaseModel):
    city: str


class Person(BaseModel):
    name: str
    address: Address


def loop(model) -> None:
    agent = Agent(model)
    called = []

    @agent.tool_plain
    def weather(city: str) -> str:
        called.append(city)
        return "rain"

    assert agent.run_sync("hi").output == WORDS and called == ["Oslo"], called


def agent() -> None:
    loop(CHAT)


def stream() -> None:
    async def run() -> str:
        async with Agent(CHAT).run_stream("hi") as answer:
            return await answer.get_output()

    assert asyncio.run(run()) == WORDS


def tool_output() -> None:
    assert isinstance(Agent(CHAT, output_type=Person).run_sync("hi").output, Person)


def native_output() -> None:
    assert isinstance(Agent(CHAT, output_type=NativeOutput(Person)).run_sync("hi").output, Person)


def responses_api() -> None:
    loop(OpenAIResponsesModel("scripted", provider=OPENAI))


def anthropic_api() -> None:
    loop(AnthropicModel("scripted", provider=AnthropicProvider(base_url=url(), api_key="none")))


report({f.__name__: f for f in (agent, stream, tool_output, native_output, responses_api, anthropic_api)})
