"""Identifies what is at a path from names, first bytes and config.json: a checkpoint, or why not and what to do.

Nothing heavy is imported here and no weight is read, so that a mistake is reported at once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ....runtime.format.present import is_one_file
from ...errors import CheckpointError, IccError, UnsupportedModel
from ...genai import GENAI_CONFIG, genai_config

CONFIG = "config.json"
_AGAIN = "download the checkpoint again"
_WANTED = "give the directory of a Hugging Face checkpoint: config.json beside *.safetensors"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
_WEIGHTS = re.compile(r"(pytorch_)?model\b.*\.(safetensors|bin)")
_ARCHIVES = (".zip", ".tar", ".gz", ".tgz", ".xz", ".zst")


@dataclass(frozen=True)
class FoundModel:
    """A model at a path, of one of three kinds.

    A checkpoint directory: config is its config.json, unchanged. A GGUF file: config holds what its header says. An
    ONNX file: config is the config.json beside it.
    """

    path: Path
    config: dict[str, Any]
    is_gguf: bool = False
    is_onnx: bool = False

    @property
    def is_file(self) -> bool:
        """Whether the model is a GGUF or ONNX file, which itself describes the computation."""
        return self.is_gguf or self.is_onnx


def find_checkpoint(path: Path) -> FoundModel:
    """The checkpoint at `path`: its directory, its config.json, a GGUF or ONNX file, or a directory with one of them.

    CheckpointError if there is none; UnsupportedModel for a kind of model file that icc does not read.
    """
    path = path.parent if path.name == CONFIG and path.is_file() else path
    if path.is_file():
        return _onnx(path) if is_onnx(path) else _gguf(path)
    if not path.exists():
        raise CheckpointError(
            f"{path} does not exist: there is no directory with a config.json",
            f"{_WANTED}, or the name of a model on the Hugging Face hub: ORG/NAME",
        )
    try:
        names = sorted(p.relative_to(path).as_posix() for pattern in ("*", "*/*") for p in path.glob(pattern))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    if CONFIG not in names and (models := _gguf_models(names)):
        return _gguf(path / _only(path, models))
    if not any(map(_WEIGHTS.fullmatch, names)) and (models := [n for n in names if is_onnx(Path(n))]):
        return _onnx(path / _only(path, _onnx_models(models), "ONNX"))
    adapter = "adapter_config.json" in names and not any(map(_WEIGHTS.fullmatch, names))
    if CONFIG not in names or adapter or not any(name.endswith((".safetensors", *_PICKLES)) for name in names):
        if (other := _other_kind(str(path), names, path)) is not None:
            raise other
    if CONFIG not in names:
        raise no_checkpoint(str(path), names, path)
    return FoundModel(path, _config(path / CONFIG))


def knows(path: Path) -> bool:
    """Whether a path is a checkpoint directory, or one of another kind that `find_checkpoint` recognises and
    refuses."""
    if not path.is_dir():
        return False
    names = sorted(p.name for p in path.iterdir())
    return CONFIG in names or _other_kind(str(path), names, path) is not None


def no_checkpoint(where: str, names: Iterable[str], path: Path | None = None) -> IccError:
    """The error for a directory, here or on the hub, that has no config.json but files of these names.

    path: the directory, so that its files can be read; None if it is not local.
    """
    names = list(names)
    shown = [name for name in names if not Path(name).name.startswith((".", "_"))]
    if not shown:
        return CheckpointError(f"{where} is empty: it has no config.json", _WANTED)
    if (other := _other_kind(where, names, path)) is not None:
        return other
    if "model_index.json" in names:
        return UnsupportedModel(
            f"{where} is a pipeline of the diffusers library: it has no config.json", "icc compiles language models"
        )
    if "params.json" in names:
        return UnsupportedModel(
            f"{where} is a checkpoint in its authors' own layout (params.json): it has no config.json",
            "take the one in transformers' layout, or convert it with the conversion script of that family",
        )
    inner = sorted(name.removesuffix(f"/{CONFIG}") for name in names if name.endswith(f"/{CONFIG}"))
    if inner:
        return CheckpointError(f"{where} has no config.json of its own", f"did you mean {where}/{inner[0]}?")
    snapshots = sorted(path.glob(f"snapshots/*/{CONFIG}")) if path is not None else []
    if snapshots:  # a model's folder in the cache of huggingface_hub
        return CheckpointError(f"{where} has no config.json", f"did you mean {snapshots[-1].parent}?")
    return CheckpointError(f"{where} has no config.json (it has {', '.join(shown[:3])})", _WANTED)


def _other_kind(where: str, names: list[str], path: Path | None) -> IccError | None:
    """The refusal of a known kind of directory that is no checkpoint; None for an unknown kind."""
    plain = {name for name in names if "/" not in name}
    if "engine.json" in plain:
        return _engine(where)
    if "adapter_config.json" in plain:
        return _adapter(where, path)
    if gguf := [name for name in names if name.endswith(".gguf")]:
        return UnsupportedModel(f"{where} holds GGUF files ({gguf[0]}) and no checkpoint", _GGUF)
    if onnx := [name for name in names if name.endswith(".onnx")]:
        return UnsupportedModel(f"{where} holds ONNX models ({onnx[0]}) and no checkpoint", _ONNX)
    return None


_GGUF = "give one of them; of a model on the hub: hf download ORG/NAME FILE"
_ONNX = "give one of them, or the Hugging Face checkpoint that it was exported from"


_ONNX_TAGS = (
    b"\x08",
    b"\x12",
    b"\x1a",
    b"\x22",
    b"\x28",
    b"\x32",
    b"\x3a",
    b"\x42",
    b"\x72",
)  # of a ModelProto's fields


def is_onnx(path: Path) -> bool:
    """Whether a file is an ONNX model, by its name: protobuf messages have no magic number."""
    return path.suffix.lower() == ".onnx"


def _onnx(path: Path) -> FoundModel:
    """An ONNX file, checked only to begin with the tag of a field. CheckpointError if it does not."""
    try:
        with path.open("rb") as file:
            start = file.read(1)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    if start not in _ONNX_TAGS:
        raise CheckpointError(f"{path} is truncated or not an ONNX file", _AGAIN)
    return FoundModel(path, onnx_config(onnx_files(path)), is_onnx=True)


def onnx_files(path: Path) -> Path:
    """The folder with the other files of an ONNX model: its own, or the one above a folder that is called onnx."""
    for folder in (path.absolute().parent, path.resolve().parent):  # the hub's snapshots are links
        for place in (folder, folder.parent) if folder.name == "onnx" else (folder,):
            if any((place / name).is_file() for name in (CONFIG, GENAI_CONFIG)):
                return place
    return path.absolute().parent


def onnx_config(files: Path) -> dict[str, Any]:
    """The configuration beside an ONNX model: config.json, or else genai_config.json; {} if there is neither. Its
    fields of the text model override the others."""
    found = read_object(files / CONFIG) if (files / CONFIG).is_file() else genai_config(files)
    text = found.get("text_config")
    return {**found, **text} if isinstance(text, dict) else found


def _onnx_models(names: list[str]) -> list[str]:
    """The preferred file of several: exporters call the whole float32 model model.onnx, or had other names for it
    earlier. All files if none has such a name."""
    known = ("model", "decoder_model_merged", "decoder_model")
    return next(([name] for stem in known for name in (f"{stem}.onnx", f"onnx/{stem}.onnx") if name in names), names)


def _gguf(path: Path) -> FoundModel:
    """A GGUF file with a complete header. Raises the refusal of any other file."""
    from ....runtime.format.gguf import is_gguf
    from .gguf.split import open_container

    try:
        if not is_gguf(path):
            raise _file(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    container = open_container(path)
    positions = container.metadata.get(f"{container.metadata.get('general.architecture')}.context_length")
    return FoundModel(path, {"max_position_embeddings": positions}, is_gguf=True)


def _gguf_models(names: list[str]) -> list[str]:
    """The GGUF models of a directory: for a model in several files the first; no image projectors and no activation
    statistics."""
    others = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf$|mmproj|imatrix", re.IGNORECASE)
    return [name for name in names if name.endswith(".gguf") and "/" not in name and not others.search(name)]


def _only(path: Path, models: list[str], kind: str = "GGUF") -> str:
    if len(models) > 1:
        raise CheckpointError(f"{path} holds {len(models)} {kind} models: {', '.join(models[:4])}", "give one of them")
    return models[0]


def _file(path: Path) -> IccError:
    """Why a file is not a checkpoint."""
    if is_one_file(path):
        return _engine(str(path))
    suffix = path.suffix.lower()
    if suffix == ".safetensors" or path.name.endswith(".index.json"):
        config = "" if (path.parent / CONFIG).is_file() else ", which needs a config.json too"
        return CheckpointError(f"{path} is one file of a checkpoint", f"give its directory: {path.parent}{config}")
    if suffix in _PICKLES:
        return CheckpointError(
            f"{path} holds pickled weights, which icc never reads",
            "give a checkpoint directory with safetensors: save_pretrained writes one",
        )
    if suffix in _ARCHIVES:
        return CheckpointError(f"{path} is an archive, not a checkpoint directory", "unpack it first")
    if path.name == "engine.json":
        return CheckpointError(
            f"{path.parent} is an engine, compiled already", f"run it: icc run {path.parent} -p TEXT"
        )
    return CheckpointError(f"{path} is a file, not a checkpoint directory", _WANTED)


def _engine(where: str) -> IccError:
    return CheckpointError(f"{where} is an engine, compiled already", f"run it: icc run {where} -p TEXT")


def _adapter(where: str, path: Path | None) -> IccError:
    """The refusal of a LoRA or another adapter of the PEFT library."""
    facts: dict[str, Any] = {}
    if path is not None:
        facts = read_object(path / "adapter_config.json")
    kind, base = facts.get("peft_type") or "PEFT", facts.get("base_model_name_or_path") or "its base model"
    return UnsupportedModel(
        f"{where} is a {kind} adapter, not a model: it has no config.json",
        f"merge it when {base} is compiled: icc compile BASE --lora {where}; or make room for it: --adapters 8x16",
    )


def _config(path: Path) -> dict[str, Any]:
    """config.json, which must be an object that names a model type."""
    found = read_object(path)
    if not isinstance(found.get("model_type"), str):
        if "medusa_num_heads" in found:
            hint = "these are Medusa heads: compile their base model with --spec medusa:DIR"
        elif "speculators_model_type" in found:
            hint = "this is a drafter: compile its base model with --spec eagle:DIR"
        elif isinstance(found.get("architectures"), list) or "hidden_size" in found:
            hint = "icc compiles checkpoints that transformers can load"
        else:
            hint = _WANTED
        raise UnsupportedModel(f"{path} names no model_type", hint)
    return found


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file. CheckpointError if it is damaged or is no object."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}", _AGAIN) from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}", _AGAIN) from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} is not a JSON object", _AGAIN)
    return found
