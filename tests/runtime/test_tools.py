"""Tools from Python: tool calls in whole and streamed answers, from asyncio, and forced calls."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from icc.runtime.async_llm import AsyncLLM
from icc.runtime.errors import RequestError
from icc.runtime.llm import LLM
from icc.runtime.loop.fake import FakeExecutor
from icc.runtime.requests.params import SamplingParams
from icc.runtime.templates.source import TemplateSource
from icc.runtime.tokenizer import Tokenizer

from .server.call_templates import CALL_TEMPLATES
from .server.chat_templates import TEMPLATES

EOS, VOCAB = 257, 258
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
ASKED = [{"role": "user", "content": "Rain?"}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
GREEDY = SamplingParams(max_tokens=300, temperature=0.0)


def saying(answer: str) -> Callable[[Sequence[int], int], int]:
    """A rule by which the model gives this answer to every conversation."""
    mark, said = b"<|im_start|>assistant\n", answer.encode()

    def rule(context: Sequence[int], vocab_size: int) -> int:
        text = bytes(token if token < 256 else 0 for token in context)
        done = len(text) - text.rindex(mark) - len(mark)
        return said[done] if done < len(said) else EOS

    return rule


@pytest.fixture
def model(toy_manifest: Callable[..., Any], byte_tokenizer_file: Path) -> Callable[..., LLM]:
    """model(answer, template=...): a model that always gives this answer, with a published chat template."""
    tokenizer = Tokenizer(byte_tokenizer_file.read_bytes())

    def make(answer: str, template: str = "qwen-3") -> LLM:
        executor = FakeExecutor(vocab_size=VOCAB, num_blocks=4000, max_step_tokens=512, rule=saying(answer))
        manifest = toy_manifest(max_seq_len=3000, max_step_tokens=512)
        return LLM(manifest, executor, tokenizer, template=TemplateSource(*(CALL_TEMPLATES | TEMPLATES)[template]))

    return make


def test_a_call_is_read_answered_and_gone_on_from(model: Callable[..., LLM]) -> None:
    llm = model(f"<think>\nHm.\n</think>\n\nI look.\n{CALL}")
    answer = llm.chat(ASKED, GREEDY, tools=[TOOL])
    [call] = answer.tool_calls
    assert (answer.text, answer.reasoning, answer.finish_reason) == ("I look.", "Hm.", "tool_calls")
    assert call.name == "weather" and json.loads(call.arguments) == {"city": "Oslo"} and call.id.startswith("call_")
    assert answer.message["tool_calls"][0]["function"] == {"name": "weather", "arguments": call.arguments}
    result = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    shown = llm.render([*ASKED, answer.message, result], tools=[TOOL])
    assert '"arguments": {"city": "Oslo"}' in shown and "<|im_start|>tool\nrain<|im_end|>" in shown
    two = llm.chat([ASKED, ASKED], GREEDY, tools=[TOOL["function"]])  # the older form of a tool
    assert [one.tool_calls[0].name for one in two] == ["weather", "weather"]


def test_calls_and_thoughts_are_streamed_as_they_become_whole(model: Callable[..., LLM]) -> None:
    llm = model(f"<think>\nHm.\n</think>\n\nI look.\n{CALL}\n{CALL.replace('Oslo', 'Rome')}")
    pieces = list(llm.stream(ASKED, GREEDY, tools=[TOOL]))
    assert "".join(pieces) == "I look." and "".join(piece.reasoning for piece in pieces) == "Hm."
    calls = [call for piece in pieces for call in piece.tool_calls]
    assert [json.loads(call.arguments)["city"] for call in calls] == ["Oslo", "Rome"]
    assert [piece.finish_reason for piece in pieces if piece.finish_reason] == ["tool_calls"]
    one = list(llm.stream(ASKED, GREEDY, tools=[TOOL], parallel_tool_calls=False))
    assert len(one) < len(pieces) and sum(len(piece.tool_calls) for piece in one) == 1
    assert one[-1].finish_reason == "tool_calls" and not llm.loop.has_work()


def test_from_asyncio_too(model: Callable[..., LLM]) -> None:
    async def main() -> None:
        async with AsyncLLM(lambda: model(f"I look.\n{CALL}")) as llm:
            answer = await llm.chat(ASKED, GREEDY, tools=[TOOL])
            assert (answer.text, answer.tool_calls[0].name) == ("I look.", "weather")
            pieces = [piece async for piece in llm.stream(ASKED, GREEDY, tools=[TOOL], parallel_tool_calls=False)]
            assert [call.name for piece in pieces for call in piece.tool_calls] == ["weather"]
            assert pieces[-1].finish_reason == "tool_calls"

    asyncio.run(main())


def test_a_call_that_is_cut_off_says_so(model: Callable[..., LLM]) -> None:
    answer = model(CALL).chat(ASKED, SamplingParams(max_tokens=50, temperature=0.0), tools=[TOOL])
    assert answer.finish_reason == "length" and answer.tool_calls[0].name == "weather"
    assert model("No rain.").chat(ASKED, GREEDY, tools=[TOOL]).finish_reason == "stop"
    plain = model(CALL).chat(ASKED, GREEDY, tools=[TOOL], tool_choice="none")
    assert plain.text == CALL and not plain.tool_calls  # it was shown no tools


@pytest.mark.parametrize("choice", ["required", "weather", {"type": "function", "function": {"name": "weather"}}])
def test_a_call_can_be_forced(model: Callable[..., LLM], choice: Any) -> None:
    answer = model("No.").chat(ASKED, GREEDY, tools=[TOOL], tool_choice=choice, parallel_tool_calls=False)
    assert answer.tool_calls[0].name == "weather" and answer.finish_reason == "tool_calls"
    assert json.loads(answer.tool_calls[0].arguments)["city"] in ("Oslo", "Rome")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tools": [{"type": "function"}]}, "no name"),
        ({"tools": [{"name": "f", "parameters": 1}]}, "no JSON schema"),
        ({"tools": [TOOL], "tool_choice": "g"}, "none of the tools"),
        ({"tool_choice": "required"}, "no tools"),
        ({"tools": [TOOL], "tool_choice": "required", "params": SamplingParams(regex="a")}, "cannot follow"),
    ],
)
def test_what_cannot_be_offered_is_refused(model: Callable[..., LLM], options: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        model("x").chat(ASKED, **options)


def test_a_schema_is_followed_behind_a_thought_and_no_stop_cuts_it(model: Callable[..., LLM]) -> None:
    llm = model("<think>", "qwen-3-thinking")
    schema = {"type": "object", "properties": {"a": {"const": "x"}}, "required": ["a"], "additionalProperties": False}
    params = SamplingParams(max_tokens=50, temperature=0.0, json_schema=schema, stop=("x",), stop_token_ids=(34,))
    answer = llm.chat(ASKED, params)
    assert json.loads(answer.text) == {"a": "x"} and answer.finish_reason == "stop"
    assert llm.tokenizer is not None and llm.tokenizer.decode(answer.prompt_token_ids).endswith("</think>\n\n")


# -- templates that know no tools --------------------------------------------------------------------------------------


def compact(city: str, name: str = "weather") -> str:
    return f'<tool_call>\n{{"name":"{name}","arguments":{{"city":"{city}"}}}}\n</tool_call>'


def test_a_model_whose_template_has_no_tools_is_told_in_words(model: Callable[..., LLM]) -> None:
    llm = model(f"I look.\n{compact('Oslo')}\n{compact('Rome')}", "chatml")
    shown = llm.render([{"role": "system", "content": "Be kind."}, *ASKED], tools=[TOOL])
    assert shown.startswith("<|im_start|>system\nBe kind.\n\nYou can call these tools:\n")
    assert '"name":"weather"' in shown
    answer = llm.chat(ASKED, GREEDY, tools=[TOOL])
    assert (answer.text, answer.finish_reason) == ("I look.", "tool_calls")
    assert [json.loads(call.arguments)["city"] for call in answer.tool_calls] == ["Oslo", "Rome"]
    one = llm.chat(ASKED, GREEDY, tools=[TOOL], parallel_tool_calls=False)
    assert [json.loads(call.arguments)["city"] for call in one.tool_calls] == ["Oslo"]
    pieces = [piece for piece in llm.stream(ASKED, GREEDY, tools=[TOOL])]
    assert "".join(piece.text for piece in pieces) == "I look."
    assert len([call for piece in pieces for call in piece.tool_calls if call.name]) == 2

    results = [
        {"role": "tool", "tool_call_id": call.id, "content": said}
        for call, said in zip(answer.tool_calls, ("rain", "sun"), strict=True)
    ]
    told = llm.render([*ASKED, answer.message, *results, {"role": "user", "content": "So?"}], tools=[TOOL])
    turn = f"<|im_start|>assistant\nI look.\n{compact('Oslo')}\n{compact('Rome')}<|im_end|>\n<|im_start|>user\n"
    given = "".join(f"<tool_response>\nweather: {said}\n</tool_response>\n" for said in ("rain", "sun"))
    assert turn + given + "So?<|im_end|>\n<|im_start|>assistant\n" in told


def test_the_choice_among_tools_told_in_words(model: Callable[..., LLM]) -> None:
    nothing = {"type": "object", "additionalProperties": False}
    other = {"type": "function", "function": {"name": "other", "parameters": nothing}}
    llm = model("No.", "chatml")
    words = llm.chat(ASKED, GREEDY, tools=[TOOL])
    assert (words.text, words.finish_reason, words.tool_calls) == ("No.", "stop", ())
    none = llm.render(ASKED, tools=None)
    assert "tool" not in none and llm.chat(ASKED, GREEDY, tools=[TOOL], tool_choice="none").text == "No."
    for choice, names in (("required", {"weather", "other"}), ({"function": {"name": "other"}}, {"other"})):
        forced = llm.chat(ASKED, GREEDY, tools=[TOOL, other], tool_choice=choice, parallel_tool_calls=False)
        assert {call.name for call in forced.tool_calls} <= names and len(forced.tool_calls) == 1
        assert not forced.text and forced.finish_reason == "tool_calls"


def test_a_call_that_begins_in_words_is_whole_and_of_a_tool_that_there_is(model: Callable[..., LLM]) -> None:
    """The model would call an unknown tool, with an argument that no schema has; stop strings still work."""
    llm = model("Hm. " + compact("Atlantis", "nothing"), "chatml")
    [call] = llm.chat(ASKED, GREEDY, tools=[TOOL], parallel_tool_calls=False).tool_calls
    assert call.name == "weather" and json.loads(call.arguments)["city"] in ("Oslo", "Rome")
    stopped = llm.chat(ASKED, SamplingParams(max_tokens=300, temperature=0.0, stop=("m.",)), tools=[TOOL])
    assert (stopped.text, stopped.tool_calls) == ("H", ())
    free = llm.chat(ASKED, SamplingParams(max_tokens=300, temperature=0.0, min_tokens=2), tools=[TOOL])
    assert not free.tool_calls and "nothing" in free.text  # min_tokens excludes grammars


def test_a_template_without_a_system_is_told_by_its_user(model: Callable[..., LLM]) -> None:
    llm = model("No.", "gemma")
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    turns = [
        *ASKED,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "rain"},
    ]
    shown = llm.render(turns, tools=[TOOL])
    assert "<start_of_turn>user\nYou can call these tools:" in shown and "Rain?<end_of_turn>" in shown
    assert f"<start_of_turn>model\n{compact('Oslo')}<end_of_turn>" in shown
    assert "<start_of_turn>user\n<tool_response>\nweather: rain\n</tool_response><end_of_turn>" in shown
