"""Which adapter a request's number stands for, while adapters are loaded and unloaded and the engine restarts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from icc.runtime.errors import AdapterError, UsageError
from icc.runtime.server.api.adapters import ServedAdapters
from icc.runtime.server.api.errors import HttpError
from icc.runtime.server.api.requests import AdapterScale
from icc.runtime.server.engine.engine_stream import EngineFailed
from icc.runtime.server.engine.messages import LoadAdapter, UnloadAdapter
from icc.runtime.server.options import adapter_folder


class Engine:
    """A pool of one replica, and that replica with the adapters that it has; the adapter named `refused` cannot be
    loaded."""

    def __init__(self) -> None:
        self.on_ready: Callable[[Engine], None] = lambda engine: None
        self.known: set[str] = set()
        self.paths: dict[str, str] = {}
        self.refused = ""
        self.number = 0

    def has_adapter(self, name: str) -> bool:
        return name in self.known

    async def ask(self, question: LoadAdapter | UnloadAdapter) -> None:
        await asyncio.sleep(0)
        if isinstance(question, UnloadAdapter):
            self.known.discard(question.name)
        elif question.name == self.refused:
            raise EngineFailed(400, "damaged")
        else:
            self.known.add(question.name)
            self.paths[question.name] = Path(question.path).name

    def start_again(self) -> None:
        self.known.clear()
        self.on_ready(self)


async def served(*names: str) -> tuple[Any, ServedAdapters]:
    engine: Any = Engine()
    adapters = ServedAdapters(engine, ("base",), None, {name: Path(name) for name in names})
    await adapters.load_first()
    return engine, adapters


def test_what_cannot_be_loaded_at_the_start_is_the_adapters_fault() -> None:
    engine: Any = Engine()
    engine.refused = "one"
    adapters = ServedAdapters(engine, ("base",), None, {"one": Path("nowhere")})
    with pytest.raises(AdapterError, match="--lora one=nowhere: damaged") as refused:
        asyncio.run(adapters.load_first())
    assert refused.value.exit_code == 48


def test_a_folder_of_adapters_is_there(tmp_path: Path) -> None:
    assert adapter_folder(None) is None and adapter_folder(tmp_path) == tmp_path
    with pytest.raises(UsageError, match=r"--lora-dir .*nowhere is no directory"):
        adapter_folder(tmp_path / "nowhere")


def test_a_number_is_kept() -> None:
    async def run() -> None:
        _, adapters = await served("one", "two")
        await adapters.unload("one")
        assert await adapters.scaled("base", [AdapterScale(1, 0.5)]) == ("two", 0.5)
        with pytest.raises(HttpError, match="there is no adapter 0"):
            await adapters.scaled("base", [AdapterScale(0, 0.5)])
        await adapters.load("two", Path("again"))
        await adapters.load("one", Path("one"))
        assert [(one.name, one.number) for one in adapters.all] == [("two", 1), ("one", 2)]

    asyncio.run(run())


def test_after_a_restart_requests_wait_until_adapters_are_there() -> None:
    async def run() -> None:
        engine, adapters = await served("one", "two")
        adapters.set_scales([AdapterScale(0, 0.5)])
        for lora, name in (([AdapterScale(1, 2.0)], "two"), (None, "one"), ("two", "two")):
            engine.start_again()
            found, _ = await adapters.scaled("base", lora)
            assert found == name and name in engine.known

    asyncio.run(run())


def test_a_default_that_is_gone_is_none() -> None:
    async def run() -> None:
        engine, adapters = await served("one", "two")
        adapters.set_scales([AdapterScale(0, 0.5)])
        engine.refused = "one"
        engine.start_again()
        assert await adapters.scaled("base", "two") == ("two", 1.0)
        assert await adapters.scaled("base", None) == ("", 1.0)
        adapters.set_scales([AdapterScale(1, 0.5)])
        await adapters.unload("two")
        assert adapters.default is None

    asyncio.run(run())


def test_of_two_loads_of_one_name_at_once_one_is_refused() -> None:
    """The second load is refused as if it came later; with `again`, it replaces the first in either case."""

    async def go() -> None:
        engine, adapters = await served()
        loads = [adapters.load("one", Path(path), again=False) for path in ("first", "second")]
        found = await asyncio.gather(*loads, return_exceptions=True)
        assert found[0] is None and isinstance(found[1], HttpError) and found[1].status == 400
        assert engine.paths == {"one": "first"} and [one.path.name for one in adapters.all] == ["first"]
        await asyncio.gather(*(adapters.load("one", Path(path)) for path in ("third", "fourth")))
        assert engine.paths == {"one": "fourth"} and [one.path.name for one in adapters.all] == ["fourth"]

    asyncio.run(go())


def test_one_that_is_unloaded_while_it_is_loaded_is_gone() -> None:
    """The later request counts, whether the adapter is replaced or loaded for the first time."""

    async def go() -> None:
        engine, adapters = await served("one")
        loading = asyncio.create_task(adapters.load("one", Path("newer")))
        await asyncio.sleep(0)
        await adapters.unload("one")
        await loading
        assert (engine.known == {"one"}) == adapters.knows("one")  # the two agree, in either order

    asyncio.run(go())


def test_one_that_is_loaded_anew_while_a_replica_comes_back_is_the_new_one_there() -> None:
    async def go() -> None:
        engine, adapters = await served("one", "two")
        engine.start_again()
        await adapters.load("two", Path("newer"))
        await adapters.unload("one")
        await asyncio.gather(*adapters._restoring.values())
        assert engine.paths["two"] == "newer" and engine.known == {"two"}

    asyncio.run(go())
