"""`--spec` of `icc serve` and `icc batch`: the engine process makes guesses, which save steps and change no answer."""

from __future__ import annotations

import json
import string
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from .conftest import Served, StartServer

# the toy counts upwards, as an earlier part of the prompt shows: n-grams guess right until the alphabet ends
PROMPTS = [string.ascii_lowercase + string.ascii_lowercase[:n] for n in (3, 4, 5, 6)]
GREEDY = {"max_tokens": 16, "temperature": 0, "logprobs": 1}
SAMPLED = {"max_tokens": 16, "temperature": 1.5, "seed": 7, "n": 2}


def answers(server: Served, fields: dict) -> list[list[str]]:
    """The texts of the answers to all prompts, which are sent at once."""
    with ThreadPoolExecutor() as pool:
        found = list(pool.map(lambda prompt: server.complete(prompt, **fields), PROMPTS))
    return [[choice["text"] for choice in answer["choices"]] for answer in found]


@pytest.mark.parametrize("drafter", ["ngram", "draft"])
def test_served_guesses_change_nothing(drafter: str, served: Served, start: StartServer, chat_engine: Path) -> None:
    """Cheap guesses also save steps; guesses of a draft engine as large as the target engine do not pay."""
    server = start("--spec", f"draft:{chat_engine}" if drafter == "draft" else drafter)
    for fields in (GREEDY, SAMPLED):
        assert answers(server, fields) == answers(served, fields)
    steps, tokens = server.metric("icc:engine_steps_total"), server.metric("icc:generation_tokens_total")
    events = server.complete(PROMPTS[0], stream=True, **GREEDY)
    assert "".join(event["choices"][0]["text"] for event in events) == answers(served, GREEDY)[0][0]
    assert server.metric("icc:generation_tokens_total") - tokens == 16

    def saved() -> bool:  # timing decides whether guesses are made, so not in every request
        server.complete(PROMPTS[0], **GREEDY)
        done = server.metric("icc:generation_tokens_total") - tokens
        return server.metric("icc:engine_steps_total") - steps < done

    if drafter == "ngram":
        server.wait_until(saved)
        steps, tokens = server.metric("icc:engine_steps_total"), server.metric("icc:generation_tokens_total")
        [choice] = server.complete(PROMPTS[0], speculative=False, **GREEDY)["choices"]
        assert choice["text"] == answers(served, GREEDY)[0][0]
        done = server.metric("icc:generation_tokens_total") - tokens
        assert server.metric("icc:engine_steps_total") - steps >= done == 16, "a request without guesses had some"
    server.wait_until(server.idle)
    assert server.metric("icc:engine_restarts_total") == 0


def test_a_batch_with_guesses_has_the_same_answers(chat_engine: Path, served: Served, tmp_path: Path) -> None:
    bodies = [{"model": "toy", "prompt": prompt, **GREEDY} for prompt in PROMPTS]
    lines = [{"custom_id": str(i), "url": "/v1/completions", "body": body} for i, body in enumerate(bodies)]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, lines)))
    command = [sys.executable, "-m", "icc.compiler.cli", "batch", str(chat_engine), "in.jsonl", "out.jsonl"]
    subprocess.run([*command, "--spec", "ngram", "--threads", "1"], cwd=tmp_path, check=True, capture_output=True)
    results = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    found = {r["custom_id"]: r["response"]["body"]["choices"][0]["text"] for r in results}
    assert [found[str(i)] for i in range(len(PROMPTS))] == [texts[0] for texts in answers(served, GREEDY)]


def test_a_drafter_that_the_engine_lacks_is_told_at_the_start(start: Callable[..., Served]) -> None:
    server = start("--spec", "medusa", wait=False)
    assert server.process.wait(30) == 2
    said = server.log.read_text()
    assert "--spec medusa: the engine has no Medusa heads" in said and "Traceback" not in said
