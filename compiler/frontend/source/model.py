"""Builds the model that transformers defines on the meta device: shapes and code, no weights in memory."""

from __future__ import annotations

import contextlib
import inspect
import json
import logging
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from ...errors import IccError, UnsupportedModel
from ..export.interfaces import register_interfaces
from ..export.traced_ops import NAME
from .packages import import_named


def load_config(model_dir: Path) -> Any:
    """The transformers config of a checkpoint directory. Refuses unknown types and remote code. Packages that register
    classes for its names are imported first. A dtype of "auto" is dropped: the files state the dtype."""
    from transformers import AutoConfig

    try:
        stated = json.loads((model_dir / "config.json").read_bytes())
        import_named(stated)
        if (settled := _without_auto(stated)) == stated:
            return AutoConfig.from_pretrained(model_dir, trust_remote_code=False)
        with tempfile.TemporaryDirectory() as scratch:
            Path(scratch, "config.json").write_text(json.dumps(settled))
            return AutoConfig.from_pretrained(scratch, trust_remote_code=False)
    except (IccError, MemoryError):
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise UnsupportedModel(f"{model_dir / 'config.json'}: {reason}") from error


def _without_auto(facts: dict[str, Any]) -> dict[str, Any]:
    """A configuration without dtypes of "auto", also in its parts."""
    kept = {k: v for k, v in facts.items() if not (k in ("dtype", "torch_dtype") and v == "auto")}
    return {k: _without_auto(v) if isinstance(v, dict) else v for k, v in kept.items()}


def _builder(config: Any, task: str) -> Any:
    """transformers' Auto class whose models have the output that a task needs: logits, hidden states, or scores of a
    text. For an encoder-decoder model, the encoder gives the hidden states."""
    import transformers

    reads, kind = transformers.AutoModelForTextEncoding, type(config)
    writes = transformers.AutoModelForSeq2SeqLM._model_mapping
    if task == "embed" and kind in writes and kind in reads._model_mapping:  # whatever is_encoder_decoder says
        return reads
    causal = transformers.AutoModelForCausalLM
    others = (transformers.AutoModelForImageTextToText, transformers.AutoModelForSeq2SeqLM)
    if task == "generate":  # for a multimodal model, its code for text alone
        seeing = (cls for cls in others if kind in cls._model_mapping and "text_config" in kind.sub_configs)
        return causal if kind in causal._model_mapping else next(seeing, causal)
    names = {"embed": "AutoModel", "rerank": "AutoModelForSequenceClassification"}
    return getattr(transformers, names[task])


def attention_implementation(config: Any, task: str = "generate") -> str:
    """The attention implementation: icc's if the model's code uses transformers' attention interface, else the model's
    own."""
    import sys

    cls: Any = _builder(config, task)._model_mapping[type(config)]
    if isinstance(cls, tuple):
        cls = cls[0]
    asks = hasattr(sys.modules[cls.__module__], "ALL_ATTENTION_FUNCTIONS") or cls._supports_attention_backend
    return NAME if asks else "eager"


def build_meta_model(config: Any, written_out: bool = False, task: str = "generate") -> nn.Module:
    """The model of `config` for a task on meta, float32, with icc's attention and expert functions.

    written_out: keep the model's own attention code, which the frontend then recognises by data flow. task: "embed"
    omits the LM head, so that the output is hidden states; "rerank": the output is a score per label. UnsupportedModel
    if transformers has no such model for the configuration, or cannot build it.
    """
    builder = _builder(config, task)
    if type(config) not in builder._model_mapping:
        kind = {"generate": "a causal language model", "embed": "a model of text", "rerank": "a classifier of texts"}
        raise UnsupportedModel(
            f"model type {config.model_type!r} is not {kind[task]} in transformers",
            f"icc compiles what {builder.__name__} can load",
        )
    if getattr(config, "is_encoder_decoder", False) and builder.__name__ != "AutoModelForTextEncoding":
        raise UnsupportedModel(f"model type {config.model_type!r} is an encoder-decoder, which icc does not compile")
    register_interfaces()
    text = config.get_text_config()
    for part in {id(config): config, id(text): text}.values():
        part._experts_implementation = NAME
    logging.getLogger("transformers").setLevel(logging.ERROR)
    attention = "eager" if written_out else attention_implementation(config, task)
    try:
        with torch.device("meta"), parts_that_can_be_built(text):
            options = _without_pooler(builder._model_mapping[type(config)]) if task == "embed" else {}
            model = builder.from_config(config, dtype=torch.float32, attn_implementation=attention, **options)
    except (IccError, MemoryError):
        raise
    except Exception as error:
        if not written_out and isinstance(error, KeyError) and error.args == (NAME,):
            return build_meta_model(config, True, task)  # the model has its own table of attention classes
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise UnsupportedModel(f"transformers cannot build {config.model_type!r}: {reason}") from error
    for module in model.modules():
        if hasattr(module, "config") and hasattr(module.config, "_experts_implementation"):
            module.config._experts_implementation = NAME
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.device.type != "meta":  # such as of FloatTensor, which always allocates
                setattr(module, name, nn.Parameter(parameter.to("meta"), requires_grad=False))
    return model.eval()


def linears_where(model: nn.Module, quantized: Callable[[str], bool]) -> nn.Module:
    """`model` with a Linear in place of each Conv1D (GPT-2's, with weights [K, N]) whose weight is quantized, because
    these are stored as [N, K]. quantized: whether the weight of a name is."""
    from transformers.pytorch_utils import Conv1D

    prefix = f"{model.base_model_prefix}."
    for path, module in list(model.named_modules()):
        if isinstance(module, Conv1D) and (
            quantized(f"{path}.weight") or quantized(f"{path.removeprefix(prefix)}.weight")
        ):
            k, n = module.weight.shape
            parent, _, own = path.rpartition(".")
            setattr(model.get_submodule(parent), own, nn.Linear(k, n, device="meta").eval())
    return model


@contextlib.contextmanager
def parts_that_can_be_built(text: Any) -> Iterator[None]:
    """A context in which parts of a model that need a missing package, such as image towers, are left out, except the
    part of `text`: no code for text calls them."""
    from transformers import AutoModel

    build = AutoModel.from_config

    def built(config: Any, **options: Any) -> nn.Module:
        try:
            return build(config, **options)
        except ImportError:
            if config is text:
                raise
            return nn.Module()

    with mock.patch.object(AutoModel, "from_config", built):
        yield


def _without_pooler(cls: Any) -> dict[str, bool]:
    """The option that omits the pooling layer after the hidden states with which some encoders were trained."""
    has = not isinstance(cls, tuple) and "add_pooling_layer" in inspect.signature(cls.__init__).parameters
    return {"add_pooling_layer": False} if has else {}


def computed_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Values of the buffers that no checkpoint stores (inverse frequencies and the like), computed on the CPU.

    transformers computes them in `_init_weights` when it loads a model from meta, so that method is run here on the
    modules that own such buffers, and on enclosing modules for buffers that are still unset. Parameters stay on meta
    and are not changed.
    """
    saved: dict[str, tuple[nn.Module, str, Tensor]] = {}
    for path, module in model.named_modules():
        for name in module._non_persistent_buffers_set:
            if (buffer := module._buffers.get(name)) is not None:
                saved[f"{path}.{name}" if path else name] = module, name, buffer
                unset = float("nan") if buffer.is_floating_point() else 0  # NaN shows a buffer that nothing computed
                module._buffers[name] = torch.full_like(buffer, unset, device="cpu")
    with torch.no_grad():
        for path in dict.fromkeys(name.rpartition(".")[0] for name in saved):
            _owner(model, path)._init_weights(model.get_submodule(path))
        unset_in = [name for name, (module, own, _) in saved.items() if module._buffers[own].isnan().any()]  # type: ignore[union-attr]
        for path in dict.fromkeys(path for name in unset_in for path in _around(name)):
            _owner(model, path)._init_weights(model.get_submodule(path))
    values = {}
    for full, (module, name, buffer) in saved.items():
        values[full], module._buffers[name] = module._buffers[name], buffer
    return values  # type: ignore[return-value]


def _around(name: str) -> list[str]:
    """The paths of the modules that enclose a tensor's owner, innermost first."""
    parts = name.split(".")[:-2]
    return [".".join(parts[:end]) for end in range(len(parts), -1, -1)]


def _owner(model: nn.Module, path: str) -> Any:
    """The innermost PreTrainedModel around `path`, whose `_init_weights` knows the module."""
    from transformers import PreTrainedModel

    owner: Any = model
    for i in range(len(path.split("."))):
        module = model.get_submodule(".".join(path.split(".")[: i + 1])) if path else model
        if isinstance(module, PreTrainedModel):
            owner = module
    return owner
