"""Beam search and the best of several answers over HTTP and in batches, with a judge and without."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from icc.runtime.cli.commands import main
from icc.runtime.format.manifest import EmbeddingFacts, SamplingDefaults
from icc.runtime.loading import load
from icc.runtime.requests.params import SamplingParams
from icc.runtime.requests.sampler import TokenLogprob
from icc.runtime.server.api.best import Judge, best_of
from icc.runtime.server.api.jobs import Job
from icc.runtime.server.engine.admission import Price
from icc.runtime.server.engine.messages import Delta

from .chat_templates import QWEN_2_5
from .conftest import Served, running

SEARCH: dict[str, Any] = {"use_beam_search": True, "max_tokens": 4, "length_penalty": 0.5, "early_stopping": "never"}
# token 0 and a letter: the judge prefers texts that end with a zero byte
DRAWN: dict[str, Any] = {"max_tokens": 3, "temperature": 100, "seed": 7, "allowed_token_ids": [0, 65]}


class Indifferent(Judge):
    """Scores all answers equally, except that empty ones score higher."""

    async def scores(self, question: str, answers: Sequence[str], seconds: float | None = None) -> list[float]:
        return [float(not answer) for answer in answers]


@pytest.fixture(scope="module")
def judge(write_engine: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    facts = EmbeddingFacts("last", False, 258, scores="sigmoid")
    path = tmp_path_factory.mktemp("judge") / "judge.engine"
    return write_engine(path, embedding=facts, max_seq_len=64, max_step_tokens=16)


@pytest.fixture(scope="module")
def toy(write_engine: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = json.dumps({"bos_token": "<bos>", "eos_token": "<eos>", "chat_template": QWEN_2_5})
    return write_engine(
        tmp_path_factory.mktemp("toy") / "toy.engine",
        rule=1,
        tokenizer_files={"tokenizer_config.json": config},
        max_seq_len=4096,
        max_batch_size=8,
        max_step_tokens=256,
        sampling=SamplingDefaults(temperature=0.0),
    )


@pytest.fixture(scope="module")
def served(toy: Path, judge: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    command = [sys.executable, "-m", "icc", "serve", str(toy), "--port", "0", "--judge", str(judge)]
    with running(command, tmp_path_factory.mktemp("log") / "server.log", "toy") as server:
        yield server


def test_fewer_texts_than_wanted_are_told(served: Served) -> None:
    """A schema allows two texts: a request for four gets an error, one for two gets both."""
    form = {"guided_choice": ["ab", "b"], "max_tokens": 4, "use_beam_search": True}
    reply = served.ask("POST", "/v1/completions", {"model": "toy", "prompt": "ab", "n": 4, **form})
    error = reply.json["error"]
    assert reply.status == 400 and error["param"] == "n" and "fewer texts than n" in error["message"]
    found = served.complete("ab", n=2, best_of=4, **form)
    assert sorted(choice["text"] for choice in found["choices"]) == ["ab", "b"]


def test_beams_are_those_of_the_library(served: Served, toy: Path) -> None:
    """The best `n` of `best_of` beams, in completions and chats, whole and streamed, with their scores and
    log-probabilities."""
    params = SamplingParams(beams=3, n=2, max_tokens=4, length_penalty=0.5, early_stopping="never", logprobs=2)
    with load(toy) as llm:
        wanted = llm.generate(["ab"], params)
    fields = {**SEARCH, "n": 2, "best_of": 3}
    answer = served.complete("ab", **fields, logprobs=2)
    assert [choice["text"] for choice in answer["choices"]] == [one.text for one in wanted]
    assert [choice["score"] for choice in answer["choices"]] == [one.score for one in wanted]
    assert answer["choices"][0]["logprobs"]["token_logprobs"] == pytest.approx(
        [one.logprob for one in wanted[0].logprobs or ()]
    )
    assert answer["usage"]["completion_tokens"] == 8
    body = {"model": served.model, "prompt": "ab", **fields, "stream": True}
    events = served.ask("POST", "/v1/completions", body).events
    streamed = ["".join(e["choices"][0]["text"] for e in events if e["choices"][0]["index"] == n) for n in range(2)]
    assert streamed == [one.text for one in wanted]
    assert [e["choices"][0]["score"] for e in events if "score" in e["choices"][0]] == [one.score for one in wanted]
    chat = served.chat("ab", **fields)
    assert len(chat["choices"]) == 2 and chat["choices"][0]["score"] >= chat["choices"][1]["score"]
    greedy = served.complete("ab", use_beam_search=True, max_tokens=4)["choices"]
    assert [one["text"] for one in greedy] == [served.complete("ab", temperature=0, max_tokens=4)["choices"][0]["text"]]


def test_beams_follow_a_grammar(served: Served) -> None:
    fields = {**SEARCH, "n": 4, "max_tokens": 10, "structured_outputs": {"choice": ["red", "green", "blue", "bleu"]}}
    answer = served.complete("ab", **fields)
    assert sorted(choice["text"] for choice in answer["choices"]) == ["bleu", "blue", "green", "red"]
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"stop"}


@pytest.mark.parametrize(
    ("fields", "named", "words"),
    [
        ({"use_beam_search": True, "n": 2, "temperature": 0.5}, "temperature", "does not sample"),
        ({"use_beam_search": True, "temperature": 0.5}, "temperature", "does not sample"),
        ({"use_beam_search": True, "n": 4, "best_of": 2}, "best_of", "at least n = 4"),
        ({"use_beam_search": True, "n": 12}, None, "12 beams run at once, and the engine takes 8"),
        ({"early_stopping": True}, "early_stopping", "give use_beam_search"),
        ({"penalty_alpha": 0.6}, "penalty_alpha", "no contrastive search"),
        ({"dola_layers": "low"}, "dola_layers", "no DoLa"),
        ({"num_beam_groups": 2}, "num_beam_groups", "no diverse beam search"),
    ],
)
def test_what_cannot_be_is_refused_by_name(served: Served, fields: Any, named: str | None, words: str) -> None:
    reply = served.ask("POST", "/v1/completions", {"model": served.model, "prompt": "ab", **fields})
    assert reply.status == 400 and words in reply.json["error"]["message"], reply.raw
    assert reply.json["error"]["param"] == named


def test_a_judge_picks_the_best_of_several(served: Served) -> None:
    """In completions and chats, the judge's choice differs from the likeliest answer, which a request without a judge
    gets."""
    every = [choice["text"] for choice in served.complete("ab", n=8, **DRAWN)["choices"]]
    liked = [text for text in every if text.endswith("\0")]
    assert liked and len(liked) < 8, every
    best = served.complete("ab", n=2, best_of=8, **DRAWN)
    assert [choice["text"] for choice in best["choices"]] == liked[:2]
    assert best["usage"]["completion_tokens"] == 24
    chat = served.chat("ab", n=1, best_of=8, **DRAWN)
    assert chat["choices"][0]["message"]["content"].endswith("\0") and len(chat["choices"]) == 1
    reply = served.ask("POST", "/v1/chat/completions", {
        "model": served.model, "messages": [{"role": "user", "content": "a"}], "best_of": 2, "stream": True
    })  # fmt: skip
    assert reply.status == 400 and reply.json["error"]["param"] == "best_of"


def test_a_judge_that_hangs_or_is_dead_is_named_and_delays_no_answer_beyond_its_deadline(served: Served) -> None:
    """At its deadline a request gets 504; while the judge is started again it gets 503, before answers are generated;
    other requests are answered all the time."""
    body = {"model": served.model, "prompt": "ab", "best_of": 4, **DRAWN}
    [judge] = [
        one for one in psutil.Process(served.process.pid).children() if "judge.engine" in " ".join(one.cmdline())
    ]
    judge.suspend()
    began = time.monotonic()
    late = served.ask("POST", "/v1/completions", {**body, "deadline": 0.5})
    assert time.monotonic() - began < 6  # --watchdog is 10 s
    assert late.status == 504 and "the judge: the deadline" in late.json["error"]["message"], late.raw
    judge.kill()
    served.wait_until(lambda: served.ask("POST", "/v1/completions", body).status == 503)
    before = served.metric("icc:generation_tokens_total")
    dead = served.ask("POST", "/v1/completions", body)
    assert dead.status == 503 and "the judge is not ready" in dead.json["error"]["message"], dead.raw
    assert served.metric("icc:generation_tokens_total") == before
    assert len(served.complete("ab", **DRAWN)["choices"]) == 1
    served.wait_until(lambda: served.ask("POST", "/v1/completions", body).status == 200)


@pytest.mark.parametrize("judge", [None, Indifferent()])
def test_answers_that_a_deadline_kept_from_beginning_are_none_of_the_best(judge: Judge | None) -> None:
    """Empty answers have no unlikely token; they waited for the others because the batch was full."""
    likely = {2: -3.0, 3: -2.0}  # log-probabilities by the answer's number; all other answers are empty
    deltas = [
        Delta(5, n, (9,), "a", (TokenLogprob(9, likely[n], ()),), reason="deadline") if n in likely
        else Delta(5, n, reason="deadline")
        for n in range(5)
    ]  # fmt: skip
    job = Job([], Price(0, 0, 0), 1.0, best=3, questions=["why"])
    found = asyncio.run(best_of(job, deltas, judge))[5]
    assert sorted(found[:2]) == [2, 3] and found[2] == 0
    assert judge is not None or found[0] == 3


def test_a_batch_has_beams_and_a_judge(toy: Path, judge: Path, tmp_path: Path) -> None:
    bodies = {"search": {"n": 2, **SEARCH}, "judged": {"best_of": 8, **DRAWN}}
    lines = [
        {"custom_id": name, "url": "/v1/completions", "body": {"model": "toy", "prompt": "ab", **body}}
        for name, body in bodies.items()
    ]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["batch", str(toy), str(source), str(target), "--judge", str(judge)]) == 0
    found = {line["custom_id"]: line["response"]["body"] for line in map(json.loads, target.read_text().splitlines())}
    scores = [choice["score"] for choice in found["search"]["choices"]]
    assert len(scores) == 2 and scores[0] >= scores[1]
    assert found["judged"]["choices"][0]["text"].endswith("\0")


def test_the_command_line_has_beams_and_a_judge(toy: Path, judge: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*options: str) -> dict[str, Any]:
        assert main(["run", str(toy), "-p", "ab", "--raw", "--json", *options]) == 0
        return json.loads(capsys.readouterr().out)

    with load(toy) as llm:
        [wanted] = llm.generate(["ab"], SamplingParams(beams=3, max_tokens=5, length_penalty=2.0, early_stopping=True))
    options = ["--beams", "3", "--max-tokens", "5", "--length-penalty", "2", "--early-stopping", "true"]
    found = run(*options)
    assert (found["text"], found["score"]) == (wanted.text, wanted.score)
    drawn = ["--temperature", "100", "--regex", "[A\\x00]{3}", "--seed", "4", "--best-of", "8"]
    assert run(*drawn, "--judge", str(judge))["text"].endswith("\0")
    likeliest = run("--temperature", "1", "--best-of", "4", "--max-tokens", "3")
    assert len(likeliest["token_ids"]) <= 3
    for wrong, code in ((["--judge", str(judge)], 2), (["--best-of", "2", "--judge", str(toy)], 2)):
        assert main(["run", str(toy), "-p", "ab", *wrong]) == code
        said = capsys.readouterr().err
        assert "--judge" in said and "Traceback" not in said
