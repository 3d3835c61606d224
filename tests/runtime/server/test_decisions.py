"""/v1/decisions, by OpenAI's own client and by hand, compared with the engine's logits at the end of each prompt."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import icc
import numpy as np
import openai
import pytest
from icc.runtime.format.manifest import SamplingDefaults
from icc.runtime.requests.params import SamplingParams
from icc.runtime.requests.sampler import Sampler
from icc.runtime.server.api.decisions.labels import Labels, labels_behind
from icc.runtime.server.api.decisions.request import DecisionRequest
from icc.runtime.server.api.decisions.wording import LAST_WORDS, conversation
from icc.runtime.server.api.decoding import decode
from icc.runtime.server.api.errors import HttpError
from icc.runtime.tokenizer import Tokenizer

from .conftest import HERE, Served, running, serve_command

PREDICATE = {"type": "predicate", "instructions": "It rains.", "name": "rain"}
CHOICE = {
    "type": "choice",
    "instructions": "Who speaks?",
    "choices": [{"value": "a child", "description": "below 12"}, {"value": True}, {"value": "true"}],
}
SCORE = {"type": "score", "instructions": "How loud?", "levels": [{"label": w} for w in ("low", "mid", "high")]}
QUESTIONS = [PREDICATE, CHOICE, SCORE]


@pytest.fixture(scope="module")
def hashing(write_engine: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A toy engine without a chat template; its next token depends on all tokens before."""
    limits = {"max_seq_len": 4096, "max_batch_size": 8, "max_step_tokens": 512}
    sampling = SamplingDefaults(temperature=0.0)
    return write_engine(tmp_path_factory.mktemp("hash") / "toy.engine", rule=1, sampling=sampling, **limits)


@pytest.fixture(scope="module")
def server(hashing: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with running(serve_command(hashing), tmp_path_factory.mktemp("log") / "log", "toy") as served:
        yield served


def ask(server: Served, questions: Any = QUESTIONS, given: Any = "The sky is dark.", **fields: Any) -> Any:
    reply = server.ask("POST", "/v1/decisions", {"model": "toy", "input": given, "questions": questions, **fields})
    assert reply.status == 200, reply.raw
    return reply.json


def test_openais_client_gets_its_answers(server: Served) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    found = client.decisions.create(model="toy", input="The sky is dark.", questions=QUESTIONS)
    predicate, choice, score = found.answers
    assert predicate.type == "predicate" and predicate.name == "rain" and 0 <= predicate.probability <= 1
    assert choice.type == "choice" and [one.value for one in choice.probabilities] == ["a child", True, "true"]
    best = max(choice.probabilities, key=lambda one: one.probability)
    assert choice.choice == best.value and choice.confidence == best.probability and choice.name is None
    assert score.type == "score" and [(one.label, one.value) for one in score.probabilities] == [
        ("low", 0), ("mid", 1), ("high", 2),
    ]  # fmt: skip
    assert score.score == pytest.approx(sum(one.value * one.probability for one in score.probabilities))
    for one in (choice, score):
        assert sum(part.probability for part in one.probabilities) == pytest.approx(1)
    assert found.usage.output_tokens == 0 and found.usage.total_tokens == found.usage.input_tokens > 0


def test_a_shared_input_is_counted_once(hashing: Path, tmp_path: Path) -> None:
    """Forty questions about an input of 1,000 tokens do not count as 40,000 tokens in the queue."""
    with running(serve_command(hashing, "--max-queue-tokens", "8000"), tmp_path / "log", "toy") as served:
        assert len(ask(served, [PREDICATE] * 40, "a" * 1000)["answers"]) == 40
        many = {"model": "toy", "input": "a" * 1000, "questions": [{**PREDICATE, "instructions": "b" * 500}] * 40}
        assert served.ask("POST", "/v1/decisions", many).status != 200


def test_the_probabilities_are_those_of_the_labels_rows(server: Served, hashing: Path) -> None:
    answers = ask(server)["answers"]
    asked = [
        "Is this statement true of what stands above?\nIt rains.\nA: it is true\nB: it is not true",
        "Who speaks?\nChoices:\nA: a child (below 12)\nB: true\nC: true",
        "How loud?\nLevels, from the lowest to the highest:\nA: low\nB: mid\nC: high",
    ]
    with icc.load(str(hashing), threads=1) as llm:
        for text, answer in zip(asked, answers, strict=True):
            prompt = f"The sky is dark.\n\n{text}{LAST_WORDS}\nAnswer: "
            # a tokenizer of bytes has no token for " A": the space belongs to the prompt
            row = np.float64(llm.logits(list(prompt.encode()))[-1])
            shares = np.exp(row - np.logaddexp.reduce(row))
            found = shares[[ord(label) for label in "ABC"[: 2 if answer["type"] == "predicate" else 3]]]
            assert answer["label_mass"] == pytest.approx(found.sum(), rel=1e-5)
            if answer["type"] == "predicate":
                assert answer["probability"] == pytest.approx(found[0] / found.sum(), rel=1e-5)
            else:
                listed = [one["probability"] for one in answer["probabilities"]]
                assert listed == pytest.approx(list(found / found.sum()), rel=1e-5)


def test_each_question_is_one_step_behind_what_is_shared(server: Served) -> None:
    """The input fills one step of 512 tokens. The first question computes it; the others share it, and take a step for
    each batch of what they add."""
    before = server.metric("icc:iteration_seconds_count")
    found = ask(server, [{**PREDICATE, "instructions": f"It is {n}."} for n in range(8)], "abc " * 80)
    steps = server.metric("icc:iteration_seconds_count") - before
    usage = found["usage"]
    assert len(found["answers"]) == 8 and usage["input_tokens_details"]["cached_tokens"] >= 7 * 304
    assert usage["input_tokens"] > 8 * 320 and steps <= 5  # 7 questions of 200 tokens after the input: 3 steps of 512
    again = ask(server, [PREDICATE], "abc " * 80)["usage"]["input_tokens_details"]
    assert again["cached_tokens"] >= 304  # a later request finds the input, too
    apart = ask(server, [PREDICATE], "abc " * 80, prompt_cache_key="mine")["usage"]["input_tokens_details"]
    assert apart["cached_tokens"] == 0 and apart["cache_write_tokens"] > 320


def test_answers_are_the_same_every_time_whatever_runs_beside(server: Served) -> None:
    first = ask(server)["answers"]
    stream = server.stream("a", max_tokens=400)
    assert ask(server)["answers"] == first == ask(server, QUESTIONS * 10)["answers"][:3]
    stream.drop()
    server.wait_until(server.idle)


def test_a_chat_is_told_that_there_is_no_template_with_tools_too(server: Served) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    said: dict[str, Any] = {"messages": [{"role": "user", "content": "x"}]}
    for path in ("/v1/chat/completions", "/api/chat"):
        for more in ({}, {"tools": [tool]}):
            reply = server.ask("POST", path, {**said, **more})
            assert reply.status == 400 and b"no chat template: serve it with --chat-template FILE" in reply.raw


def test_a_chat_template_is_used_where_there_is_one(served: Served) -> None:
    turns = [
        {"role": "developer", "content": "Judge."},
        {"role": "user", "content": [{"type": "input_text", "text": "x"}, {"type": "input_json", "data": {"a": [1]}}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "y"}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "z"},
        {"type": "custom_tool_call", "call_id": "2", "name": "g", "input": "i"},
        {"type": "custom_tool_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "o"}]},
    ]
    for given in ("The sky is dark.", turns):
        [answer] = ask(served, [PREDICATE], given)["answers"]
        mass = 2 / (math.exp(10) + 257)  # the toy counts: after a newline all letters are equally likely
        assert answer["probability"] == pytest.approx(0.5) and answer["label_mass"] == pytest.approx(mass, rel=1e-4)
    body = {"input": turns, "questions": [PREDICATE]}
    messages = conversation(decode(json.dumps(body).encode(), DecisionRequest))
    assert [message["role"] for message in messages] == ["developer", "user", "assistant", "tool", "assistant", "tool"]
    assert messages[1]["content"] == 'x\n{"a":[1]}'


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"questions": []}, "questions"),
        ({"questions": [PREDICATE] * 401}, "questions"),
        ({"questions": [{**CHOICE, "choices": CHOICE["choices"][:1]}]}, "choices"),
        ({"questions": [{**CHOICE, "choices": [{"value": "a"}] * 2}]}, "twice"),
        ({"questions": [{**CHOICE, "choices": [{"value": str(n)} for n in range(255)]}]}, "62 labels of one token"),
        ({"questions": [{**PREDICATE, "type": "other"}]}, "other"),
        ({"questions": [{**PREDICATE, "instructions": [{"type": "input_image", "image_url": "x"}]}]}, "takes no image"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "takes no image"),
        ({"input": [{"type": "function_call_output", "call_id": "1", "output": "z"}]}, "no call with this id"),
        ({"input": "x" * 5000}, "maximum context length"),
        ({"nonsense": 1}, "nonsense"),
    ],
)
def test_what_is_wrong_is_named(server: Served, fields: dict[str, Any], words: str) -> None:
    body = {"model": "toy", "input": "x", "questions": [PREDICATE], **fields}
    reply = server.ask("POST", "/v1/decisions", body)
    assert reply.status == 400 and words in reply.json["error"]["message"], reply.json


def test_json_has_bounds() -> None:
    deep: Any = {}
    for _ in range(32):
        deep = {"a": deep}
    for data in (deep, {"a": [0] * 10_001}, {"a": "x" * (256 << 10)}):
        body = {
            "input": [{"role": "user", "content": [{"type": "input_json", "data": data}]}],
            "questions": [PREDICATE],
        }
        with pytest.raises(HttpError, match="at most 32 levels, 10000 values and 262144 bytes"):
            conversation(decode(json.dumps(body).encode(), DecisionRequest))


def test_four_hundred_questions(server: Served) -> None:
    found = ask(server, [{**PREDICATE, "instructions": f"It is {n}."} for n in range(400)], "x")
    assert len(found["answers"]) == 400


# -- pure --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tail", "blank"), [("<|im_start|>assistant\n", ""), ("\nAnswer:", " "), ("[/INST]", "")])
def test_labels_of_a_real_vocabulary_are_one_token_each(tail: str, blank: str) -> None:
    tokenizer = Tokenizer((HERE.parents[2] / "samples" / "pystd" / "tokenizer.json").read_bytes())
    labels = Labels(tokenizer, tail, blank=blank)
    assert labels_behind(tokenizer, tail, bool(blank)).letters(9) == labels.letters(9)
    before = tokenizer.encode(tail, add_special_tokens=False)
    found = labels.letters(40)
    assert len(set(found.values())) == 40 and list(found)[:3] == ["A", "B", "C"]
    for text, token in {**found, **labels.yes_and_no()}.items():
        assert tokenizer.encode(tail + blank + text, add_special_tokens=False) == [*before, token]


def test_a_sampler_reports_the_tokens_that_it_is_asked_for() -> None:
    logits = np.random.default_rng(0).normal(size=50).astype(np.float32)
    params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=0, score_ids=(7, 3, 49))
    sampler = Sampler(params, [1], 50)
    sample = sampler.sample(logits)
    assert sample is not None and sample.logprob is not None and sampler.device_row() is None
    expected = logits.astype(np.float64) - np.logaddexp.reduce(logits.astype(np.float64))
    assert [token for token, _ in sample.logprob.top] == [7, 3, 49]
    assert [value for _, value in sample.logprob.top] == pytest.approx([expected[i] for i in (7, 3, 49)], abs=1e-5)
