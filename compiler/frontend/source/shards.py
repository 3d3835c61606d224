"""Finds the files with a checkpoint's weights by their names and the shard index."""

from __future__ import annotations

import json
from pathlib import Path

from ...errors import CheckpointError

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_AGAIN = "download the checkpoint again"


def weight_files(model_dir: Path) -> tuple[list[Path], list[str] | None]:
    """The safetensors files of a checkpoint directory, and the tensor names of its index in order; None without an
    index.

    A single file is preferred to an index, as in transformers: it was saved beside shards of an earlier model.
    CheckpointError names the file that is missing or wrong.
    """
    index, single = model_dir / INDEX, model_dir / SINGLE
    if single.is_file():
        return [single], None
    if index.is_file():
        return _listed(model_dir, index)
    others = sorted(model_dir.glob("*.safetensors"))
    if others:
        return others, None
    pickles = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in model_dir.glob(pattern))
    if pickles:
        raise CheckpointError(
            f"{model_dir} has only pickle weights ({pickles[0]}), which icc never reads",
            "convert them: save_pretrained writes model.safetensors",
        )
    raise CheckpointError(f"{model_dir} has no {SINGLE} and no {INDEX}", _AGAIN)


def _listed(model_dir: Path, index: Path) -> tuple[list[Path], list[str]]:
    try:
        weight_map: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        if not all(isinstance(shard, str) for shard in weight_map.values()):
            raise ValueError("a shard name is not a string")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is not a valid shard index: {error}") from error
    shards = sorted(set(weight_map.values()))
    for shard in shards:
        if Path(shard).name != shard:
            raise CheckpointError(f"{index} names a shard outside the directory: {shard!r}")
        if not (model_dir / shard).is_file():
            raise CheckpointError(f"{model_dir} lacks the shard {shard}", _AGAIN)
    return [model_dir / shard for shard in shards], list(weight_map)
