"""LangChain: chat, streams, tools and structured output over OpenAI's two APIs and Anthropic's."""

from __future__ import annotations

from features import WORDS, report, url
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class Pet(BaseModel):
    kind: str
    legs: int


@tool
def weather(city: str) -> str:
    """The weather of a city."""
    return f"rain in {city}"


def model(**fields) -> ChatOpenAI:
    return ChatOpenAI(model="scripted", base_url=f"{url()}/v1", api_key="none", max_retries=0, **fields)


def loop(chat) -> None:
    bound = chat.bind_tools([weather])
    turns = [HumanMessage("hi")]
    turns.append(bound.invoke(turns))
    [call] = turns[-1].tool_calls
    assert call["args"] == {"city": "Oslo"}, call
    turns.append(ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"]))
    answer = bound.invoke(turns)
    assert WORDS in str(answer.content), answer


def chat() -> None:
    assert model().invoke("hi").content == WORDS


def stream() -> None:
    assert "".join(str(chunk.content) for chunk in model().stream("hi")) == WORDS


def tools() -> None:
    loop(model())


def structured() -> None:
    assert isinstance(model().with_structured_output(Pet).invoke("hi"), Pet)


def responses_api() -> None:
    loop(model(use_responses_api=True))


def anthropic_api() -> None:
    loop(ChatAnthropic(model="scripted", base_url=url(), api_key="none", max_retries=0, max_tokens=300))


report({f.__name__: f for f in (chat, stream, tools, structured, responses_api, anthropic_api)})
