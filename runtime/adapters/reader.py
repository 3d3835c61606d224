"""Reads adapters that PEFT has written (github.com/huggingface/peft, Mangrulkar et al.): every key is either used or
refused by name."""

from __future__ import annotations

import hashlib
import os
import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from ..errors import AdapterError
from .adapter import Adapter, Change, LowRank, RowChange
from .config import CONFIG_FILE, LoraConfig, read_config
from .gguf import GgufNames, read_gguf
from .tensors import AdapterTensors

WEIGHTS_FILE = "adapter_model.safetensors"
_PREFIX = "base_model.model."
# A key: the module, and which part of its change the tensor is. Older versions write the adapter's name, too.
_KEY = re.compile(
    r"(?P<module>.+?)\.(?P<part>"
    r"lora_[AB](?:\.default)?\.weight|lora_B(?:\.default)?\.bias|lora_embedding_[AB](?:\.default)?|"
    r"lora_magnitude_vector(?:\.default)?(?:\.weight)?|token_adapter\.trainable_tokens_delta(?:\.default)?|"
    r"(?:(?:modules_to_save|original_module|(?:token_adapter\.)?base_layer)(?:\.default)?\.)?(?:weight|bias))"
)
# The order in which PEFT nests the parameters of one module: as transformers' modules create them, the first innermost.
_MADE = ("gate_up_proj", "gate_proj", "up_proj", "down_proj")
_NESTED = ".base_layer"
_LARGEST = float(np.finfo(np.float32).max)
# Where PEFT's wrappers keep a weight or bias that an adapter may hold.
_PLACES = ("modules_to_save", "base_layer", "token_adapter.base_layer")


def stamp_of(path: Path) -> tuple[int, ...]:
    """A tuple that changes when a file of the adapter changes; () if there is no file."""
    try:
        files = [path] if path.is_file() else [path / CONFIG_FILE, path / WEIGHTS_FILE]
        return tuple(part for s in map(os.stat, files) for part in (s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns))
    except OSError:
        return ()


def read_adapter(path: Path, names: GgufNames | None = None, digest: bytes = b"") -> Adapter:
    """Read an adapter from a PEFT directory or a GGUF file. names: needed for GGUF; may be None for PEFT.

    digest: pass the known one if the files have not changed since; computing it takes as long as all else. AdapterError
    if a file is missing or damaged, if icc does not support the tuner or a field, and for the first key that belongs to
    nothing.
    """
    if path.is_file():
        return read_gguf(path, names, digest)
    if not path.is_dir():
        hint = f"it must have {CONFIG_FILE}, {WEIGHTS_FILE}; or give a GGUF file"
        raise AdapterError(f"{path} is no directory with an adapter", hint)
    raw, config = read_config(path)
    if not (path / WEIGHTS_FILE).exists():
        if (path / "adapter_model.bin").exists():
            raise AdapterError(
                f"{path} has a pickle, which can run programs", "save it again with peft, as safetensors"
            )
        if (path / f"{WEIGHTS_FILE}.index.json").exists():
            raise AdapterError(f"{path} is in several files", f"save it again with peft, as one {WEIGHTS_FILE}")
    tensors = AdapterTensors(path / WEIGHTS_FILE)
    changes = _KeyReader(config, tensors).changes()
    invocation = tuple(config.alora_invocation_tokens or ())
    return Adapter(path, digest or _digest(raw, tensors.raw), config.base_model_name_or_path or "", invocation, changes)


def _digest(*parts: bytes) -> bytes:
    found = hashlib.blake2b(digest_size=32, person=b"icc-adapter")
    for part in parts:
        found.update(len(part).to_bytes(8, "little"))
        found.update(part)
    return found.digest()


class _KeyReader:
    """Consumes the keys of one adapter one by one."""

    def __init__(self, config: LoraConfig, tensors: AdapterTensors) -> None:
        self._config, self._tensors = config, tensors
        self._parts: dict[str, dict[str, str]] = defaultdict(dict)  # module -> part -> key
        self._levels: Counter[str] = Counter()  # how many changes of a module are nested

    def changes(self) -> Mapping[str, Change]:
        """The changes, by the names of the weights."""
        for key in self._tensors.names:
            found = _KEY.fullmatch(key.removeprefix(_PREFIX))
            if found is None or ".." in key or ".lora_" in f".{found['module']}":
                raise self._unused(key, "icc does not know what it is")
            part = found["part"].replace(".default", "").removesuffix(".weight")
            self._parts[found["module"]][part or "weight"] = key
        self._levels = Counter(map(_owner, self._parts))
        changes: dict[str, Change] = {}
        for module, parts in self._parts.items():
            for name, change in self._module(module, dict(parts)).items():
                if name in changes:
                    raise self._unused(next(iter(parts.values())), f"{name} is changed twice")
                changes[name] = change
        if not changes:
            raise AdapterError(f"{self._tensors.path} changes nothing: it has no tensors")
        return changes

    def _module(self, module: str, parts: dict[str, str]) -> dict[str, Change]:
        """The changes that the parts of one module make, by the names of the weights."""
        if self._is_parameter(module, parts):
            return self._parameter(module, parts)
        given, transposed = set(parts), (self._config.fan_in_fan_out and "lora_A" in parts) or _is_scaled_table(parts)
        low_rank, bias = self._low_rank(module, parts), None
        if "lora_B.bias" in parts:
            if low_rank is None or not self._config.lora_bias:
                raise self._unused(parts["lora_B.bias"], "the adapter has no bias")
            bias = self._load(parts.pop("lora_B.bias")) * np.float32(low_rank.scale)
        magnitude = None
        if "lora_magnitude_vector" in parts:
            if low_rank is None or not self._config.use_dora:
                raise self._unused(parts["lora_magnitude_vector"], "the adapter does not use DoRA")
            magnitude = self._load(parts.pop("lora_magnitude_vector")).reshape(-1)
        elif self._config.use_dora and low_rank is not None:
            raise AdapterError(f"{self._tensors.path}: {module} has no magnitude, though the adapter uses DoRA")
        found: dict[str, Change] = {}
        whole = self._whole(module, parts, "weight")
        rows = self._rows(module, parts)
        if low_rank is not None or whole is not None or rows is not None:
            start = self._config.start if "lora_A" in given else None
            frozen = whole is not None and not self._config.trains_whole(module)
            found[f"{module}.weight"] = Change(whole, rows, start, low_rank, magnitude, bias, transposed, frozen)
        own_bias = self._whole(module, parts, "bias")
        if own_bias is not None:
            found[f"{module}.bias"] = Change(own_bias)
        if parts:
            raise self._unused(next(iter(parts.values())), "nothing that is there needs it")
        return found

    def _low_rank(self, module: str, parts: dict[str, str]) -> LowRank | None:
        for a, b in (("lora_A", "lora_B"), ("lora_embedding_A", "lora_embedding_B")):
            if a not in parts and b not in parts:
                continue
            for one, other in ((a, b), (b, a)):
                if one not in parts:
                    raise self._unused(parts[other], f"there is no {one} beside it")
            first, second = self._load(parts.pop(a)), self._load(parts.pop(b))
            if first.ndim != 2 or second.ndim != 2 or first.shape[0] != second.shape[1]:
                shapes = f"{list(first.shape)} and {list(second.shape)}"
                raise AdapterError(f"{self._tensors.path}: A and B of {module} are {shapes}, which is no product")
            self._check_rank(module, first.shape[0])
            if a == "lora_embedding_A":  # for a table [vocabulary, width], (B A)^T is added
                self._check_start(module, "loftq")
                if "lora_magnitude_vector" not in parts:  # see _is_scaled_table
                    first, second = second.T, first.T
            return LowRank(first, second, self._scale(module))
        return None

    def _check_start(self, name: str, *kinds: str) -> None:
        """Refuse an initialization that changes the base weight, where PEFT does that for linear layers only."""
        start = self._config.start
        if start is not None and start.kind in kinds:
            raise AdapterError(
                f"{self._tensors.path}: {name} cannot begin as init_lora_weights says, {start.kind!r}",
                "merge it with peft (merge_and_unload), and compile what that saves",
            )

    def _scale(self, name: str) -> float:
        scale = self._config.scale(name)
        if not abs(scale) <= _LARGEST:
            raise AdapterError(
                f"{self._tensors.path}: {name} is multiplied with {scale:g}, which is not finite in float32"
            )
        return scale

    def _check_rank(self, name: str, rank: int) -> None:
        if rank != self._config.rank(name):
            raise AdapterError(
                f"{self._tensors.path}: {name} has rank {rank}, {CONFIG_FILE} says {self._config.rank(name)}"
            )

    def _whole(self, module: str, parts: dict[str, str], kind: str) -> np.ndarray | None:
        """The weight or bias that replaces the base's; None if the adapter has none."""
        suffix = "" if kind == "weight" else ".bias"
        if f"modules_to_save{suffix}" in parts:  # the value before the training, for when the adapter is off
            parts.pop(f"original_module{suffix}", None)
        found: np.ndarray | None = None
        for name in (kind, *(f"{place}{suffix}" for place in _PLACES)):
            if name in parts:
                key = parts.pop(name)
                value = self._load(key)
                if found is not None and not np.array_equal(found, value):
                    raise self._unused(key, f"{module} has two values")
                found = value
        return found

    def _rows(self, module: str, parts: dict[str, str]) -> RowChange | None:
        key = parts.pop("token_adapter.trainable_tokens_delta", None)
        if key is None:
            return None
        values, ids = self._load(key), self._config.token_ids(module)
        if values.ndim != 2 or len(ids) != len(values) or len(set(ids)) != len(ids) or min(ids, default=0) < 0:
            raise self._unused(key, f"trainable_token_indices has {len(ids)} ids for {list(values.shape)}")
        return RowChange(ids, values)

    # -- parameters: the experts of a layer are one weight, and no module ---------------------------------------------

    def _targeted(self, module: str) -> list[str]:
        """The parameters of a module that are targeted, the innermost first."""
        names = [target.rpartition(".") for target in self._config.target_parameters or ()]
        here = {name for owner, _, name in names if owner and f".{module}".endswith(f".{owner}")}
        alone = {name for owner, _, name in names if not owner}  # of any module with such parameters
        if alone and self._levels[module] > len(here) and not self._config.targets_module(module):
            here |= alone
        if len(here) > 1 and (unknown := sorted(here.difference(_MADE))):
            raise AdapterError(
                f"{self._tensors.path}: target_parameters names {len(here)} parameters of {module}, and icc does not"
                f" know in what order PEFT has nested {unknown[0]!r}",
                "merge it with peft (merge_and_unload), and compile what that saves",
            )
        return sorted(here, key=lambda name: _MADE.index(name) if name in _MADE else 0)

    def _is_parameter(self, module: str, parts: dict[str, str]) -> bool:
        return "lora_A" in parts and bool(self._targeted(_owner(module)))

    def _parameter(self, module: str, parts: dict[str, str]) -> dict[str, Change]:
        """A [E * r, in] is [E, r, in], B [out, r * E] is [out, r, E]: the expert is the fastest axis of B."""
        owner = _owner(module)
        targets = self._targeted(owner)
        levels = self._levels[owner]
        if levels != len(targets):
            raise self._unused(parts["lora_A"], f"target_parameters names {len(targets)} of {levels} parameters")
        name = f"{owner}.{targets[len(targets) - 1 - module.count(_NESTED)]}"
        self._check_start(name, "loftq", "pissa", "olora")
        if set(parts) != {"lora_A", "lora_B"}:
            raise self._unused(next(iter(parts.values())), "experts have A and B, and nothing else")
        a, b = self._load(parts["lora_A"]), self._load(parts["lora_B"])
        rank = self._config.rank(name)
        if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1] or a.shape[0] % rank:
            shapes = f"{list(a.shape)} and {list(b.shape)}"
            raise AdapterError(f"{self._tensors.path}: A and B of {name} are {shapes}, not of experts of rank {rank}")
        experts = a.shape[0] // rank
        scale = self._scale(name)
        if experts == 1:
            return {name: Change(low_rank=LowRank(a, b, scale))}
        first = a.reshape(experts, rank, a.shape[1])
        second = np.ascontiguousarray(b.reshape(b.shape[0], rank, experts).transpose(2, 0, 1))
        return {name: Change(low_rank=LowRank(first, second, scale))}

    def _load(self, key: str) -> np.ndarray:
        return self._tensors.load(key)

    def _unused(self, key: str, why: str) -> AdapterError:
        return AdapterError(f"{self._tensors.path}: {key!r} is not used: {why}", "save it again with a current peft")


def _is_scaled_table(parts: Mapping[str, str]) -> bool:
    """Whether a module is an embedding with magnitudes (DoRA). PEFT has one magnitude per column of the table
    [vocabulary, width], which is therefore treated as a transposed weight [width, vocabulary]."""
    return "lora_embedding_A" in parts and "lora_magnitude_vector" in parts


def _owner(module: str) -> str:
    """A module's name without the wrappers that PEFT puts around it."""
    while module.endswith(_NESTED):
        module = module.removesuffix(_NESTED)
    return module
