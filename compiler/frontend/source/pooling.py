"""How a checkpoint wants hidden states pooled: what sentence-transformers wrote beside it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ....runtime.format.manifest import Pooling as Kind
from ...errors import CheckpointError, UnsupportedModel

_MODES: dict[str, Kind] = {
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len",
}
_HINT = "say it with --pooling"
_ACTIVATIONS = {
    "Identity": "identity",
    "Tanh": "tanh",
    "ReLU": "relu",
    "GELU": "gelu",
    "Sigmoid": "sigmoid",
    "SiLU": "silu",
}


@dataclass(frozen=True)
class DenseModule:
    """A dense layer behind the pooling: the directory of its weights, and what is done to its result."""

    path: Path
    activation: str


@dataclass(frozen=True)
class Pooling:
    """kind: None where nothing says it. normalize: vectors are scaled to length 1. dense: the layers between.
    max_tokens: the longest text that the model is meant for, 0 if nothing says it."""

    kind: Kind | None = None
    normalize: bool = True
    dense: tuple[DenseModule, ...] = ()
    max_tokens: int = 0

    def settled(self, looks_ahead: bool) -> Kind:
        """Which hidden states count: where nothing says it, the mean if tokens see later ones, or else the last."""
        return self.kind or ("mean" if looks_ahead else "last")


def read_pooling(model_dir: Path, kind: Kind | None = None) -> Pooling:
    """The pooling of a checkpoint; `kind` overrules what its files say of which hidden states count.

    modules.json lists what sentence-transformers runs one after the other: Transformer, Pooling, perhaps Dense layers
    and Normalize. Without it, vectors are normalized. UnsupportedModel for a module or mode that icc lacks.
    """
    listing = model_dir / "modules.json"
    if not listing.is_file():
        return Pooling(kind)
    modules = _read(listing, list)
    names = [str(module.get("type", "")).rsplit(".", 1)[-1] for module in modules if isinstance(module, dict)]
    behind = names[2:-1] if names[-1:] == ["Normalize"] else names[2:]
    if names[:2] != ["Transformer", "Pooling"] or set(behind) - {"Dense"} or len(names) != len(modules):
        raise UnsupportedModel(
            f"{listing} has the modules {', '.join(names)}",
            "icc computes Transformer, Pooling, Dense and Normalize, in this order",
        )
    folders = [_folder(model_dir, module) for module in modules]
    dense = tuple(_dense(folder) for folder, name in zip(folders, names, strict=True) if name == "Dense")
    return Pooling(kind or _kind(folders[1]), names[-1] == "Normalize", dense, _max_tokens(folders[0]))


def _folder(model_dir: Path, module: dict[str, Any]) -> Path:
    """Where the files of a module lie."""
    name = str(module.get("path", ""))
    path = model_dir / name
    if not path.resolve().is_relative_to(model_dir.resolve()):
        raise CheckpointError(f"{model_dir / 'modules.json'} names a folder outside of the checkpoint: {name!r}")
    return path


def _kind(folder: Path) -> Kind:
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{path} is missing", _HINT)
    config = _read(path, dict)
    modes = [name for name, value in config.items() if name.startswith("pooling_mode_") and value is True]
    if not modes and isinstance(named := config.get("pooling_mode"), str):  # one name, as newer versions write
        modes = [next((mode for mode in _MODES if mode.removeprefix("pooling_mode_").startswith(named)), named)]
    if len(modes) != 1 or modes[0] not in _MODES:
        raise UnsupportedModel(f"{path} asks for {' and '.join(modes) or 'no pooling mode'}", _HINT)
    return _MODES[modes[0]]


def _dense(folder: Path) -> DenseModule:
    config = _read(folder / "config.json", dict)
    name = str(config.get("activation_function", "torch.nn.modules.linear.Identity")).rsplit(".", 1)[-1]
    if name not in _ACTIVATIONS:
        raise UnsupportedModel(f"{folder / 'config.json'} has the activation function {name}")
    return DenseModule(folder, _ACTIVATIONS[name])


def _max_tokens(folder: Path) -> int:
    path = folder / "sentence_bert_config.json"
    found = _read(path, dict).get("max_seq_length") if path.is_file() else None
    return found if isinstance(found, int) and found > 0 else 0


def _read(path: Path, kind: type) -> Any:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}", "download the checkpoint again") from error
    if not isinstance(found, kind):
        raise CheckpointError(f"{path} is not a JSON {'array' if kind is list else 'object'}")
    return found
