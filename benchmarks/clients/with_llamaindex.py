"""LlamaIndex: chat, completion, streams and tools through OpenAILike."""

from __future__ import annotations

from features import WORDS, report, url
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike

LLM = OpenAILike(
    model="scripted",
    api_base=f"{url()}/v1",
    api_key="none",
    is_chat_model=True,
    is_function_calling_model=True,
    context_window=8192,
    max_retries=0,
)
USER = [ChatMessage(role="user", content="hi")]


def weather(city: str) -> str:
    """The weather of a city."""
    return f"rain in {city}"


def chat() -> None:
    assert LLM.chat(USER).message.content == WORDS


def stream() -> None:
    assert [chunk.message.content for chunk in LLM.stream_chat(USER)][-1] == WORDS


def completion() -> None:
    plain = OpenAILike(model="scripted", api_base=f"{url()}/v1", api_key="none", max_tokens=5)
    assert plain.complete("a").text == "bcdef"


def tools() -> None:
    offered = [FunctionTool.from_defaults(weather)]
    answer = LLM.chat_with_tools(offered, user_msg="hi")
    [call] = LLM.get_tool_calls_from_response(answer)
    assert call.tool_kwargs == {"city": "Oslo"}, call
    result = ChatMessage(role="tool", content="rain", additional_kwargs={"tool_call_id": call.tool_id})
    assert LLM.chat_with_tools(offered, chat_history=[*USER, answer.message, result]).message.content == WORDS


report({f.__name__: f for f in (chat, stream, completion, tools)})
