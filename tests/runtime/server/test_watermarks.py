"""Watermarked answers over HTTP: by a field of the request, and by a server that marks every answer."""

from __future__ import annotations

from typing import Any

import pytest
from icc.runtime.watermark.detect import detect
from icc.runtime.watermark.settings import Watermark

from .conftest import Served, StartServer

VOCAB = 258
MARK = {"key": 9, "bias": 8}
# one token per byte: the answer's bytes are its tokens
HOT: dict[str, Any] = {"max_tokens": 80, "temperature": 30, "seed": 3, "allowed_token_ids": list(range(32, 127))}


def marked(text: str, mark: Watermark) -> bool:
    return detect(list(text.encode()), mark, VOCAB).marked


def test_a_request_marks_its_answer(served: Served) -> None:
    said = {
        name: served.complete("abcd", **HOT, **fields)["choices"][0]["text"]
        for name, fields in (("plain", {}), ("kgw", {"watermark": MARK}))
    }
    keys = [9, 8, 7, 6, 5, 4, 3, 2]
    for method, key in (("gumbel", 9), ("dual_key_gumbel", 9), ("synthid", keys)):
        mark = {"key": key, "method": method}
        said[method] = served.complete("abcd", **HOT, watermark=mark)["choices"][0]["text"]
    for name, text in said.items():
        assert marked(text, Watermark(9)) == (name == "kgw")
        assert marked(text, Watermark(9, "gumbel")) == (name == "gumbel")
        assert marked(text, Watermark(9, "dual_key_gumbel")) == (name == "dual_key_gumbel")
        assert marked(text, Watermark(tuple(keys), "synthid")) == (name == "synthid")
    chat = served.chat("x", **HOT, watermark=MARK)["choices"][0]["message"]["content"]
    assert marked(chat, Watermark(9))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"watermark": {"key": 0}}, "watermark"),
        ({"watermark": {"key": 2**64}}, "watermark"),
        ({"watermark": {"key": [1, 2]}}, "watermark"),
        ({"watermark": {"key": [], "method": "synthid"}}, "watermark"),
        ({"watermark": {"key": [1] * 65, "method": "synthid"}}, "watermark"),
        ({"watermark": {"key": 1, "method": "dual_key_gumbel", "alpha": 2}}, "watermark"),
        ({"watermark": {"key": 1, "ratio": 1}}, "watermark"),
        ({"watermark": {"key": 1, "bias": 21}}, "watermark"),
        ({"watermark": {"key": 1, "method": "other"}}, "watermark"),
        ({"watermark": {"key": 1, "nonsense": 1}}, "watermark"),
        ({"watermark": {"key": 1, "method": "gumbel"}, "n": 2}, "n"),
    ],
)
def test_what_is_wrong_is_named(served: Served, fields: dict[str, Any], param: str) -> None:
    reply = served.ask("POST", "/v1/completions", {"prompt": "a", **fields})
    assert reply.status == 400 and (reply.json["error"]["param"] or "").startswith(param), reply.json


def test_a_server_marks_every_answer(start: StartServer) -> None:
    server = start("--watermark", "kgw:9,bias=8")
    assert marked(server.complete("abcd", **HOT)["choices"][0]["text"], Watermark(9))
    user = [{"role": "user", "content": "x"}]
    options = {"num_predict": 80, "temperature": 30, "seed": 3}
    lines = server.ask("POST", "/api/chat", {"messages": user, "options": options, "stream": False, "logprobs": True})
    tokens = [byte for one in lines.json["logprobs"] for byte in one["bytes"]]
    assert detect(tokens, Watermark(9), VOCAB).marked
    refused = server.ask("POST", "/v1/completions", {"prompt": "a", "watermark": MARK})
    assert refused.status == 400 and "marks every answer" in refused.json["error"]["message"]
