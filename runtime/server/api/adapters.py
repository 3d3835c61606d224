"""ServedAdapters: the adapters that a server knows by name, as models beside the one that it serves."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import NamedTuple

from ...adapters.config import CONFIG_FILE
from ...errors import AdapterError
from ..engine.engine_client import EngineClient
from ..engine.engine_pool import EnginePool
from ..engine.engine_stream import EngineFailed
from ..engine.messages import LoadAdapter, UnloadAdapter
from .errors import HttpError
from .requests import ADAPTER_NAME, AdapterScale

log = logging.getLogger("icc.serve")
MAX_ADAPTERS = 10_000
_NAME = re.compile(ADAPTER_NAME)


class ServedAdapter(NamedTuple):
    """An adapter by its name: where it lies, when it was loaded (seconds since 1970), and a number, which it keeps."""

    name: str
    path: Path
    created: int
    number: int


@dataclass
class ServedAdapters:
    """Loads adapters in the engine processes, and again in one that was started again.

    model_names: what requests call the model itself. folder: adapters in it are loaded when they are first asked for;
    None for no such. start: those that are loaded before anything is answered, by name.
    """

    engine: EnginePool
    model_names: tuple[str, ...]
    folder: Path | None
    start: Mapping[str, Path]

    def __post_init__(self) -> None:
        self._known: dict[str, ServedAdapter] = {}
        self._loading: dict[str, asyncio.Task[None]] = {}
        self._restoring: dict[int, asyncio.Task[None]] = {}  # by replica, the last time
        self.default: tuple[str, float] | None = None  # of requests that name none
        self._numbers = count()
        self._changing = asyncio.Lock()  # of what the replicas know: one change after the other, on all of them
        self.engine.on_ready, self.engine.on_replaced = self._restore, self._restored

    @property
    def all(self) -> list[ServedAdapter]:
        """Every adapter that is loaded, the oldest first."""
        return list(self._known.values())

    def knows(self, name: str) -> bool:
        """Whether a request may name it: it is loaded, or lies in the folder."""
        return name in self._known or self._found(name) is not None

    async def _chosen(self, model: str | None, lora: str | None) -> str:
        """The adapter of a request: `lora`, or a model that is one, loaded; "" for none. HttpError 404 for a name that
        there is not."""
        name = lora or (model if model is not None and model not in self.model_names else "")
        if not name:
            return ""
        if name in self._known:
            return name
        path = self._found(name)
        if path is None:
            raise HttpError(404, f"there is no adapter {name[:80]!r}", "model" if lora is None else "lora", "not_found")
        if name not in self._loading:
            self._loading[name] = asyncio.create_task(self.load(name, path))
        try:
            await asyncio.shield(self._loading[name])
        finally:
            if name in self._loading and self._loading[name].done():
                del self._loading[name]
        return name

    async def scaled(self, model: str | None, lora: str | Sequence[AdapterScale] | None) -> tuple[str, float]:
        """The adapter of a request, loaded, and its scale: by its name, by its number, or, where the request
        names none, what `set_scales` was told. HttpError 400 for more than one at a time, 404 for no such
        number."""
        found = await self._asked_for(model, lora)
        if found[0] and not self.engine.has_adapter(found[0]):  # no replica has it again yet
            await asyncio.gather(*self._restoring.values())
            return await self._asked_for(model, lora)
        return found

    async def _asked_for(self, model: str | None, lora: str | Sequence[AdapterScale] | None) -> tuple[str, float]:
        is_base = model is None or model in self.model_names
        if lora is None and self.default is not None and is_base:
            return self.default
        if lora is None or isinstance(lora, str):
            if lora and not is_base and lora != model:
                raise HttpError(400, f"the model is an adapter, and lora names {lora[:80]!r}: leave one out", "lora")
            return await self._chosen(model, lora), 1.0
        if not is_base:
            raise HttpError(400, "the model is an adapter, and lora names one by its number: leave one out", "lora")
        return self._one_of(lora) or ("", 1.0)

    def set_scales(self, scales: Sequence[AdapterScale]) -> None:
        """What requests run with that name no adapter: the one of a scale other than 0. HttpError as `scaled`."""
        self.default = self._one_of(scales)

    def _one_of(self, scales: Sequence[AdapterScale]) -> tuple[str, float] | None:
        known = {adapter.number: adapter.name for adapter in self.all}
        for one in scales:
            if one.id not in known:
                raise HttpError(404, f"there is no adapter {one.id}: there are {len(known)}", "lora", "not_found")
        wanted = [one for one in scales if one.scale]
        if len(wanted) > 1:
            raise HttpError(400, "a request runs with one adapter: set the scales of the others to 0", "lora")
        return (known[wanted[0].id], wanted[0].scale) if wanted else None

    async def load(self, name: str, path: Path, again: bool = True) -> None:
        """Load an adapter under a name; `again`: in place of one that has it. HttpError 400 for a name that is taken or
        is none; EngineFailed with the reason of the engine."""
        self._check(name, again)
        async with self._changing:
            self._check(name, again)  # others may have been loaded meanwhile
            await self.engine.ask(LoadAdapter(0, name, str(path.resolve())))
            number = self._known[name].number if name in self._known else next(self._numbers)
            self._known[name] = ServedAdapter(name, path, int(time.time()), number)

    def _check(self, name: str, again: bool) -> None:
        if name in self.model_names or (name in self._known and not again):
            raise HttpError(400, f"there is a model {name!r} already", "lora_name", "invalid_value")
        if not _NAME.fullmatch(name):
            raise HttpError(400, f"{name[:80]!r} is no name for an adapter", "lora_name", "invalid_value")
        if len(self._known) >= MAX_ADAPTERS and name not in self._known:
            raise HttpError(400, f"there are {MAX_ADAPTERS} adapters already: unload one", "lora_name")

    async def unload(self, name: str) -> None:
        """Forget an adapter. HttpError 404 if there is none of that name."""
        if name not in self._known:
            raise HttpError(404, f"there is no adapter {name[:80]!r}", "lora_name", "not_found")
        self._forget(name)
        async with self._changing:
            if name not in self._known:  # nor was it loaded again meanwhile
                await self.engine.ask(UnloadAdapter(0, name))

    def _forget(self, name: str) -> None:
        self._known.pop(name, None)
        if self.default is not None and self.default[0] == name:
            self.default = None

    async def load_first(self) -> None:
        """Load those of `start`. AdapterError for the first that the engine refuses; else as `load`."""
        for name, path in self.start.items():
            try:
                await self.load(name, path)
            except EngineFailed as error:
                if error.status != 400:
                    raise
                raise AdapterError(f"--lora {name}={path}: {error}") from error

    def _found(self, name: str) -> Path | None:
        """An adapter in the folder, by a name that leads nowhere else."""
        if self.folder is None or not _NAME.fullmatch(name) or ".." in name:
            return None
        folder = self.folder.resolve()
        for path in (self.folder / name, self.folder / f"{name}.gguf"):
            is_one = path.is_file() if path.suffix == ".gguf" else (path / CONFIG_FILE).is_file()
            if is_one and path.resolve().is_relative_to(folder):
                return path
        return None

    def _restore(self, replica: EngineClient) -> None:
        """The engine process of a replica is a new one, and knows no adapter."""
        if self._known:
            self._restoring[replica.number] = asyncio.create_task(self._load_again(replica))

    async def _restored(self, replica: EngineClient) -> None:
        """Wait until a replica has its adapters again, or is told why not."""
        if (task := self._restoring.get(replica.number)) is not None:
            await asyncio.wait([task])

    async def _load_again(self, replica: EngineClient) -> None:
        for name in list(self._known):
            async with self._changing:
                adapter = self._known.get(name)
                if adapter is None:
                    continue  # it was unloaded meanwhile
                try:
                    await replica.ask(LoadAdapter(0, name, str(adapter.path.resolve())))
                except EngineFailed as error:
                    log.error("adapter %s cannot be loaded again: %s", name, error.message)
                    if error.status != 503 and not self.engine.has_adapter(name):
                        self._forget(name)
