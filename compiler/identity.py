"""The identity of an engine in the cache, as one digest: the checkpoint's files, the options, the target, and icc."""

from __future__ import annotations

import functools
import hashlib
import json
import os
from pathlib import Path
from typing import Any, Literal

from .. import __version__
from ..runtime.format.isa import cpu_flags
from ..runtime.settings import named_by_role
from .drafters import FROM_FILES
from .frontend.source.identify import is_onnx, onnx_files
from .options import CompileOptions
from .targets import find_target

_SMALL = 4 << 20  # bytes; a larger file is identified by its place, not its content
FOLDERS = tuple(f"{name}:" for name in FROM_FILES)  # beginnings of --spec values that name a directory
_ROOT = Path(__file__).resolve().parents[1]
_SOURCES = ("compiler", "passes", "codegen_templates", "runtime")
_SUFFIXES = (".py", ".jinja", ".h", ".json")


def engine_key(options: CompileOptions) -> str:
    """64 hexadecimal digits, equal for compiles that would give the same engine."""
    facts = {
        "icc": sources_digest(),
        "options": stated(options),
        "files": checkpoint_files(options.model),
        "host": sorted(cpu_flags()) if find_target(options.target).is_here else [],
        "tuning": _content(Path(os.environ["ICC_TUNING"])) if os.environ.get("ICC_TUNING") else "",
    }
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def stated(options: CompileOptions, role: Literal["engine", "calibration"] = "engine") -> dict[str, Any]:
    """The options that decide an engine's content, or the results of its calibration, as plain values; texts, drafters
    and an adapter by the digest of their content."""
    deciding = {*named_by_role(type(options), "engine")} & {*named_by_role(type(options), role)}
    found = {name: getattr(options, name) for name in deciding}
    for name in deciding & {"calib", "gate_text"}:
        found[name] = found[name] and _content(found[name])
    if options.spec.startswith(FOLDERS) and "spec" in found:
        drafter, _, folder = options.spec.partition(":")
        files = (_content(file) for file in sorted(Path(folder).glob("*")) if file.is_file())
        found["spec"] = f"{drafter}:{','.join(files)}"
    found["lora"] = {} if options.lora is None else {file.name: _content(file) for file in _adapter(options.lora)}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in sorted(found.items())}


def _adapter(path: Path) -> list[Path]:
    """The files of an adapter that affect the engine: a GGUF file, or those of a PEFT directory."""
    return [path] if path.is_file() else sorted({*path.glob("adapter_*"), *path.glob("tokenizer*")})


def checkpoint_files(model: Path) -> dict[str, str]:
    """Every file of a checkpoint directory, or of a GGUF model, by name: the digest of a small file; the path, size and
    modification time of a large one. In the cache of huggingface_hub the path contains the file's digest."""
    found: dict[str, str] = {}
    folder = onnx_files(model) if is_onnx(model) else model.parent if model.is_file() else model
    for path in model_files(model):
        place = path.resolve()
        status = place.stat()
        if place.parent.name == "blobs":
            found[path.relative_to(folder).as_posix()] = place.name
        elif status.st_size <= _SMALL:
            found[path.relative_to(folder).as_posix()] = _content(place)
        else:
            found[path.relative_to(folder).as_posix()] = f"{place} {status.st_size} {status.st_mtime_ns}"
    return found


def model_files(model: Path) -> list[Path]:
    """The files of a checkpoint directory, of a GGUF or of an ONNX model that may count."""
    if is_onnx(model):
        folder = onnx_files(model)
        beside = [p for p in folder.glob("*") if p.is_file() and p.suffix.lower() != ".onnx"]
        return sorted({model, *beside, *(p for p in model.parent.glob(f"{model.stem}*") if p.is_file())})
    if model.is_file():
        from .frontend.source.gguf.split import open_container  # imports numpy, which parsing a command does not need

        return sorted({entry.path for entry in open_container(model).tensors.values()})
    return sorted(p for pattern in ("*", "*/*") for p in model.glob(pattern) if p.is_file())


@functools.cache
def sources_digest() -> str:
    """The digest of icc itself: its version, and the files that make an engine or go into it."""
    whole = hashlib.sha256(__version__.encode())
    for folder in _SOURCES:
        for path in sorted(p for p in (_ROOT / folder).rglob("*") if p.suffix in _SUFFIXES):
            whole.update(path.relative_to(_ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return whole.hexdigest()


def _content(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
