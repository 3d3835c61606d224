"""AsyncLLM: requests of many tasks in one batch; a request ends with its task."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import icc
import numpy as np
import pytest
from icc.runtime.async_llm import AsyncLLM
from icc.runtime.errors import EngineFormatError, IccError, RequestError
from icc.runtime.executor.base import Executor
from icc.runtime.format.manifest import EmbeddingFacts
from icc.runtime.llm import LLM
from icc.runtime.loop.fake import FakeDevice, FakeExecutor, successor
from icc.runtime.requests.params import SamplingParams
from icc.runtime.templates.source import TemplateSource
from icc.runtime.tokenizer import Tokenizer

VOCAB = 258
TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
HELLO = [{"role": "user", "content": "hi"}]
ENDLESS = SamplingParams(max_tokens=4000, ignore_eos=True)


@pytest.fixture(params=[FakeExecutor, FakeDevice])
def opened(request: Any, toy_manifest: Callable[..., Any], byte_tokenizer_file: Path) -> tuple[AsyncLLM, Executor]:
    """An AsyncLLM whose model counts upwards, and its executor."""
    executor = request.param(
        vocab_size=VOCAB, num_blocks=8000, block_size=8, max_batch_size=8, max_step_tokens=256, rule=successor
    )
    manifest = toy_manifest(max_seq_len=5000, max_step_tokens=256, max_batch_size=8)
    tokenizer = Tokenizer(byte_tokenizer_file.read_bytes())
    return AsyncLLM(lambda: LLM(manifest, executor, tokenizer, template=TemplateSource(TEMPLATE, {}))), executor


def idle(llm: AsyncLLM) -> bool:
    loop = llm._loaded.loop
    return not loop.has_work() and loop.scheduler.kv.is_idle


async def until(check: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not check():
            await asyncio.sleep(0.001)


def test_requests_of_many_tasks_run_in_one_batch(opened: tuple[AsyncLLM, Any]) -> None:
    model, executor = opened

    async def main() -> None:
        async with model as llm:
            prompts = [chr(97 + i) for i in range(12)]
            asked = [llm.generate(prompt, SamplingParams(max_tokens=60, ignore_eos=True)) for prompt in prompts]
            found = await asyncio.gather(*asked)
            assert [one[0].text[:3] for one in found] == ["".join(chr(98 + i + j) for j in range(3)) for i in range(12)]
            assert max(len(batch.sequences) for batch in executor.batches) == 8
            assert idle(llm)

    asyncio.run(main())


def test_what_it_answers_is_what_llm_answers(opened: tuple[AsyncLLM, Any]) -> None:
    async def main() -> None:
        async with opened[0] as llm:
            plain = llm._loaded
            params = SamplingParams(max_tokens=6, temperature=0.0)
            assert (await llm.generate(["ab", [97, 98]], params))[1].text == "cdefgh"
            answer = await llm.chat(HELLO, params)
            assert (answer.text, answer.finish_reason) == ("^_`abc", "length")
            assert [one.text for one in await llm.chat([HELLO, HELLO], params)] == ["^_`abc"] * 2
            pieces = [piece async for piece in llm.stream(HELLO, params)]
            assert "".join(pieces) == "^_`abc" and pieces[-1].finish_reason == "length"
            assert sum((piece.token_ids for piece in pieces), ()) == answer.token_ids
            schema = SamplingParams(regex="[0-9]{4}", temperature=9.0)
            assert (await llm.chat(HELLO, schema)).text.isdigit()
            assert llm.manifest == plain.manifest

    asyncio.run(main())


def test_a_cancelled_task_and_a_closed_stream_free_their_places(opened: tuple[AsyncLLM, Any]) -> None:
    async def main() -> None:
        async with opened[0] as llm:
            task = asyncio.create_task(llm.generate(["a", "b"], ENDLESS))
            streams = [llm.stream("c", ENDLESS) for _ in range(3)]
            for stream in streams:
                assert (await anext(stream)).startswith("d")
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await streams[0].aclose()  # type: ignore[attr-defined]
            async for _ in streams[1]:
                break
            async with contextlib.aclosing(streams[2]) as last:  # type: ignore[type-var]
                await anext(last)
            del stream, streams
            gc.collect()
            await until(lambda: idle(llm))
            assert (await llm.generate("a", SamplingParams(max_tokens=2)))[0].text == "bc"

    asyncio.run(main())


def test_what_a_caller_has_wrong_ends_nothing_else(opened: tuple[AsyncLLM, Any]) -> None:
    async def main() -> None:
        async with opened[0] as llm:
            stream = llm.stream("a", ENDLESS)
            await anext(stream)
            for wrong in (
                llm.generate([[5000]]),
                llm.chat([{"content": "x"}]),
                llm.chat(HELLO, SamplingParams(n=2)),
                llm.generate(["a", [300]]),
                llm.generate("a", SamplingParams(regex="((")),
                anext(llm.stream("a", SamplingParams(n=2))),
            ):
                with pytest.raises(RequestError):
                    await wrong
            assert await anext(stream)
            await stream.aclose()  # type: ignore[attr-defined]
            await until(lambda: idle(llm))

    asyncio.run(main())


def test_closing_ends_what_runs_and_then_nothing_can_be_asked(opened: tuple[AsyncLLM, Any]) -> None:
    model, executor = opened

    async def main() -> None:
        async with model as llm:
            task = asyncio.create_task(llm.generate("a", ENDLESS))
            stream = llm.stream("a", ENDLESS)
            await anext(stream)
        with pytest.raises(IccError, match="the engine was closed"):
            await task
        with pytest.raises(IccError, match="the engine was closed"):
            async for _ in stream:
                pass
        with pytest.raises(IccError, match="not loaded"):
            await llm.generate("a")
        await llm.close()

    asyncio.run(main())
    assert executor.closed


def test_a_device_that_fails_tells_everybody(opened: tuple[AsyncLLM, Any]) -> None:
    model, executor = opened

    async def main() -> None:
        async with model as llm:
            stream = llm.stream("a", ENDLESS)
            await anext(stream)

            def broken(*arguments: object) -> None:
                raise OSError("the device is lost")

            executor.step = executor.submit = broken
            with pytest.raises(OSError, match="lost"):
                async for _ in stream:
                    pass
            with pytest.raises(OSError, match="lost"):
                await llm.generate("a")

    asyncio.run(main())


def test_texts_become_the_same_vectors_as_without_asyncio(make_engine: Callable[..., Path]) -> None:
    facts = EmbeddingFacts("mean", True, VOCAB)
    root = make_engine(embedding=facts, max_seq_len=64, max_step_tokens=16)
    texts = ["abc", "x" * 40, "b"]
    with icc.load(root, threads=1) as llm:
        expected = llm.embed(texts)

    async def main() -> None:
        async with icc.load_async(root, threads=1) as llm:
            found = await asyncio.gather(llm.embed(texts), llm.embed([[97, 98]]), llm.embed("b"), llm.embed([]))
            np.testing.assert_array_equal(found[0], expected)
            assert [len(one) for one in found] == [3, 1, 1, 0]
            for wrong in ([[1, VOCAB]], [""]):
                with pytest.raises(RequestError):
                    await llm.embed(wrong)
            asked = asyncio.create_task(llm.embed(["a" * 60] * 20))
            await until(llm._loaded.loop.has_work)
            asked.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asked
            await until(lambda: idle(llm))

    asyncio.run(main())


def test_an_engine_is_loaded_by_await_or_by_a_block(make_engine: Callable[..., Path]) -> None:
    root = make_engine()

    async def main() -> None:
        params = SamplingParams(max_tokens=3)
        llm = await icc.load_async(root, threads=1)
        try:
            assert (await llm.generate("abc", params))[0].text == "def"
        finally:
            await llm.close()
        async with icc.load_async(root, threads=1) as llm:
            assert [str(piece) async for piece in llm.stream([97, 98], params)] == ["c", "d", "e"]
        with pytest.raises(EngineFormatError, match="does not exist"):
            await icc.load_async(root / "nothing")

    asyncio.run(main())
