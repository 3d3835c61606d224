"""One conversation, given to the library and to the server: the engine gets equal requests, and answers are read
alike."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from icc.runtime.grammars.compiling import lowered
from icc.runtime.llm import LLM
from icc.runtime.loop.fake import FakeExecutor
from icc.runtime.requests.params import SamplingParams
from icc.runtime.server.api.jobs import Job, Jobs
from icc.runtime.server.api.keys import ApiKeys
from icc.runtime.server.api.model import ServedModel
from icc.runtime.server.api.requests import ChatRequest, CompletionRequest
from icc.runtime.server.api.sandbox import Sandbox
from icc.runtime.server.http.bodies import decoded
from icc.runtime.templates.source import TemplateSource
from icc.runtime.templates.template_input import TemplateInput, rendered
from icc.runtime.tokenizer import Tokenizer

from .call_templates import CALL_TEMPLATES

TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in ("rain", "wind")
]
ASKED = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Rain?"}]
BEGUN = [*ASKED, {"role": "assistant", "content": "<think>\nI look"}]
SCHEMA = {"type": "object", "properties": {"wet": {"type": "boolean"}}}


class Rendered:
    """A sandbox that renders templates and lowers grammars in this process."""

    def __init__(self, source: TemplateSource) -> None:
        self._template = source.open()

    async def render(self, given: TemplateInput) -> str:
        assert self._template is not None
        return rendered(self._template, given)

    async def lower(self, grammar: str, field: str = "") -> str:
        return lowered(grammar)


class Sides:
    """One model behind the library and the server."""

    def __init__(self, manifest: Any, tokenizer: Tokenizer, name: str) -> None:
        source = TemplateSource(*CALL_TEMPLATES[name])
        self.llm = LLM(manifest, FakeExecutor(vocab_size=258, num_blocks=900), tokenizer, template=source)
        model = ServedModel("m", 0, manifest, tokenizer, source)
        self.jobs = Jobs(model, cast(Sandbox, Rendered(source)), ApiKeys())

    def served(self, kind: Any, **body: Any) -> Job:
        request = decoded(json.dumps({"model": "m", **body}).encode(), kind)
        ask = self.jobs.chat if kind is ChatRequest else self.jobs.completion
        return asyncio.run(ask(request, ""))


@pytest.fixture(params=["qwen-3", "qwen-3-thinking", "harmony", "mistral-v3"])
def sides(request: Any, toy_manifest: Callable[..., Any], byte_tokenizer_file: Path) -> Sides:
    manifest = toy_manifest(max_seq_len=3000, max_step_tokens=512)
    return Sides(manifest, Tokenizer(byte_tokenizer_file.read_bytes()), request.param)


CASES: list[tuple[list[dict[str, Any]], SamplingParams | None, dict[str, Any], dict[str, Any]]] = [
    (ASKED, None, {}, {}),
    (ASKED, SamplingParams(max_tokens=9, top_k=3, n=2), {}, {"max_tokens": 9, "top_k": 3, "n": 2}),
    (ASKED, None, {"tools": TOOLS}, {"tools": TOOLS}),
    (ASKED, None, {"tools": TOOLS, "tool_choice": "none"}, {"tools": TOOLS, "tool_choice": "none"}),
    (
        ASKED,
        SamplingParams(max_tokens=40, stop=("x",)),
        {"tools": TOOLS, "tool_choice": "wind", "parallel_tool_calls": False},
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "wind"}}, "max_tokens": 40,
         "stop": "x"},
    ),
    (ASKED, None, {"tools": TOOLS, "tool_choice": "required"}, {"tools": TOOLS, "tool_choice": "required"}),
    (
        ASKED,
        SamplingParams(max_tokens=40, json_schema=SCHEMA, stop=("x",)),
        {},
        {"max_tokens": 40, "guided_json": SCHEMA, "stop": "x"},
    ),
    (ASKED, SamplingParams(max_tokens=40, regex="a+"), {"tools": TOOLS},
     {"tools": TOOLS, "max_tokens": 40, "guided_regex": "a+"}),
    (BEGUN, None, {"continue_final_message": True}, {"continue_final_message": True}),
    (ASKED, None, {"add_generation_prompt": False}, {"add_generation_prompt": False}),
    (
        ASKED,
        None,
        {"chat_template_kwargs": {"enable_thinking": False}, "documents": [{"text": "x"}]},
        {"chat_template_kwargs": {"enable_thinking": False}, "documents": [{"text": "x"}]},
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(CASES)))
def test_a_conversation_becomes_one_query(sides: Sides, case: int) -> None:
    messages, params, options, fields = CASES[case]
    query = sides.llm.prompting.query(messages, params, options)  # type: ignore[arg-type]
    job = sides.served(ChatRequest, messages=messages, **fields)
    [submit] = job.submits
    assert list(submit.prompt) == list(query.token_ids)
    wanted = {name: getattr(query.params, name) for name in SamplingParams.__slots__}
    wanted |= {"json_schema": None, "regex": None, "grammar": None}  # the server lowers them to a grammar
    assert {name: getattr(submit.params, name) for name in SamplingParams.__slots__} == wanted
    assert submit.grammar == (lowered(query.grammar) if query.grammar else "")
    assert (job.read is None) == (query.read is None)
    if query.read is not None and job.read is not None:
        mine, theirs = query.read(), job.read()
        text = "</think>\n\nIt rains.<tool_call>\n"
        assert [*mine.push(text), *mine.finish()] == [*theirs.push(text), *theirs.finish()]
    assert bool(query.grammar) == (bool(options.get("tool_choice") in ("wind", "required")) or case in (6, 7))


def test_a_text_becomes_one_query_but_for_defaults(sides: Sides) -> None:
    """By default a completion over HTTP has 16 tokens and temperature 1, as at OpenAI."""
    form = {"max_tokens": 5, "temperature": 0.5, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
    query = sides.llm.prompting.query("ab", SamplingParams(**form, seed=1, regex="a+", stop=("x",)), {})  # type: ignore[arg-type]
    [submit] = sides.served(CompletionRequest, prompt="ab", **form, seed=1, guided_regex="a+", stop="x").submits
    assert list(submit.prompt) == list(query.token_ids) and submit.grammar == lowered(query.grammar)
    assert (submit.params.stop, submit.params.max_tokens) == (query.params.stop, 5) == ((), 5)
    [plain] = sides.served(CompletionRequest, prompt="ab").submits
    assert (plain.params.max_tokens, plain.params.temperature, plain.grammar) == (16, 1.0, "")
    assert sides.llm.prompting.query("ab", None, {}).params == SamplingParams()
