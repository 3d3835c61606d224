"""Which adapters an engine knows, and which of them are in its slots: the least recently used one is evicted (S-LoRA,
Sheng et al. 2023, arXiv:2311.03285)."""

from __future__ import annotations

import hashlib
import logging
import struct
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock
from typing import Protocol

import numpy as np

from ..errors import RequestError
from ..format.adapters import AdapterPlan
from .adapter import Adapter, named_as, told_idle
from .base_weights import BaseWeights
from .bases import other_base
from .experts import with_experts_together
from .fitting import check_fits, check_invocation, idle_without_room
from .gguf import GgufNames
from .packing import Packed, pack_slot, slot_bytes
from .reader import read_adapter, stamp_of

log = logging.getLogger("icc.adapters")
HOST_BYTES = 2 << 30  # for adapters that are ready to be put into a slot
_WRITE_S = 1.0  # how long `hold` waits for a write before it looks again


class PoolWriter(Protocol):
    """A device that can write pools; see `Device.write_pool`."""

    def write_pool(self, name: str, offset: int, values: np.ndarray, only: int = -1) -> None:
        """Put `values` of any shape at byte `offset` of the pool `name`, of one rank or of all (-1)."""
        ...


@dataclass(eq=False)
class Loaded:
    """An adapter that is in a slot or being written to one. key: identifies the adapter at its scale. users: how many
    requests run with it; it is not evicted while there are any."""

    adapter: Adapter
    key: bytes
    slot: int
    writing: Future[None]
    users: int = 0

    def rows(self, begin: int | None, longest: int) -> bytes:
        """The input of a request, int32 [longest]: the slot from `begin` on, -1 before; None: -1 everywhere."""
        start = longest if begin is None else begin
        return (array("i", [-1]) * start + array("i", [self.slot]) * (longest - start)).tobytes()


@dataclass(eq=False)
class ResidentAdapters:
    """The adapters of one executor; thread-safe.

    plan: the engine's room for adapters. base: the engine's own weights. host_bytes: host memory for adapters that are
    not in a slot; others are read from disk again. model: the name of the model that the engine was compiled from, ""
    if it is not known. vocab_size: the engine's, 0 if it is not known.
    """

    plan: AdapterPlan
    writer: PoolWriter
    base: BaseWeights
    host_bytes: int = HOST_BYTES
    model: str = ""
    vocab_size: int = 0
    _known: dict[str, Adapter] = field(default_factory=dict, init=False)
    _slots: OrderedDict[bytes, Loaded] = field(default_factory=OrderedDict, init=False)  # most recently used at the end
    # packed adapters at their scales, with their digests; most recently used at the end
    _packed: OrderedDict[bytes, tuple[bytes, Packed]] = field(default_factory=OrderedDict, init=False)
    _held: set[bytes] = field(default_factory=set, init=False)  # keys of adapters that `hold` keeps in slots
    _lock: Lock = field(default_factory=Lock, init=False)
    _thread: ThreadPoolExecutor = field(init=False)

    def __post_init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "icc-adapters")

    @property
    def names(self) -> list[str]:
        """The adapters that requests may ask for, the oldest first."""
        return list(self._known)

    @property
    def resident(self) -> list[str]:
        """The names of adapters in slots, the most recently used last; an adapter that was replaced or removed has no
        name."""
        with self._lock:
            known = self._known.items()
            held = dict.fromkeys(loaded.adapter.digest for loaded in self._slots.values())
            return [name for digest in held for name, adapter in known if adapter.digest == digest]

    def told_as(self, key: bytes) -> str:
        """A name to show for the adapter in a slot that has this key: with a part of the key at a scale other than 1,
        and the whole key if the adapter has lost its name."""
        with self._lock:
            loaded = self._slots.get(key)
            digest = None if loaded is None else loaded.adapter.digest
            name = next((name for name, adapter in self._known.items() if adapter.digest == digest), None)
            if name is None or digest is None:
                return key.hex()
            return name if key == _scaled_key(digest, 1.0) else f"{name}*{key[:4].hex()}"

    def add(self, name: str, path: Path) -> Adapter:
        """Read an adapter, check that it fits, and register it under a name. An adapter that had the name is replaced;
        requests that run with it keep it. Raises AdapterError, or RequestError if the adapter does not fit, or if a
        drafter holds the only slot."""
        if len(self._held) >= self.plan.slots:
            hint = "compile the model with --adapters for one more"
            raise RequestError("the drafter's adapter takes all of the engine's room", hint, field="adapter")
        adapter, packed = self._prepared(name, path)
        with self._lock:
            self._known[name] = adapter
            self._keep(adapter.digest, adapter.digest, packed)
            self._forget_unknown()
        return adapter

    def hold(self, name: str, path: Path) -> Loaded:
        """Put an adapter into a slot for a drafter, where it stays until `let_go`; requests cannot ask for it. name:
        for messages. Raises AdapterError, or RequestError if the adapter does not fit, or if all slots are in use."""
        adapter, packed = self._prepared(name, path)
        with self._lock:
            self._keep(adapter.digest, adapter.digest, packed)
        while True:
            with self._lock:
                if (found := self._placed(adapter, 1.0)) is not None:
                    self._held.add(found.key)
                    return found
                if all(loaded.writing.done() for loaded in self._slots.values()):
                    break
            self.wait(_WRITE_S)
        hint = "compile the model with --adapters for one more"
        raise RequestError(f"adapter {name}: all slots for adapters are in use", hint, field="adapter")

    def let_go(self, loaded: Loaded) -> None:
        """Undo one `hold`."""
        self.release(loaded)
        self._held.discard(loaded.key)

    def _prepared(self, name: str, path: Path) -> tuple[Adapter, Packed]:
        """An adapter without its tensors, checked, and packed for a slot. Raises as `add`."""
        stamp = stamp_of(path)  # before it is read, so that a change in between is noticed
        adapter = self._read(path)
        check_fits(self.plan, name, adapter, self.base)
        check_invocation(self.vocab_size, name, adapter)
        packed = pack_slot(self.plan, adapter, self.base)
        for told in (other_base(adapter, self.model), told_idle(adapter, idle_without_room(self.plan, adapter))):
            if told:
                log.warning("adapter %s: %s", name, told)
        return replace(adapter, changes={}, stamp=stamp), packed

    def remove(self, name: str) -> None:
        """Forget a name; requests that run with the adapter keep it. RequestError if no adapter has the name."""
        with self._lock:
            self._check(name)
            del self._known[name]
            self._forget_unknown()

    def place(self, name: str, scale: float = 1.0) -> Loaded | None:
        """The adapter times `scale` in its slot, kept there until `release`; None while it is being written, or while
        all slots are in use. RequestError if no adapter has the name, or if it cannot be read any more."""
        with self._lock:
            return self._placed(self._check(name), scale)

    def salt_of(self, name: str, scale: float, prompt: Sequence[int]) -> tuple[bytes, int]:
        """A salt for the KV of a prompt with the adapter times `scale`, and the first token whose KV the adapter
        changes: `own_salt` and `own_from` of CachedSequence. RequestError if no adapter has the name."""
        with self._lock:
            adapter = self._check(name)
        begin = adapter.begin(prompt)
        return (b"", 0) if begin is None else (_scaled_key(adapter.digest, scale), begin)

    def release(self, loaded: Loaded) -> None:
        """Undo one `place`: a request that used the adapter has ended."""
        with self._lock:
            loaded.users -= 1

    def wait(self, seconds: float) -> None:
        """Wait until the first adapter that is being written is in its slot, at most `seconds`."""
        with self._lock:
            pending = [loaded.writing for loaded in self._slots.values() if not loaded.writing.done()]
        if pending:
            try:
                pending[0].result(seconds)
            except Exception:  # `place` raises the error
                return

    def close(self) -> None:
        """Stop loading."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _read(self, path: Path, digest: bytes = b"") -> Adapter:
        names = self._gguf_names() if path.is_file() else None
        shapes = {
            site.parameter: (site.experts, site.n, site.k) if site.experts else (site.n, site.k)
            for site in self.plan.sites
        }
        return named_as(with_experts_together(read_adapter(path, names, digest), shapes), shapes)

    def _gguf_names(self) -> GgufNames | None:
        """llama.cpp's names for the weights of the sites; None if they are not known."""
        if not self.plan.gguf:
            return None
        named = [site for site in self.plan.sites if site.gguf]
        orders = {site.parameter: self.base.vector(site.gguf_rows).astype(int) for site in named if site.gguf_rows}
        return GgufNames(self.plan.gguf, {site.parameter: tuple(site.gguf) for site in named}, orders)

    def _check(self, name: str) -> Adapter:
        if name not in self._known:
            have = f"there are {', '.join(self._known)}" if self._known else "there is none"
            raise RequestError(f"there is no adapter {name!r}: {have}", field="adapter")
        return self._known[name]

    def _placed(self, adapter: Adapter, scale: float) -> Loaded | None:
        """As `place`, for an adapter whether or not it has a name."""
        key = _scaled_key(adapter.digest, scale)
        found = self._slots.get(key)
        if found is None:
            if (slot := self._free_slot()) is None:
                return None
            found = Loaded(adapter, key, slot, self._thread.submit(self._write, adapter, scale, slot))
            self._slots[key] = found
        self._slots.move_to_end(key)
        if not found.writing.done():
            return None
        if (error := found.writing.exception()) is not None:
            del self._slots[key]
            raise error
        found.users += 1
        return found

    def _free_slot(self) -> int | None:
        """A free slot: an empty one, else the least recently used one."""
        taken = {loaded.slot for loaded in self._slots.values()}
        empty = next((slot for slot in range(self.plan.slots) if slot not in taken), None)
        if empty is not None:
            return empty
        for key, loaded in self._slots.items():
            if not loaded.users and loaded.writing.done():
                del self._slots[key]
                return loaded.slot
        return None

    def _write(self, adapter: Adapter, scale: float, slot: int) -> None:
        """Write an adapter into a slot; runs in the loading thread."""
        key = _scaled_key(adapter.digest, scale)
        with self._lock:
            _, packed = self._packed.get(key, (b"", None))
        if packed is None:
            is_as_it_was = adapter.stamp == stamp_of(adapter.path) != ()
            again = self._read(adapter.path, adapter.digest if is_as_it_was else b"")
            if again.digest != adapter.digest:
                raise RequestError(f"{adapter.path} has changed since it was loaded", "load it again", field="adapter")
            packed = pack_slot(self.plan, again, self.base, scale)
            with self._lock:
                self._keep(key, adapter.digest, packed)
        for pool in self.plan.pools:
            place = pool.first + slot
            for rank, part in enumerate(packed[pool.weight]):
                if part.size:
                    self.writer.write_pool(pool.weight, place * part.nbytes, part, rank if pool.cuts else -1)

    def _keep(self, key: bytes, digest: bytes, packed: Packed) -> None:
        self._packed[key] = digest, packed
        self._packed.move_to_end(key)
        while len(self._packed) > 1 and sum(slot_bytes(one) for _, one in self._packed.values()) > self.host_bytes:
            self._packed.popitem(last=False)

    def _forget_unknown(self) -> None:
        """Drop adapters that have no name any more."""
        known = {adapter.digest for adapter in self._known.values()}
        for key in [key for key, (digest, _) in self._packed.items() if digest not in known]:
            del self._packed[key]


def _scaled_key(digest: bytes, scale: float) -> bytes:
    """The key of an adapter at a scale: its digest if the scale is 1."""
    return digest if scale == 1.0 else hashlib.blake2b(digest + struct.pack("<d", scale), digest_size=32).digest()
