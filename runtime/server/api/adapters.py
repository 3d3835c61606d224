"""ServedAdapters: the adapters that a server offers by name, as models beside the served model."""

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
    """An adapter by its name. path: where it is stored. created: when it was loaded, in seconds since 1970. number:
    stays when the adapter is loaded again."""

    name: str
    path: Path
    created: int
    number: int


@dataclass
class ServedAdapters:
    """Loads adapters in the engine processes, and again in a process that was restarted.

    model_names: the names of the model itself. folder: adapters in it are loaded when a request first names them; None
    for no folder. start: paths of adapters to load before any request is answered, by name.
    """

    engine: EnginePool
    model_names: tuple[str, ...]
    folder: Path | None
    start: Mapping[str, Path]

    def __post_init__(self) -> None:
        self._known: dict[str, ServedAdapter] = {}
        self._loading: dict[str, asyncio.Task[None]] = {}
        self._restoring: dict[int, asyncio.Task[None]] = {}  # by replica: the latest task that loads adapters again
        self.default: tuple[str, float] | None = None  # adapter and scale of requests that name no adapter
        self._numbers = count()
        self._changing = asyncio.Lock()  # adapters are changed one at a time, on all replicas
        self.engine.on_ready, self.engine.on_replaced = self._restore, self._restored

    @property
    def all(self) -> list[ServedAdapter]:
        """Every adapter that is loaded, the oldest first."""
        return list(self._known.values())

    def knows(self, name: str) -> bool:
        """Whether a request may name this adapter: it is loaded, or is in the folder."""
        return name in self._known or self._found(name) is not None

    async def _chosen(self, model: str | None, lora: str | None) -> str:
        """The name of a request's adapter, `lora` or a model that is an adapter, which is loaded first if need be; ""
        for none. HttpError 404 for an unknown name; EngineFailed if it cannot be loaded."""
        name = lora or (model if model is not None and model not in self.model_names else "")
        if not name:
            return ""
        if name in self._known:
            return name
        path, field = self._found(name), "lora" if lora else "model"
        if path is None:
            raise HttpError(404, f"there is no adapter {name[:80]!r}", field, "not_found")
        if name not in self._loading:
            self._loading[name] = asyncio.create_task(self.load(name, path))
        try:
            await asyncio.shield(self._loading[name])
        except EngineFailed as error:  # about a path that the client has not named
            raise EngineFailed(error.status, error.message, field) from error
        finally:
            if name in self._loading and self._loading[name].done():
                del self._loading[name]
        return name

    async def scaled(self, model: str | None, lora: str | Sequence[AdapterScale] | None) -> tuple[str, float]:
        """The name of a request's loaded adapter, and its scale. The request gives a name or a number; if it gives
        neither, the adapter of `set_scales` is taken. HttpError 400 for more than one at a time, 404 for an unknown
        number."""
        found = await self._asked_for(model, lora)
        if found[0] and not self.engine.has_adapter(found[0]):  # restarted replicas are still loading it
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
        """Set the adapter of requests that name none: the only one in `scales` whose scale is not 0, or none. HttpError
        as `scaled`."""
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
        """Load an adapter under a name. again: whether it may replace a loaded adapter of that name. HttpError 400 for
        a name that is taken or invalid; EngineFailed with the engine's reason."""
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
        """Unload an adapter. HttpError 404 if there is none of that name."""
        if name not in self._known:
            raise HttpError(404, f"there is no adapter {name[:80]!r}", "lora_name", "not_found")
        self._forget(name)
        async with self._changing:
            if name not in self._known:  # unless it was loaded again meanwhile
                await self.engine.ask(UnloadAdapter(0, name))

    def _forget(self, name: str) -> None:
        self._known.pop(name, None)
        if self.default is not None and self.default[0] == name:
            self.default = None

    async def load_first(self) -> None:
        """Load the adapters of `start`. AdapterError for the first that the engine refuses; else as `load`."""
        for name, path in self.start.items():
            try:
                await self.load(name, path)
            except EngineFailed as error:
                if error.status != 400:
                    raise
                raise AdapterError(f"--lora {name}={path}: {error}") from error

    def _found(self, name: str) -> Path | None:
        """The path of an adapter in the folder; None if it is not there, or the name leads outside the folder."""
        if self.folder is None or not _NAME.fullmatch(name) or ".." in name:
            return None
        folder = self.folder.resolve()
        for path in (self.folder / name, self.folder / f"{name}.gguf"):
            is_one = path.is_file() if path.suffix == ".gguf" else (path / CONFIG_FILE).is_file()
            if is_one and path.resolve().is_relative_to(folder):
                return path
        return None

    def _restore(self, replica: EngineClient) -> None:
        """Called when a replica has a new engine process: start loading the adapters again there."""
        if self._known:
            self._restoring[replica.number] = asyncio.create_task(self._load_again(replica))

    async def _restored(self, replica: EngineClient) -> None:
        """Wait until a replica has loaded its adapters again, or failed to."""
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
