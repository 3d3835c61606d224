"""Adapters in conversations, in streams, and from asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import icc
import numpy as np
import pytest
import tokenizers
from icc import SamplingParams
from icc.runtime.async_llm import AsyncLLM
from icc.runtime.chat.session import Session
from icc.runtime.errors import AdapterError, RequestError, UsageError
from icc.runtime.llm import LLM
from icc.runtime.templates.source import TemplateSource
from icc.runtime.tokenizer import Tokenizer
from peft_models import save_adapter
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
BYTES = tokenizers.Tokenizer(WordLevel({chr(code): code for code in range(120)}, unk_token=chr(0)))
BYTES.pre_tokenizer, BYTES.decoder = Split("", "isolated"), Fuse()
HELLO = [{"role": "user", "content": "hello"}]
PARAMS = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def adapter(model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapter") / "one"
    return save_adapter(model("llama"), folder, 3, 0.3, r=4, target_modules=["q_proj", "v_proj", "down_proj"])


@pytest.fixture(scope="module")
def opened(engine: Callable[..., Path]) -> Callable[[], LLM]:
    """Opens an engine with adapter slots, a tokenizer and a chat template."""

    def make() -> LLM:
        bare, tokenizer = icc.load(engine("llama", adapters="2x16")), Tokenizer(BYTES.to_str().encode())
        return LLM(bare.manifest, bare.executor, tokenizer, bare.engine, template=TemplateSource(TEMPLATE, {}))

    return make


def test_a_conversation(opened: Callable[[], LLM], adapter: Path) -> None:
    """The first answer waits until the adapter is loaded."""
    settings = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True}

    def ask(llm: LLM) -> str:
        return Session(llm, settings=settings).ask("hello", lambda text: None, lambda: False).text

    with opened() as llm:
        base = ask(llm)
        llm.use_adapter(adapter)
        expected = ask(llm)
        llm.unload_adapter("default")
        with pytest.raises(RequestError, match="there is no adapter 'default'"):
            ask(llm)
    with opened() as llm:
        llm.load_adapter("one", adapter)
        found = llm.chat(HELLO, PARAMS, adapter="one")
        streamed = "".join(str(piece) for piece in llm.stream(HELLO, PARAMS, adapter="one"))
        assert llm.chat(HELLO, PARAMS).text == base != expected
    assert found.text == streamed == expected


def test_adapters_that_are_loaded_with_the_engine(engine: Callable[..., Path], adapter: Path) -> None:
    path = engine("llama", adapters="2x16")
    with icc.load(path, adapters={"one": adapter}) as llm:
        expected = llm.logits([5, 9, 33], adapter="one")
        llm.add_adapter("two", adapter)
        assert np.array_equal(llm.logits([5, 9, 33], adapter="two"), expected)
        assert not np.array_equal(llm.logits([5, 9, 33]), expected)
        llm.remove_adapter("one")
        with pytest.raises(RequestError, match="there is no adapter 'one': there are two"):
            llm.generate([[5]], adapter="one")
        with pytest.raises(RequestError, match="adapter = 5: must be a name"):
            llm.generate([[5]], adapter=5)  # type: ignore[arg-type]
        for wrong in ("abc", [5.5], None):
            with pytest.raises(RequestError, match="is not token ids"):
                llm.logits(wrong)  # type: ignore[arg-type]
    with pytest.raises(AdapterError, match="no directory with an adapter"):
        icc.load(path, adapters={"one": "nowhere"})
    with pytest.raises(UsageError, match="must be a mapping of names to directories"):
        icc.load(path, adapters=["one"])  # type: ignore[arg-type]


def test_from_asyncio(opened: Callable[[], LLM], adapter: Path) -> None:
    with opened() as llm:
        llm.load_adapter("one", adapter)
        prompts, names = ["hello", "hello"], ["one", None]
        expected = [one.token_ids for one in llm.generate(prompts, PARAMS, adapter=names)]

    async def main() -> None:
        async with AsyncLLM(opened) as llm:
            await llm.load_adapter("one", adapter)
            assert [one.token_ids for one in await llm.generate(prompts, PARAMS, adapter=names)] == expected
            assert (await llm.chat(HELLO, PARAMS, adapter="one")).token_ids == expected[0]
            pieces = [piece async for piece in llm.stream("hello", PARAMS, adapter="one")]
            assert tuple(token for piece in pieces for token in piece.token_ids) == tuple(expected[0])
            await llm.unload_adapter("one")
            with pytest.raises(RequestError, match="there is no adapter 'one'"):
                await llm.generate("hello", PARAMS, adapter="one")

    asyncio.run(main())
