"""Adapters under load: fewer slots than adapters, too few KV blocks, aborts, replacements. Each answer equals that of
the request alone."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import icc
import pytest
from icc import SamplingParams
from icc.runtime.adapters.resident import ResidentAdapters
from icc.runtime.llm import LLM
from icc.runtime.loop.driver import EngineTask
from icc.runtime.query import Query
from peft_models import save_adapter

NAMES = ["", "one", "two", "three", "four"]
TOKENS = 16
BYTES = 48 << 10  # KV: three blocks of 32 tokens; a sequence needs two
Asked = tuple[tuple[int, ...], str, int | None]  # a prompt, an adapter, and the seed of the answer


@pytest.fixture(scope="module")
def folders(model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    options = {"target_modules": ["q_proj", "v_proj", "down_proj"]}
    return {
        name: save_adapter(model("llama"), folder / name, seed, 0.3, r=2 + 4 * seed, **options)
        for seed, name in enumerate(NAMES[1:])
    }


@pytest.fixture
def llm(engine: Callable[..., Path], folders: dict[str, Path]) -> Iterator[LLM]:
    """Two slots, and memory for fewer than three sequences."""
    with icc.load(engine("llama", adapters="2x16"), kv_bytes=BYTES, swap_bytes=0) as found:
        for name, path in folders.items():
            found.load_adapter(name, path)
        yield found


def query(prompt: tuple[int, ...], name: str, seed: int | None) -> Query:
    """A greedy query (seed None), or one that is sampled with a seed."""
    drawn = {"temperature": 0.0} if seed is None else {"temperature": 1.0, "seed": seed}
    return Query(prompt, SamplingParams(max_tokens=TOKENS, ignore_eos=True, **drawn), adapter=name)  # type: ignore[arg-type]


def answer(llm: LLM, asked: Query) -> tuple[int, ...]:
    llm.loop.reset()
    task, generation = llm.begin(asked)
    while not task.done:
        llm.driver.step()
    return tuple(generation.completion().token_ids)


@pytest.mark.parametrize("seed", range(4))
def test_every_answer_is_as_alone(seed: int, llm: LLM) -> None:
    draw = random.Random(seed)
    stems = [tuple(draw.randrange(120) for _ in range(24)) for _ in range(2)]  # prefixes that requests share
    asked: list[Asked] = [
        (draw.choice(stems) + (draw.randrange(120),) * draw.randrange(4), draw.choice(NAMES), draw.choice((None, 7)))
        for _ in range(24)
    ]
    expected = {one: answer(llm, query(*one)) for one in set(asked)}
    llm.loop.reset()
    waiting, running, done = list(asked), list[tuple[Asked, EngineTask]](), 0
    while waiting or running:
        while waiting and draw.random() < 0.5:
            one = waiting.pop()
            running.append((one, llm.submit(query(*one))))
        llm.driver.step()
        for one, task in list(running):
            if task.done:
                [generation] = task.generations
                assert tuple(generation.completion().token_ids) == expected[one], one
                running.remove((one, task))
                done += 1
            elif draw.random() < 0.004:
                llm.driver.abort(task)
                running.remove((one, task))
    assert done >= len(asked) / 2 and llm.loop.scheduler.num_preemptions
    assert llm.loop.scheduler.kv.is_idle and not llm.driver.has_work()
    assert llm.adapters is not None and len(llm.adapters.resident) <= 2


def test_one_that_is_replaced_while_it_runs(llm: LLM, folders: dict[str, Path]) -> None:
    """Running requests keep the adapter that they began with, even after preemption; later requests get the new one."""
    prompt = tuple(range(5, 25))
    old, new = (answer(llm, query(prompt, name, None)) for name in ("one", "two"))
    assert old != new
    llm.loop.reset()
    first = [llm.begin(query(prompt, "one", None)) for _ in range(3)]
    llm.load_adapter("one", folders["two"])
    second = [llm.begin(query(prompt, "one", None)) for _ in range(3)]
    while not all(task.done for task, _ in (*first, *second)):
        llm.driver.step()
    assert [tuple(one.completion().token_ids) for _, one in first] == [old] * 3
    assert [tuple(one.completion().token_ids) for _, one in second] == [new] * 3


def test_a_load_delays_no_step(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """While an adapter's weights are being copied to a slot, requests with other adapters or none run to their end."""
    prompt = tuple(range(5, 25))
    expected = {name: answer(llm, query(prompt, name, None)) for name in ("two", "", "one")}  # "one" still has a slot
    llm.loop.reset()
    arrives, write = threading.Event(), ResidentAdapters._write
    monkeypatch.setattr(ResidentAdapters, "_write", lambda *given: (arrives.wait(60), write(*given))[1])
    late = llm.submit(query(prompt, "three", None))
    others = {name: llm.begin(query(prompt, name, None)) for name in ("", "one")}
    while not all(task.done for task, _ in others.values()):
        llm.driver.step()
    assert not late.done and not late.generations
    for name, (_, one) in others.items():
        assert tuple(one.completion().token_ids) == expected[name]
    arrives.set()
    while not late.done:
        llm.driver.step()
    assert late.error is None and len(late.generations[0].completion().token_ids) == TOKENS
