"""Whether an adapter was trained for the model that it is used with, judged by their names."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from ..format.load import Engine
from .adapter import Adapter

_REPORT = "report.json"

# Endings of the names of quantized checkpoints: an adapter that was trained on one may be used on another.
_FORM = re.compile(
    r"([-_.](unsloth|bnb|nf4|4bit|8bit|awq|gptq|gguf|fp8|int4|int8|f16|bf16|f32|fp16|i?q\d(_\w+)?|hf))+$", re.IGNORECASE
)


class _Report(msgspec.Struct, frozen=True):
    model: str = ""


def published_name(model: Path) -> str:
    """A checkpoint's name: ORG/NAME for one in the cache of huggingface_hub, else the name of its directory or file."""
    home = model.parents[1].name if len(model.parts) > 2 and model.parent.name == "snapshots" else ""
    if home.startswith("models--"):
        return home.removeprefix("models--").replace("--", "/", 1)
    return model.stem if model.suffix == ".gguf" else model.name


def model_of(engine: Engine) -> str:
    """The name of the model that an engine with room for adapters was compiled from; "" if the engine does not say."""
    if _REPORT not in engine.manifest.files:
        return ""
    return msgspec.json.decode(engine.files.read(_REPORT), type=_Report).model


def other_base(adapter: Adapter, model: str) -> str:
    """A warning if an adapter names another base model than `model`, a name from `model_of`; "" if the names agree or
    one is not known. It is only a warning, because equal models may lie in directories of different names."""
    if not adapter.base or not model or _plain(adapter.base) == _plain(model):
        return ""
    # text from a file must not send control characters to a terminal
    base = adapter.base if adapter.base.isprintable() else repr(adapter.base)
    return f"{adapter.path} was trained for {base}, this is {model}: its shapes fit, its answers may not"


def _plain(name: str) -> str:
    """A name without owner, quantization, case and punctuation: Llama-3.2-1B and unsloth/llama-3.2-1b-bnb-4bit are
    equal."""
    last = name.replace("\\", "/").rstrip("/").rpartition("/")[2]
    return re.sub(r"[^a-z0-9]", "", _FORM.sub("", last).lower())
