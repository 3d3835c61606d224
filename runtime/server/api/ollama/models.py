"""The answers of Ollama's API about the served model."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from typing import Any

import msgspec
from msgspec import Struct

from ....format.manifest import Manifest
from ..model import ServedModel

API_VERSION = "0.13.0"  # the version of Ollama whose API this is: clients check it before they use newer features
_NEVER = "9999-12-31T23:59:59Z"
_SUFFIX = ":latest"


class OllamaDetails(Struct):
    """The kind of the model."""

    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaModel(Struct):
    """A model by its name; size: bytes of the engine's files."""

    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: OllamaDetails


class OllamaTags(Struct):
    """Answer of /api/tags."""

    models: list[OllamaModel]


class OllamaRunning(Struct):
    """A model that is loaded; size_vram: bytes on a GPU."""

    name: str
    model: str
    size: int
    digest: str
    details: OllamaDetails
    expires_at: str
    size_vram: int
    context_length: int


class OllamaProcesses(Struct):
    """Answer of /api/ps."""

    models: list[OllamaRunning]


class OllamaShown(Struct):
    """Answer of /api/show. parameters: the default sampling parameters, a line each."""

    modelfile: str
    parameters: str
    template: str
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class OllamaVersion(Struct):
    """Answer of /api/version: the version of Ollama whose API this is."""

    version: str


def plain_name(name: str) -> str:
    """A name without the tag `:latest`, which Ollama's clients add to a name without a tag."""
    return name.removesuffix(_SUFFIX)


def tags(model: ServedModel, manifest: Manifest, names: list[str]) -> OllamaTags:
    """The model, listed once under each of its names."""
    facts = (_time(model), _size(manifest), _digest(manifest), _details(manifest))
    return OllamaTags([OllamaModel(name, name, *facts) for name in names])


def processes(model: ServedModel, manifest: Manifest) -> OllamaProcesses:
    """The model, which stays loaded."""
    size = _size(manifest)
    on_gpu = 0 if manifest.backend == "cpu" else size
    facts = (size, _digest(manifest), _details(manifest), _NEVER, on_gpu, model.max_len)
    return OllamaProcesses([OllamaRunning(model.name, model.name, *facts)])


def shown(model: ServedModel, manifest: Manifest) -> OllamaShown:
    """All details of the model."""
    facts, kind = manifest.model, manifest.model.architecture
    defaults = msgspec.structs.asdict(manifest.sampling)
    info = {
        "general.architecture": kind,
        "general.parameter_count": facts.num_parameters,
        f"{kind}.block_count": facts.num_layers,
        f"{kind}.context_length": model.max_len,
        f"{kind}.embedding_length": facts.hidden_size,
        f"{kind}.vocab_size": facts.vocab_size,
    }
    return OllamaShown(
        modelfile=f"# {model.name}: an engine of icc {manifest.icc_version} for {manifest.target}\n",
        parameters="\n".join(f"{name} {value:g}" for name, value in defaults.items() if value is not None),
        template=model.template.text,
        details=_details(manifest),
        model_info=info,
        capabilities=_capabilities(model),
        modified_at=_time(model),
    )


def _capabilities(model: ServedModel) -> list[str]:
    if model.task != "generate":
        return ["embedding"] if model.task == "embed" else []
    form = model.prompting.form
    has = {
        "completion": True,
        "tools": form.calls is not None,
        "insert": model.fills,
        "thinking": form.thinking is not None or form.messages,
    }
    return [name for name, is_there in has.items() if is_there]


def _details(manifest: Manifest) -> OllamaDetails:
    facts = manifest.model
    kinds = [facts.architecture]
    return OllamaDetails("", "icc", kinds[0], kinds, _count(facts.num_parameters), manifest.quantization.method)


def _count(parameters: int) -> str:
    """A number of parameters as Ollama writes it."""
    for size, letter in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if parameters >= size:
            return f"{parameters / size:.1f}{letter}"
    return str(parameters)


def _size(manifest: Manifest) -> int:
    return sum(entry.size for entry in manifest.files.values())


def _digest(manifest: Manifest) -> str:
    return hashlib.sha256(msgspec.json.encode(manifest)).hexdigest()


def _time(model: ServedModel) -> str:
    return datetime.fromtimestamp(model.created, UTC).isoformat().replace("+00:00", "Z")
