"""Whether an adapter was trained for the model that it is used with, as far as names tell."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from ..format.load import Engine
from .adapter import Adapter

_REPORT = "report.json"

# What names have at their ends that were quantized, which adapters are trained and used over.
_FORM = re.compile(
    r"([-_.](unsloth|bnb|nf4|4bit|8bit|awq|gptq|gguf|fp8|int4|int8|f16|bf16|f32|fp16|i?q\d(_\w+)?|hf))+$", re.IGNORECASE
)


class _Report(msgspec.Struct, frozen=True):
    model: str = ""


def published_name(model: Path) -> str:
    """A checkpoint's name: ORG/NAME of one in the cache of huggingface_hub, else that of its directory or file."""
    home = model.parents[1].name if len(model.parts) > 2 and model.parent.name == "snapshots" else ""
    if home.startswith("models--"):
        return home.removeprefix("models--").replace("--", "/", 1)
    return model.stem if model.suffix == ".gguf" else model.name


def model_of(engine: Engine) -> str:
    """What an engine with room for adapters was compiled of, by its name; "" where it does not say."""
    if _REPORT not in engine.manifest.files:
        return ""
    return msgspec.json.decode(engine.files.read(_REPORT), type=_Report).model


def other_base(adapter: Adapter, model: str) -> str:
    """What to tell where an adapter names another base than `model`, a name as above; "" where it is the same, or one
    of the two is not known. Names of local directories differ though models are equal: no more than a warning."""
    if not adapter.base or not model or _plain(adapter.base) == _plain(model):
        return ""
    # what a file says must not steer a terminal
    base = adapter.base if adapter.base.isprintable() else repr(adapter.base)
    return f"{adapter.path} was trained for {base}, this is {model}: its shapes fit, its answers may not"


def _plain(name: str) -> str:
    """Without owner, form, case and signs: Llama-3.2-1B and unsloth/llama-3.2-1b-bnb-4bit are equal."""
    last = name.replace("\\", "/").rstrip("/").rpartition("/")[2]
    return re.sub(r"[^a-z0-9]", "", _FORM.sub("", last).lower())
