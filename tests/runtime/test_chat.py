"""Conversations, streams and structured output from Python, over fakes and toy engines."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import icc
import pytest
from icc.runtime.errors import MissingExtraError, RequestError, UsageError
from icc.runtime.format.manifest import SamplingDefaults
from icc.runtime.llm import LLM
from icc.runtime.loop.fake import FakeDevice, FakeExecutor, successor
from icc.runtime.requests.params import SamplingParams
from icc.runtime.templates.messages import prepared
from icc.runtime.templates.source import TemplateSource, read_template
from icc.runtime.tokenizer import Tokenizer

VOCAB = 258
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}<eos>{% endfor %}"
    "{% if tools %}T{{ tools|length }}{% endif %}{% if add_generation_prompt %}[assistant]{{ mood }}{% endif %}"
)
HELLO = [{"role": "user", "content": "hi"}]
GREEDY = SamplingParams(max_tokens=4, temperature=0.0)


@pytest.fixture(params=[FakeExecutor, FakeDevice])
def llm(request: Any, toy_manifest: Callable[..., Any], byte_tokenizer_file: Path) -> LLM:
    """A model that counts upwards; its prompts are rendered by TEMPLATE."""
    executor = request.param(vocab_size=VOCAB, num_blocks=400, max_step_tokens=64, rule=successor)
    tokenizer = Tokenizer(byte_tokenizer_file.read_bytes())
    manifest = toy_manifest(max_seq_len=200)
    return LLM(manifest, executor, tokenizer, template=TemplateSource(TEMPLATE, {"bos_token": "<bos>"}))


def test_a_conversation_is_answered_through_the_template(llm: LLM) -> None:
    answer = llm.chat(HELLO, GREEDY)
    assert llm.tokenizer is not None
    assert llm.tokenizer.decode(answer.prompt_token_ids, skip_special_tokens=False) == ("<bos>[user]hi<eos>[assistant]")
    assert (answer.text, answer.finish_reason) == ("^_`a", "length")  # what follows "]"
    two = llm.chat([HELLO, [{"role": "system", "content": "s"}, *HELLO]], GREEDY)
    assert two[0] == answer and len(two[1].prompt_token_ids) == len(answer.prompt_token_ids) + len("[system]s") + 1


def test_how_a_conversation_is_put(llm: LLM) -> None:
    told = llm.render(HELLO, tools=[{"type": "function"}])  # icc can read no format of calls in the template
    assert told.startswith("<bos>[system]You can call these tools:") and told.endswith("<eos>[user]hi<eos>[assistant]")
    assert llm.render(HELLO, add_generation_prompt=False) == "<bos>[user]hi<eos>"
    begun = [*HELLO, {"role": "assistant", "content": "Well"}]
    assert llm.render(begun, continue_final_message=True) == "<bos>[user]hi<eos>[assistant]Well"
    assert llm.chat(begun, GREEDY, continue_final_message=True).text == "mnop"
    assert llm.render(HELLO, chat_template_kwargs={"mood": "!"}).endswith("[assistant]!")


def test_a_stream_takes_prompts_and_messages_and_ends_with_a_reason(llm: LLM) -> None:
    pieces = list(llm.stream(HELLO, GREEDY))
    assert "".join(pieces) == "^_`a" == "".join(piece.text for piece in pieces)
    assert b"".join(bytes(piece.token_ids) for piece in pieces) == b"^_`a"
    assert [piece.finish_reason for piece in pieces] == [None, None, None, "length"]
    ended = list(llm.stream("ab", SamplingParams(stop_token_ids=(101,), logprobs=1)))
    assert (ended[-1].text, ended[-1].token_ids, ended[-1].finish_reason) == ("", (101,), "stop")
    assert ended[0].logprobs is not None and ended[0].logprobs[0].token_id == 99
    assert repr(ended[0]) == "Increment('c', token_ids=(99,), finish_reason=None)"
    with pytest.raises(RequestError, match="for messages only"):
        llm.stream("a", tools=[])
    with pytest.raises(RequestError, match="n must be 1"):
        llm.stream("a", SamplingParams(n=2))


def test_what_an_answer_is_sampled_with(llm: LLM, toy_manifest: Callable[..., Any]) -> None:
    """By default the model's own parameters, or temperature 1, and the longest answer that fits into the context."""
    given = llm.prompting.chat_params(None, 50)
    assert (given.temperature, given.max_tokens) == (1.0, 150)
    assert llm.prompting.chat_params(GREEDY, 50).temperature == 0.0
    cool = toy_manifest(sampling=SamplingDefaults(temperature=0.3, top_k=7))
    params = LLM(cool, llm.executor).prompting.chat_params(SamplingParams(top_p=0.5), 10)
    assert (params.temperature, params.top_k, params.top_p, params.max_tokens) == (0.3, 7, 0.5, 128)


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "at least one message"),
        ("hi", "at least one message"),
        ({"role": "user", "content": "hi"}, "at least one message"),
        ([{"content": "hi"}], r"messages\[0\]: has no role"),
        ([*HELLO, "hi"], r"messages\[1\]: has no role"),
        ([{"role": "user", "content": 3}], r"messages\[0\]: content must be a text"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "a part of a content"),
        ([{"role": "assistant", "tool_calls": [{"function": {}}]}], "'arguments' is missing"),
    ],
)
def test_what_is_no_conversation_is_refused(messages: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        prepared(messages)


def test_messages_are_made_what_templates_expect() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    read = {**call, "function": {"name": "f", "arguments": {"a": 1}}}
    assert prepared(
        [
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": None},
            {"role": "assistant", "content": None, "tool_calls": [call]},
        ]
    ) == [
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "", "tool_calls": [read]},
    ]


def test_an_engine_without_template_says_so(llm: LLM) -> None:
    bare = LLM(llm.manifest, llm.executor, llm.tokenizer)
    with pytest.raises(RequestError, match="no chat template"):
        bare.chat(HELLO)
    with pytest.raises(RequestError, match="refuses these messages: never"):
        LLM(
            llm.manifest, llm.executor, llm.tokenizer, template=TemplateSource("{{ raise_exception('never') }}", {})
        ).chat(HELLO)


def test_without_minijinja_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "icc.runtime.templates.template", None)
    with pytest.raises(MissingExtraError, match="chat templates need"):
        TemplateSource("x", {}).open()


def test_where_the_template_stands() -> None:
    config = {"chat_template": [{"name": "default", "template": "D"}, {"name": "rag", "template": "R"}]}
    files = {"tokenizer_config.json": json.dumps({**config, "bos_token": {"content": "<s>"}}).encode()}
    assert read_template(files.get) == TemplateSource("D", {"bos_token": "<s>"}, {"rag": "R"})
    files["chat_template.jinja"] = b"J"
    files["additional_chat_templates/tool_use.jinja"] = b"T"
    found = read_template(files.get, files)
    assert found == TemplateSource("J", {"bos_token": "<s>"}, {"rag": "R", "tool_use": "T"})
    assert found.replaced("rag").text == "R" and found.replaced("{{ x }}") == TemplateSource(
        "{{ x }}", found.special_tokens
    )
    with pytest.raises(UsageError, match="no template of the model"):
        found.replaced("other")
    assert read_template({}.get).open() is None


def test_one_of_several_templates_is_chosen_as_transformers_does(llm: LLM) -> None:
    named = {"tool_use": "T{{ messages[0].content }}{{ tools | length }}", "rag": "R{{ documents[0].text }}"}
    several = LLM(llm.manifest, llm.executor, llm.tokenizer, template=TemplateSource("D", {}, named))
    assert several.render(HELLO) == "D"
    assert several.render(HELLO, tools=[{"type": "function"}]) == "D"  # icc cannot read T's calls
    assert several.render(HELLO, chat_template="rag", documents=[{"text": "x"}]) == "Rx"
    assert several.render(HELLO, tools=[{"type": "function"}], chat_template="default") == "D"
    with pytest.raises(RequestError, match="it has default, tool_use, rag"):
        several.render(HELLO, chat_template="other")
    only = LLM(llm.manifest, llm.executor, llm.tokenizer, template=TemplateSource("", {}, named))
    with pytest.raises(RequestError, match="no default chat template: choose one of tool_use, rag"):
        only.render(HELLO)


# -- structured output -------------------------------------------------------------------------------------------------

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("seed", range(3))
def test_a_schema_a_regex_and_a_grammar_are_followed(llm: LLM, seed: int) -> None:
    def text(**form: Any) -> str:
        params = SamplingParams(max_tokens=120, temperature=30.0, seed=seed, ignore_eos=True, **form)
        [completion] = llm.generate(["a"], params)
        assert completion.finish_reason == "stop"
        return completion.text

    for schema in (PERSON, json.dumps(PERSON)):
        value = json.loads(text(json_schema=schema))
        assert set(value) == {"name", "age"} and len(value["name"]) <= 6 and 1 <= value["age"] <= 99
    assert re.fullmatch("[a-c]{2,5}-[0-9]+!", text(regex="[a-c]{2,5}-[0-9]+!"))
    assert re.fullmatch(r"[1-9](\+[1-9]){2}\.", text(grammar='start: N ("+" N)~2 "."\nN: /[1-9]/\n'))


def test_each_completion_has_its_own_place_in_the_grammar(llm: LLM) -> None:
    params = SamplingParams(max_tokens=20, temperature=30.0, seed=3, n=3, regex="[xyz]{8}")
    texts = [completion.text for completion in llm.chat([HELLO, HELLO], params)]
    assert len(texts) == 6 and all(re.fullmatch("[xyz]{8}", text) for text in texts) and len(set(texts)) == 3
    assert "".join(llm.stream(HELLO, SamplingParams(max_tokens=9, regex="(yes|no)", seed=1))) in ("yes", "no")


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ({"regex": "a", "grammar": "b"}, "regex and grammar: at most one"),
        ({"json_schema": [1]}, "must be a JSON schema"),
        ({"json_schema": "{"}, "must be JSON"),
        ({"regex": ""}, "must be a text that is not empty"),
        ({"regex": "(("}, "the grammar was refused"),
        ({"grammar": "nonsense"}, "the grammar was refused"),
        ({"json_schema": {"type": "nonsense"}}, "the schema was refused"),
        ({"json_schema": {"const": {1, 2}}}, "not JSON"),
    ],
)
def test_what_cannot_be_followed_is_refused(llm: LLM, form: dict[str, Any], words: str) -> None:
    with pytest.raises(RequestError, match=words):
        llm.generate(["a"], SamplingParams(**form))
    assert not llm.loop.has_work()


def test_an_engine_that_knows_no_text_follows_no_grammar(llm: LLM, toy_manifest: Callable[..., Any]) -> None:
    for other in (LLM(llm.manifest, llm.executor), LLM(toy_manifest(eos_token_ids=[]), llm.executor, llm.tokenizer)):
        with pytest.raises(RequestError, match="cannot follow a grammar"):
            other.generate([[97]], SamplingParams(regex="a"))


def test_an_engine_brings_its_template_and_grammars(make_engine: Callable[..., Path]) -> None:
    config = json.dumps({"bos_token": "<bos>", "chat_template": TEMPLATE})
    root = make_engine(tokenizer_files={"tokenizer_config.json": config})
    with icc.load(root) as llm:
        assert llm.chat(HELLO, GREEDY).text == "^_`a"
        assert llm.chat(HELLO, SamplingParams(regex="[0-9]{3}", temperature=9.0)).text.isdigit()
