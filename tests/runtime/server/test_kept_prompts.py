"""Prompts that requests ask to keep, through a server: usage and metrics, and the state after a restart."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from icc.runtime.errors import UsageError
from icc.runtime.options import LoadOptions
from icc.runtime.server.api.anthropic.marks import marks_of
from icc.runtime.server.api.anthropic.request import MessagesRequest
from icc.runtime.server.api.decoding import decode
from icc.runtime.server.api.prices import read_prices
from icc.runtime.server.engine.prompt_folder import PromptFolder
from icc.runtime.server.http import served as server
from icc.runtime.server.options import ServeOptions

from .conftest import Served, StartServer

SYSTEM = "You are kind. " * 20
USER = {"role": "user", "content": "x"}
EPHEMERAL = {"type": "ephemeral"}


def messages(**fields: Any) -> dict[str, Any]:
    return {"model": "toy", "max_tokens": 3, "messages": [USER], **fields}


def test_a_mark_keeps_what_is_in_front_of_it(served: Served) -> None:
    before = served.metric("icc:prompts_kept")
    system = [{"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral", "ttl": "1h"}}]
    first = served.ask("POST", "/v1/messages", messages(system=system)).json["usage"]
    there = first["cache_read_input_tokens"]  # cached by requests of other tests
    made = there + first["cache_creation_input_tokens"]
    assert there < len(SYSTEM) <= made <= len(SYSTEM) + 60
    total = first["input_tokens"] + made
    again = messages(system=system, messages=[{"role": "user", "content": "y"}])
    second = served.ask("POST", "/v1/messages", again).json["usage"]
    assert second["cache_read_input_tokens"] >= made and second["cache_creation_input_tokens"] == 0
    assert second["input_tokens"] + second["cache_read_input_tokens"] == total
    served.wait_until(lambda: served.metric("icc:prompts_kept") == before + 1)
    plain = served.ask("POST", "/v1/messages", messages(system="Another one. " * 20)).json["usage"]
    assert plain["cache_creation_input_tokens"] == 0
    assert served.metric("icc:prompts_kept") == before + 1
    assert "cost" not in plain and "saved" not in plain  # the server has no prices


def test_marks_that_are_none_are_refused(served: Served) -> None:
    for control in ({"type": "for_ever"}, {"type": "ephemeral", "ttl": "2h"}, "ephemeral"):
        system = [{"type": "text", "text": SYSTEM, "cache_control": control}]
        assert served.ask("POST", "/v1/messages", messages(system=system)).status == 400
    block = {"type": "text", "text": "a", "cache_control": EPHEMERAL}
    reply = served.ask("POST", "/v1/messages", messages(messages=[{"role": "user", "content": [block] * 5}]))
    assert reply.status == 400 and "5 marks, at most 4" in reply.json["error"]["message"]
    assert served.ask("POST", "/v1/chat/completions", messages(prompt_cache_retention="1 year")).status == 400


def test_each_mark_ends_at_its_block() -> None:
    def block(text: str, ttl: str | None = None) -> dict[str, Any]:
        return {"type": "text", "text": text} | ({"cache_control": {**EPHEMERAL, "ttl": ttl}} if ttl else {})

    tool = {"name": "f", "input_schema": {"type": "object"}, "cache_control": EPHEMERAL}
    result = {"type": "tool_result", "tool_use_id": "1", "content": "r", "cache_control": EPHEMERAL}
    body = messages(
        tools=[tool],
        system=[block("a"), block("b", "1h"), block("c")],
        messages=[
            {"role": "user", "content": [block("d"), block("e", "5m"), block("f")]},
            {"role": "assistant", "content": "g"},
            {"role": "user", "content": [result]},
        ],
    )
    request = decode(json.dumps(body).encode(), MessagesRequest)
    tools, system, turn, results = marks_of(request)
    assert [seconds for _, seconds in (tools, system, turn, results)] == [300, 3600, 300, 300]
    said = [[message.content for message in other.messages] for other, _ in (tools, system, turn, results)]
    assert said[0][0].endswith("abc") and not said[0][0].startswith("a")  # tools come before the system message
    assert said[1][0].startswith("ab") and not said[1][0].startswith("abc") and said[1][1] == "def"
    assert said[2][0] == "abc" and said[2][1].startswith("de") and "f" not in said[2][1] and len(said[2]) == 2
    assert said[3][:3] == ["abc", "def", "g"] and said[3][3].startswith("r") and said[3][3] != "r"
    whole = decode(json.dumps(messages(cache_control=EPHEMERAL)).encode(), MessagesRequest)
    [(other, _)] = marks_of(whole)
    assert other.messages[-1].content.startswith("x")


def test_prompts_are_there_after_a_restart(start: StartServer, tmp_path: Path) -> None:
    folder = tmp_path / "prompts"
    options = ("--prompt-cache", str(folder), "--prompt-cache-gib", "1")
    asked = {"prompt_cache_retention": "24h"}, {"prompt_cache_key": "k"}
    prompts = ["Once upon a time. " * 12, "There was a king. " * 12]
    served = start(*options, key="a long secret")
    first = [served.complete(prompt, max_tokens=3, **fields) for prompt, fields in zip(prompts, asked, strict=True)]
    assert [cached(one) for one in first] == [0, 0]
    served.wait_until(lambda: len(list(folder.glob("*.kv"))) == 2)
    served.stop()
    served = start(*options, key="a long secret")
    again = [served.complete(prompt, max_tokens=3) for prompt in prompts]
    assert min(map(cached, again)) >= len(prompts[0]) - 4
    assert [one["choices"] for one in again] == [one["choices"] for one in first]
    other = served.complete(prompts[0], max_tokens=1, cache_salt="two")
    assert cached(other) == 0, "what another client has asked to keep is found"


def test_whoever_has_no_key_is_the_same_client_after_a_restart(chat_engine: Path, tmp_path: Path) -> None:
    """The salt depends on the secret of the folder, with keys and without."""
    options = ServeOptions(LoadOptions(chat_engine), prompt_cache=tmp_path / "prompts")
    first, second = (server.Served(options).core.jobs.salt("", None) for _ in range(2))
    assert first == second
    other = ServeOptions(LoadOptions(chat_engine), prompt_cache=tmp_path / "others")
    assert server.Served(other).core.jobs.salt("", None) != first


def cached(answer: Any) -> int:
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_what_it_saves_is_told(start: StartServer, tmp_path: Path) -> None:
    (tmp_path / "prices.json").write_text('{"input": 3, "cached_input": 0.5, "output": 15, "currency": "EUR"}')
    served, prompt = start("--prices", str(tmp_path / "prices.json")), "Once upon a time. " * 12
    first = served.complete(prompt, max_tokens=3)["usage"]
    assert first["saved"] == 0 and first["cost"] == pytest.approx((first["prompt_tokens"] * 3 + 3 * 15) / 1e6)
    second = served.complete(prompt, max_tokens=3)["usage"]
    cached = second["prompt_tokens_details"]["cached_tokens"]
    assert cached > 0 and second["saved"] == pytest.approx(cached * 2.5 / 1e6)
    assert second["cost"] == pytest.approx(first["cost"] - second["saved"])
    served.wait_until(lambda: 'icc:cost_saved_total{currency="EUR"' in served.ask("GET", "/metrics").raw.decode())
    message = served.ask("POST", "/v1/messages", messages()).json["usage"]
    assert message["cost"] > 0


@pytest.mark.parametrize(
    ("text", "why"),
    [("{", "--prices"), ('{"input": 1}', "output"), ('{"input": -1, "output": 2}', ">= 0"),
     ('{"input": 1, "output": 2, "cached_input": 3}', "costs more than input")],
)  # fmt: skip
def test_prices_that_are_none_are_refused(text: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "prices.json").write_text(text)
    with pytest.raises(UsageError, match=why):
        read_prices(tmp_path / "prices.json")
    with pytest.raises(UsageError, match="cannot be read"):
        read_prices(tmp_path / "none.json")


def test_engines_whose_cache_is_out_of_reach_keep_nothing_on_disk(
    toy_manifest: Callable[..., Any], tmp_path: Path
) -> None:
    folder = PromptFolder(str(tmp_path), 1)
    folder.check(toy_manifest())
    with pytest.raises(UsageError, match="is in a GPU's memory"):
        folder.check(toy_manifest(backend="cuda", kernel_abi=0))


def test_a_folder_that_cannot_be_used_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be used"):
        PromptFolder(str(tmp_path / "file" / "x"), 1).secret()
    folder = PromptFolder(str(tmp_path / "new"), 1)
    assert folder.secret() == folder.secret()
    (tmp_path / "new" / "secret").write_bytes(b"short")
    with pytest.raises(UsageError, match="is damaged"):
        folder.secret()
