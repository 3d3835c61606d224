"""Reads llama.cpp's adapters (convert_lora_to_gguf.py): a GGUF file with A and B of each matrix."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ..errors import AdapterError, CheckpointError
from ..format.bfloat16 import bf16_values
from ..format.gguf import GgufContainer, GgufTensor, read_container
from .adapter import Adapter, Change, LowRank, side_by_side
from .files import read_file

_TABLE = "token_embd.weight"  # tensors whose A and B llama.cpp stores the other way round
_BLOCK = np.dtype([("scale", "<f2"), ("codes", "i1", 32)])  # of Q8_0
_KNOWN = {"adapter.type", "adapter.lora.alpha", "adapter.alora.invocation_tokens"}


@dataclass(frozen=True)
class GgufNames:
    """llama.cpp's names for the matrices of a model.

    architecture: GGUF's name of the model's architecture. tensors: for each parameter, the GGUF tensors that it stacks
    along its rows. orders: for each parameter, which row of the file each of its rows is, int64 [rows]; without an
    entry the order is the same. turned: the parameters that the model stores as [in, out].
    """

    architecture: str
    tensors: Mapping[str, tuple[str, ...]]
    orders: Mapping[str, np.ndarray]
    turned: frozenset[str] = frozenset()


def read_gguf(path: Path, names: GgufNames | None, digest: bytes = b"") -> Adapter:
    """Read an adapter from a GGUF file. names: those of its model, None if they are not known. digest: see
    `read_adapter`.

    AdapterError if `names` is None, if the file is damaged, is no adapter or is for another architecture, and for the
    first tensor that belongs to no matrix.
    """
    if names is None:
        raise AdapterError(
            f"{path}: llama.cpp's names of this model's matrices are not known", "convert the adapter to PEFT's form"
        )
    raw = read_file(path)
    try:
        container = read_container(path)
    except CheckpointError as error:
        raise AdapterError(error.message, error.hint) from None
    except OSError as error:
        raise AdapterError(f"cannot read {path}: {error.strerror}") from None
    alpha, invocation = _metadata(container, names.architecture)
    factors = _factors(container, raw)
    changes: dict[str, Change] = {}
    for parameter, tensors in names.tensors.items():
        pairs = [factors.pop(tensor, None) for tensor in tensors]
        given = next((pair for pair in pairs if pair is not None), None)
        if given is not None:
            none = given[0][..., :0, :], given[1][..., :0]  # the two halves are alike: one may stay as it is
            parts = [none if pair is None else pair for pair in pairs]
            low_rank = _change(path, parameter, parts, alpha, names.orders.get(parameter))
            changes[parameter] = Change(low_rank=low_rank, transposed=parameter in names.turned)
    if factors:
        raise AdapterError(
            f"{path}: {next(iter(factors))!r} is not used: the model has no such matrix, or icc cannot map it",
            "convert the adapter to PEFT's form, or merge it with llama.cpp",
        )
    if not changes:
        raise AdapterError(f"{path} changes nothing: it has no tensors")
    digest = digest or hashlib.blake2b(raw, digest_size=32, person=b"icc-gguf-adapter").digest()
    base = container.metadata.get("general.base_model.0.name", "")
    return Adapter(path, digest, base if isinstance(base, str) else "", invocation, changes)


def _metadata(container: GgufContainer, architecture: str) -> tuple[float, tuple[int, ...]]:
    """Alpha, 0 if B A is not scaled by the rank, and the invocation tokens (aLoRA)."""
    path, said = container.path, container.metadata
    if said.get("general.type") != "adapter":
        raise AdapterError(
            f"{path} is no adapter: general.type is {said.get('general.type')!r}", "compile it, if it is a model"
        )
    if said.get("adapter.type") != "lora":
        raise AdapterError(f"{path}: adapter.type is {said.get('adapter.type')!r}, not 'lora'")
    if said.get("general.architecture") != architecture:
        found = said.get("general.architecture")
        raise AdapterError(f"{path} was made for the architecture {found!r}, the model's is {architecture!r}")
    if unknown := sorted(name for name in said if name.startswith("adapter.") and name not in _KNOWN):
        raise AdapterError(f"{path}: icc does not know the key {unknown[0]!r}", "update icc")
    alpha, tokens = said.get("adapter.lora.alpha", 0.0), said.get("adapter.alora.invocation_tokens", ())
    if not isinstance(alpha, (int, float)) or not np.isfinite(alpha):
        raise AdapterError(f"{path}: adapter.lora.alpha is {alpha!r}")
    if not (isinstance(tokens, np.ndarray) and tokens.dtype.kind in "iu") and len(tokens):
        raise AdapterError(f"{path}: adapter.alora.invocation_tokens are no tokens")
    return float(alpha), tuple(int(token) for token in tokens)


def _factors(container: GgufContainer, raw: bytes) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """A and B by the name of the tensor that they change."""
    pairs: dict[str, dict[str, GgufTensor]] = defaultdict(dict)
    for name, entry in container.tensors.items():
        tensor, _, which = name.rpartition(".lora_")
        if which not in ("a", "b") or not tensor:
            raise AdapterError(f"{container.path}: {name!r} is not used: it is no A or B", "save it again without it")
        pairs[tensor][which] = entry
    found: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for tensor, pair in pairs.items():
        if len(pair) < 2:
            there = next(iter(pair.values())).name
            raise AdapterError(f"{container.path}: {there!r} is not used: its other half is missing")
        a, b = _values(pair["a"], raw), _values(pair["b"], raw)
        found[tensor] = (b.T, a) if tensor == _TABLE and a.ndim == b.ndim == 2 else (a, b)
    return found


def _values(entry: GgufTensor, raw: bytes) -> np.ndarray:
    """A tensor as float32."""
    part = memoryview(raw)[entry.start : entry.end]
    if entry.kind == "f32":
        found = np.frombuffer(part, "<f4").astype(np.float32)
    elif entry.kind == "f16":
        found = np.frombuffer(part, "<f2").astype(np.float32)
    elif entry.kind == "bf16":
        found = bf16_values(np.frombuffer(part, "<u2"))
    elif entry.kind == "q8_0":
        blocks = np.frombuffer(part, _BLOCK)
        found = (blocks["scale"].astype(np.float32)[:, None] * blocks["codes"]).reshape(-1)
    else:
        kind = entry.kind.upper()
        raise AdapterError(f"{entry.path}: {entry.name!r} is of type {kind}, not F32, F16, BF16 or Q8_0")
    if not np.isfinite(found).all():
        raise AdapterError(f"{entry.path}: {entry.name!r} has values that are not finite")
    return found.reshape(entry.shape)


def _change(
    path: Path, parameter: str, pairs: list[tuple[np.ndarray, np.ndarray]], alpha: float, order: np.ndarray | None
) -> LowRank:
    """The change of a parameter. If the parameter is several tensors, their ranks lie side by side."""
    for a, b in pairs:
        if a.ndim not in (2, 3) or a.ndim != b.ndim or a.shape[-2] != b.shape[-1] or a.shape[:-2] != b.shape[:-2]:
            raise AdapterError(f"{path}: A {list(a.shape)} and B {list(b.shape)} of {parameter} are no product")
    if len({(a.shape[:-2], a.shape[-1]) for a, _ in pairs}) > 1:
        raise AdapterError(f"{path}: the tensors of {parameter} have As of other widths")
    parts = [LowRank(a, b, alpha / max(a.shape[-2], 1) if alpha else 1.0) for a, b in pairs]
    found = parts[0] if len(parts) == 1 else side_by_side(parts)
    if order is not None:
        if found.b.shape[-2] != len(order):
            raise AdapterError(f"{path}: B of {parameter} has {found.b.shape[-2]} rows, the model {len(order)}")
        found = replace(found, b=found.b[..., order, :])
    return found
