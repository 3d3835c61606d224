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
}
_HINT = "give --pooling last, mean or cls"


@dataclass(frozen=True)
class Pooling:
    """kind: "last", "mean" or "cls". normalize: vectors are scaled to length 1."""

    kind: Kind = "last"
    normalize: bool = True


def read_pooling(model_dir: Path, kind: Kind | None = None) -> Pooling:
    """The pooling of a checkpoint; `kind` overrules what its files say of which hidden states count.

    modules.json lists what sentence-transformers runs one after the other: Transformer, Pooling, perhaps Normalize.
    Without it, the last token counts and vectors are normalized. UnsupportedModel for a module or mode that icc lacks.
    """
    listing = model_dir / "modules.json"
    if not listing.is_file():
        return Pooling(kind or Pooling.kind)
    modules = _read(listing, list)
    names = [str(module.get("type", "")).rsplit(".", 1)[-1] for module in modules if isinstance(module, dict)]
    if names[:2] != ["Transformer", "Pooling"] or names[2:] not in ([], ["Normalize"]) or len(names) != len(modules):
        raise UnsupportedModel(
            f"{listing} has the modules {', '.join(names)}",
            "icc computes Transformer, Pooling and Normalize, in this order",
        )
    normalize = names[2:] == ["Normalize"]
    return Pooling(kind or _kind(model_dir, str(modules[1].get("path", ""))), normalize)


def _kind(model_dir: Path, folder: str) -> Kind:
    path = model_dir / folder / "config.json"
    if not path.resolve().is_relative_to(model_dir.resolve()):
        raise CheckpointError(f"{model_dir / 'modules.json'} names a folder outside of the checkpoint: {folder!r}")
    if not path.is_file():
        raise CheckpointError(f"{path} is missing", _HINT)
    modes = [name for name, value in _read(path, dict).items() if name.startswith("pooling_mode_") and value is True]
    if len(modes) != 1 or modes[0] not in _MODES:
        raise UnsupportedModel(f"{path} asks for {' and '.join(modes) or 'no pooling mode'}", _HINT)
    return _MODES[modes[0]]


def _read(path: Path, kind: type) -> Any:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}", "download the checkpoint again") from error
    if not isinstance(found, kind):
        raise CheckpointError(f"{path} is not a JSON {'array' if kind is list else 'object'}")
    return found
