"""A server of a one-file engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from icc.compiler.packing import pack_engine
from icc.compiler.signing import make_keys, sign_engine


def test_it_answers_as_the_directory_does(chat_engine: Path, start: Callable[..., Any], tmp_path: Path) -> None:
    pack_engine(chat_engine, tmp_path / "toy.icc")
    found = []
    for engine in (tmp_path / "toy.icc", chat_engine):
        served = start(engine=engine)
        served.model = "toy"
        reply = served.ask(
            "POST",
            "/v1/chat/completions",
            {"model": "toy", "messages": [{"role": "user", "content": "a"}], "max_tokens": 4},
        )
        found.append((reply.status, reply.json["choices"], served.complete("abc", max_tokens=4)["choices"]))
    assert found[0] == found[1] and found[0][0] == 200


def test_it_serves_what_is_signed_only(chat_engine: Path, start: Callable[..., Any], tmp_path: Path) -> None:
    key = make_keys(tmp_path / "own.key")
    pack_engine(chat_engine, tmp_path / "toy.icc")
    options = ["--require-signature", str(tmp_path / "own.key.pub")]
    refused = start(*options, engine=tmp_path / "toy.icc", wait=False)
    assert refused.process.wait(60) == 50 and "toy.icc is not signed" in refused.log.read_text()
    sign_engine(tmp_path / "toy.icc", key)
    served = start(*options, engine=tmp_path / "toy.icc")
    served.model = "toy"
    assert served.complete("abc", max_tokens=4)["choices"]
