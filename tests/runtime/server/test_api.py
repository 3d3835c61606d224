"""The API by example, on a model that counts: byte b is followed by b + 1."""

from __future__ import annotations

import json
import math

import pytest

from .conftest import Served
from .test_structured import TOOLS

pytestmark = pytest.mark.usefixtures("idle_after")


def test_the_state_has_the_name_that_load_tools_ask_for(served: Served) -> None:
    assert served.ask("GET", "/health").json == served.ask("GET", "/ready").json == {"status": "ready"}


def test_embeddings_are_refused_in_words(served: Served) -> None:
    reply = served.ask("POST", "/v1/embeddings", {"model": "toy", "input": "a"})
    assert reply.status == 404 and reply.json["error"]["code"] == "unsupported"
    assert reply.json["error"]["message"] == "this engine was not compiled for embeddings"


def test_a_completion_has_text_reason_and_usage(served: Served) -> None:
    answer = served.complete("a", max_tokens=5)
    [choice] = answer["choices"]
    assert choice == {"index": 0, "text": "bcdef", "logprobs": None, "finish_reason": "length"}
    assert answer["object"] == "text_completion" and answer["model"] == "toy"
    usage = {"prompt_tokens": 1, "completion_tokens": 5, "total_tokens": 6}
    assert answer["usage"] == {**usage, "prompt_tokens_details": {"cached_tokens": 0}}


def test_a_request_without_a_model_goes_to_the_one_that_is_served(served: Served) -> None:
    messages = [{"role": "user", "content": "x"}]
    bodies = {
        "/v1/completions": {"prompt": "a", "max_tokens": 1},
        "/v1/chat/completions": {"messages": messages, "max_tokens": 1},
        "/v1/responses": {"input": "x", "max_output_tokens": 1},
        "/v1/messages": {"messages": messages, "max_tokens": 1},
    }
    for path, body in bodies.items():
        for fields in ({}, {"model": None}, {"model": ""}):
            reply = served.ask("POST", path, {**body, **fields})
            assert reply.status == 200 and reply.json["model"] == "toy", (path, fields, reply.raw)
        assert served.ask("POST", path, {**body, "model": "other"}).status == 404, path


def test_prompts_may_be_texts_or_token_ids_one_or_several(served: Served) -> None:
    for prompt, texts in [
        (["a", "k"], ["bc", "lm"]),
        ([97], ["bc"]),
        ([[97], [107, 65]], ["bc", "BC"]),
    ]:
        answer = served.complete(prompt, max_tokens=2)
        assert [choice["text"] for choice in answer["choices"]] == texts
        assert [choice["index"] for choice in answer["choices"]] == list(range(len(texts)))


def test_a_stream_says_the_same_as_the_whole_answer(served: Served) -> None:
    events = served.complete(["a", "k"], max_tokens=6, n=2, stream=True, stream_options={"include_usage": True})
    texts = {index: "" for index in range(4)}
    reasons = {}
    for event in events[:-1]:
        assert event["usage"] is None
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
            if choice["finish_reason"]:
                reasons[choice["index"]] = choice["finish_reason"]
    assert texts == {0: "bcdefg", 1: "bcdefg", 2: "lmnopq", 3: "lmnopq"}
    assert reasons == dict.fromkeys(range(4), "length")
    assert events[-1]["choices"] == [] and events[-1]["usage"]["completion_tokens"] == 24


def test_the_end_token_stops_and_is_not_shown(served: Served) -> None:
    answer = served.complete([[254]], max_tokens=10)
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == 3  # 255, <bos>, <eos>
    assert served.complete([[254]], max_tokens=10, ignore_eos=True)["choices"][0]["finish_reason"] == "length"


def test_stop_strings_and_stop_tokens_end_the_text(served: Served) -> None:
    choice = served.complete("a", max_tokens=20, stop=["zz", "fg"])["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("bcde", "stop")
    choice = served.complete("a", max_tokens=20, stop_token_ids=[101])["choices"][0]
    assert choice["finish_reason"] == "stop" and choice["text"].startswith("bcd")


def test_logprobs_and_echo(served: Served) -> None:
    choice = served.complete("ab", max_tokens=2, logprobs=2, echo=True)["choices"][0]
    assert choice["text"] == "abcd"
    found = choice["logprobs"]
    assert found["tokens"] == ["a", "b", "c", "d"] and found["text_offset"] == [0, 1, 2, 3]
    assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
    expected = 10 - math.log(math.exp(10) + 257)  # the toy's logits are 10 for the next token and 0 for 257 others
    assert found["token_logprobs"][1:] == pytest.approx([expected] * 3, abs=1e-4)
    assert set(found["top_logprobs"][1]) >= {"b"} and len(found["top_logprobs"][1]) == 2


def test_sampling_is_seeded_and_penalties_and_biases_act(served: Served) -> None:
    fields = {"max_tokens": 24, "temperature": 50, "seed": 7}
    first, second = (served.complete("a", **fields)["choices"][0]["text"] for _ in range(2))
    assert first == second != served.complete("a", **{**fields, "seed": 8})["choices"][0]["text"]
    assert served.complete("a", max_tokens=3, logit_bias={"120": 100})["choices"][0]["text"] == "xxx"
    assert served.complete("a", max_tokens=3, logit_bias={"98": -100})["choices"][0]["text"] != "bcd"
    assert served.complete("a", max_tokens=2, temperature=50, top_k=1)["choices"][0]["text"] == "bc"
    assert served.complete("a", max_tokens=2, temperature=50, min_p=0.99)["choices"][0]["text"] == "bc"
    several = served.complete("a", n=4, max_tokens=24, temperature=50, seed=7)["choices"]
    assert len({choice["text"] for choice in several}) == 4


def test_chat_renders_the_template_and_answers(served: Served) -> None:
    answer = served.chat("hello", max_completion_tokens=3)
    [choice] = answer["choices"]
    assert choice["message"]["role"] == "assistant" and choice["finish_reason"] == "length"
    system = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
    turns = (("system", system), ("user", "hello"))
    prompt = "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns) + "<|im_start|>assistant\n"
    assert answer["usage"]["prompt_tokens"] == len(prompt)  # one token per byte
    assert choice["message"]["content"] == "\x0b\x0c\r"  # the bytes after a newline, the prompt's last byte


def test_chat_streams_a_role_then_content_then_a_reason(served: Served) -> None:
    events = served.chat("x", max_tokens=3, stream=True, n=2)
    assert [event["choices"][0]["delta"] for event in events[:2]] == [{"role": "assistant", "content": ""}] * 2
    content = "".join(e["choices"][0]["delta"].get("content", "") for e in events if e["choices"][0]["index"] == 1)
    assert content == "\x0b\x0c\r"
    assert [e["choices"][0]["finish_reason"] for e in events].count("length") == 2
    assert all("usage" not in event for event in events)


def test_chat_logprobs(served: Served) -> None:
    choice = served.chat("x", max_tokens=2, logprobs=True, top_logprobs=3)["choices"][0]
    first = choice["logprobs"]["content"][0]
    assert first["token"] == "\x0b" and first["bytes"] == [11] and len(first["top_logprobs"]) == 3


def test_content_parts_are_texts(served: Served) -> None:
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    whole, joined = (served.chat([{"role": "user", "content": c}], max_tokens=1) for c in ("hello", parts))
    assert whole["usage"] == {**joined["usage"], "prompt_tokens_details": whole["usage"]["prompt_tokens_details"]}


def test_tokens_go_there_and_back(served: Served) -> None:
    tokens = served.ask("POST", "/tokenize", {"prompt": "héy"}).json
    assert tokens == {"tokens": list("héy".encode()), "count": 4, "max_model_len": 4096}
    assert served.ask("POST", "/detokenize", {"tokens": tokens["tokens"]}).json == {"prompt": "héy"}
    named = served.ask("POST", "/tokenize", {"prompt": "ab", "return_token_strs": True}).json
    assert named["token_strs"] == ["a", "b"]


def test_render_gives_the_tokens_that_a_request_runs_with(served: Served) -> None:
    """In vLLM's form: a list for the prompts of a completion, one object for a conversation; nothing is run."""
    before = served.metric("icc:prompt_tokens_total")
    asked = {"model": "toy", "prompt": ["héy", "ab"], "max_tokens": 9, "temperature": 0.5, "stop": "x", "priority": 2}
    first, second = served.ask("POST", "/v1/completions/render", asked).json
    assert first["token_ids"] == served.ask("POST", "/tokenize", {"prompt": "héy"}).json["tokens"]
    assert second["token_ids"] == served.ask("POST", "/tokenize", {"prompt": "ab"}).json["tokens"]
    assert first["request_id"] != second["request_id"]
    assert first["model"] == "toy" and first["stream"] is False and first["priority"] == 2
    sampling = first["sampling_params"]
    assert (sampling["max_tokens"], sampling["temperature"], sampling["stop"], sampling["n"]) == (9, 0.5, ["x"], 1)
    talk = {"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS}
    chat = served.ask("POST", "/v1/chat/completions/render", {"model": "toy", **talk}).json
    assert chat["token_ids"] == served.ask("POST", "/tokenize", talk).json["tokens"]
    assert served.ask("POST", "/v1/completions/render", {"model": "other", "prompt": "a"}).status == 404
    assert served.ask("POST", "/v1/completions/render", {"model": "toy"}).status == 400
    assert served.metric("icc:prompt_tokens_total") == before


def test_a_conversation_is_tokenized_as_it_is_answered(served: Served) -> None:
    messages = [{"role": "user", "content": "hello"}]
    tokens = served.ask("POST", "/tokenize", {"messages": messages}).json
    assert tokens["count"] == served.chat(messages, max_tokens=1)["usage"]["prompt_tokens"]
    more = served.ask("POST", "/tokenize", {"messages": messages, "tools": TOOLS}).json
    assert more["count"] > tokens["count"]
    for body in ({}, {"prompt": "a", "messages": messages}, {"prompt": None}):
        assert served.ask("POST", "/tokenize", body).status == 400


def test_the_document_can_be_read(served: Served) -> None:
    page = served.ask("GET", "/docs")
    text = page.raw.decode()
    assert page.status == 200 and "POST /v1/chat/completions" in text and "max_completion_tokens" in text
    assert "http:" not in text and "https:" not in text and "<script" not in text  # nothing is loaded from elsewhere
    assert served.ask("GET", "/docs.css").headers["content-type"].startswith("text/css")


def test_head_is_get_without_a_body(served: Served) -> None:
    for path in ("/", "/ready", "/v1/models", "/openapi.json"):
        got, head = served.ask("GET", path), served.ask("HEAD", path)
        assert head.status == 200 and head.raw == b"" and head.headers["content-type"] == got.headers["content-type"]
    assert served.ask("HEAD", "/v1/completions").status == 405


def test_models_state_and_version(served: Served) -> None:
    assert [model["id"] for model in served.ask("GET", "/v1/models").json["data"]] == ["toy"]
    assert served.ask("GET", "/v1/models/toy").json["max_model_len"] == 4096
    assert served.ask("GET", "/v1/models/other").status == 404
    assert served.ask("GET", "/live").json == {"status": "live"}
    assert served.ask("GET", "/ready").json == {"status": "ready"}
    assert served.ask("GET", "/version").json["target"] == "cpu"


def test_metrics_count(served: Served) -> None:
    before = served.metric("icc:generation_tokens_total")
    served.complete("a", max_tokens=7)
    assert served.metric("icc:generation_tokens_total") == before + 7
    assert served.metric("icc:time_to_first_token_seconds_count") > 0
    assert b"vllm:generation_tokens" not in served.ask("GET", "/metrics").raw


def test_a_prompt_that_was_seen_is_cached_and_says_so(served: Served) -> None:
    prompt = "a prompt that no other test sends " * 4
    assert served.complete(prompt, max_tokens=1)["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    again = served.complete(prompt, max_tokens=1)["usage"]
    assert again["prompt_tokens_details"]["cached_tokens"] >= again["prompt_tokens"] - 4
    other = served.complete(prompt, max_tokens=1, cache_salt="mine")["usage"]
    assert other["prompt_tokens_details"]["cached_tokens"] == 0


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/v1/completions", b"{", 400, None),
        ("/v1/completions", b'{"model": "toy", "prompt": "\\ud800"}', 400, None),
        ("/v1/completions", b"\xff", 400, None),
        ("/v1/completions", b"[" * 100_000, 400, None),
        ("/v1/completions", {"model": "other", "prompt": "a"}, 404, "model"),
        ("/v1/completions", {"model": "toy"}, 400, None),
        ("/v1/completions", {"model": "toy", "prompt": []}, 400, "prompt"),
        ("/v1/completions", {"model": "toy", "prompt": ["a", [1]]}, 400, "prompt"),
        ("/v1/completions", {"model": "toy", "prompt": [300]}, 400, "prompt"),
        ("/v1/completions", {"model": "toy", "prompt": ["a"] * 1025}, 400, "prompt"),
        ("/v1/completions", {"model": "toy", "prompt": "a" * 4097}, 400, "prompt"),
        ("/v1/completions", {"model": "toy", "prompt": "a", "max_token": 5}, 400, "max_token"),
        ("/v1/completions", {"model": "toy", "prompt": "a", "length_penalty": 2}, 400, "length_penalty"),
        ("/v1/completions", {"model": "toy", "prompt": "a", "penalty_alpha": 0.6, "top_k": 4}, 400, "penalty_alpha"),
        ("/v1/completions", {"model": "toy", "prompt": "a", "dola_layers": "high"}, 400, "dola_layers"),
        ("/v1/completions", {"model": "toy", "prompt": "a", "num_beam_groups": 2}, 400, "num_beam_groups"),
        ("/v1/completions", {"model": "toy", "prompt": "a", "diversity_penalty": 0.5}, 400, "diversity_penalty"),
        ("/v1/completions", {"model": "toy", "prompt": "a", "suffix": "b"}, 400, "suffix"),
        ("/v1/completions", {"model": "toy", "prompt": "a", "best_of": 2, "stream": True}, 400, "best_of"),
        ("/v1/chat/completions", {"model": "toy", "messages": []}, 400, "messages"),
        ("/v1/chat/completions", {"model": "toy", "messages": [{"role": "x", "content": ""}]}, 400, "messages[0].role"),
        ("/v1/chat/completions", {"model": "toy", "messages": [{"role": "user"}]}, 400, "messages[0]"),
        ("/detokenize", {"tokens": [258]}, 400, "tokens"),
    ],
)  # fmt: skip
def test_a_wrong_request_gets_400_and_the_field(served: Served, path: str, body, status: int, param) -> None:
    reply = served.ask("POST", path, body)
    assert reply.status == status, reply.raw
    error = reply.json["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    assert error["param"] == param


def test_routes_that_do_not_exist_say_so_in_the_same_form(served: Served) -> None:
    assert served.ask("GET", "/nothing").json["error"]["type"] == "not_found_error"
    reply = served.ask("GET", "/v1/completions")
    assert reply.status == 405 and reply.headers["allow"] == "POST"


def test_the_document_describes_what_is_served(served: Served) -> None:
    document = json.loads(served.ask("GET", "/openapi.json").raw)
    schema = document["components"]["schemas"]["CompletionRequest"]
    assert schema["properties"]["model"]["anyOf"][0]["enum"] == ["", "toy"] and "model" not in schema["required"]
    assert schema["additionalProperties"] == {"type": "null"}
    assert '"maximum": 257' in json.dumps(schema["properties"]["prompt"])
