"""Files and datasets of prompts that several engines answer: when an engine dies, and resuming."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from icc.runtime.errors import BatchFailed, UsageError
from icc.runtime.llm import LLM
from icc.runtime.ray.batch import Lost, spread
from icc.runtime.ray.dataset import Answers, answered, columns, plain
from icc.runtime.ray.stored import RowAnswer, StoredAnswers, row_key
from icc.runtime.requests.params import SamplingParams
from icc.runtime.server.batches.batch_lines import BatchLine
from icc.runtime.server.batches.offline import answer_file


def lines(count: int) -> list[BatchLine]:
    return [BatchLine(f"r{number}", "/v1/completions", msgspec.Raw(b"{}")) for number in range(count)]


class Engine:
    """An engine that dies at some lines; `ends`: how often, by the line's name."""

    def __init__(self, ends: dict[str, int]) -> None:
        self.ends, self.now, self.most, self.away = ends, 0, 0, 0

    async def back(self) -> None:
        while self.away:
            self.away -= 1
            await asyncio.sleep(0)

    async def answer(self, line: bytes) -> tuple[int, bytes]:
        name = msgspec.json.decode(line)["custom_id"]
        if self.away:
            raise Lost("it is started again")
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(0)
        self.now -= 1
        if self.ends.get(name, 0):
            self.ends[name] -= 1
            self.away = 20
            raise Lost("the engine ended under this request")
        return 200, name.encode()


@pytest.mark.parametrize("ends", [{}, {"r3": 1, "r19": 1}, {"r0": 2, "r7": 1, "r8": 5}])
def test_every_line_is_answered_once(ends: dict[str, int]) -> None:
    fatal = {name for name, times in ends.items() if times > 1}
    engines, found = [Engine(ends) for _ in range(3)], list[tuple[str, int]]()
    asyncio.run(spread(lines(20), engines, 4, lambda line, status, result: found.append((line.custom_id, status))))
    assert sorted(found) == sorted((f"r{n}", 503 if f"r{n}" in fatal else 200) for n in range(20))
    assert all(engine.most <= 4 for engine in engines)


def test_a_file_goes_on_where_it_was(tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    texts = [{"custom_id": f"r{n}", "url": "/v1/completions", "body": {"prompt": "a"}} for n in range(6)]
    source.write_text("".join(json.dumps(text) + "\n" for text in texts))
    asked: list[str] = []

    def answer(stop: int) -> Callable[..., None]:
        def run(waiting: list[BatchLine], done: Callable[..., None]) -> None:
            for line in waiting[:stop]:
                asked.append(line.custom_id)
                result = {"id": "b", "custom_id": line.custom_id, "error": None,
                          "response": {"status_code": 200, "request_id": "r", "body": {}}}  # fmt: skip
                done(line, 200, json.dumps(result).encode())
            if stop < len(waiting):
                raise KeyboardInterrupt

        return run

    with pytest.raises(KeyboardInterrupt):
        answer_file(source, target, answer(4))
    answer_file(source, target, answer(100))
    assert asked == [f"r{n}" for n in range(6)] and len(target.read_text().splitlines()) == 6
    failing = tmp_path / "failing.jsonl"

    def fails(waiting: list[BatchLine], done: Callable[..., None]) -> None:
        asyncio.run(spread(waiting, [Engine({"r0": 9})], 2, done))

    with pytest.raises((BatchFailed, UsageError)):
        answer_file(source, failing, fails)


def test_answers_are_kept_by_engine_sampling_and_prompt(tmp_path: Path) -> None:
    keys = {row_key(*parts) for parts in (("e", b"p", "a"), ("f", b"p", "a"), ("e", b"q", "a"), ("e", b"p", ["a"]))}
    assert len(keys) == 4
    assert row_key("e", b"p", [{"role": "user", "content": "a"}]) == row_key(
        "e", b"p", [{"content": "a", "role": "user"}]
    )
    first = StoredAnswers(tmp_path / "kept")
    first.put([("a", RowAnswer("A", "stop", 1)), ("b", RowAnswer("", "error", 0, "too long"))])
    (tmp_path / "kept" / "torn.partial").write_bytes(b'["c"')
    again = StoredAnswers(tmp_path / "kept")
    assert again.get("a") == RowAnswer("A", "stop", 1) and again.get("b") is None and again.get("c") is None
    (tmp_path / "kept" / "other.jsonl").write_text("{}\n")
    with pytest.raises(UsageError, match=r"other\.jsonl"):
        StoredAnswers(tmp_path / "kept")
    with pytest.raises(UsageError, match="cannot be used"):
        StoredAnswers(tmp_path / "kept" / "other.jsonl")
    StoredAnswers(None).put([("a", RowAnswer("A", "stop", 1))])


def test_a_row_that_is_refused_fails_alone(make_llm: Callable[..., LLM]) -> None:
    llm, params = make_llm(), SamplingParams(max_tokens=4)
    found = answered(llm, ["ab", "x" * 500, "cd"], params)
    assert [bool(one.error) for one in found] == [False, True, False] and "500" in found[1].error
    plain_ones = [one.text for one in llm.generate(["ab", "cd"], params)]
    assert [found[0].text, found[2].text] == plain_ones and found[0].tokens == 4
    assert answered(llm, [], params) == []


def test_an_engine_asks_for_what_is_not_kept(
    tmp_path: Path, make_engine: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, asked = make_engine(), list[list[Any]]()
    load = {"path": str(engine), "threads": 1}
    monkeypatch.setattr("icc.runtime.ray.dataset.answered", lambda llm, prompts, params: (
        asked.append(list(prompts)) or answered(llm, prompts, params)))  # fmt: skip

    def answers(**changes: Any) -> Answers:
        given = {"params": SamplingParams(max_tokens=3), "column": "prompt", "output": "answer", **changes}
        return Answers(load, "", keep=str(tmp_path / "kept"), **given)

    first = answers()({"prompt": ["a", "b", "a"], "n": [1, 2, 3]})
    assert asked == [["a", "b"]] and list(first["n"]) == [1, 2, 3] and first["answer"][0] == first["answer"][2]
    again = answers()({"prompt": ["b", "c"]})
    assert asked[1] == ["c"] and again["answer"][0] == first["answer"][1]
    answers(params=SamplingParams(max_tokens=2))({"prompt": ["a"]})
    assert asked[2] == ["a"]
    with pytest.raises(UsageError, match="'prompts'"):
        answers(column="prompts")({"prompt": ["a"]})


def test_prompts_and_answers_as_columns() -> None:
    assert plain("a") == "a"
    assert plain([{"role": "user", "content": "a", "name": None}]) == [{"role": "user", "content": "a"}]
    found = columns("x", [RowAnswer("A", "stop", 1), RowAnswer("", "error", 0, "why")])
    assert found == {
        "x": ["A", ""], "x_finish_reason": ["stop", "error"], "x_tokens": [1, 0], "x_error": ["", "why"],
    }  # fmt: skip
