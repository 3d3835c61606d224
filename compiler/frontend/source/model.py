"""Building the model that transformers defines, on the meta device: shapes and code, no weights in memory."""

from __future__ import annotations

import inspect
import logging
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import IccError, UnsupportedModel
from ..export.interfaces import NAME, register_interfaces


def load_config(model_dir: Path) -> Any:
    """The transformers config of a checkpoint directory; refuses unknown types and remote code."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(model_dir, trust_remote_code=False)
    except MemoryError:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise UnsupportedModel(f"{model_dir / 'config.json'}: {reason}") from error


def _builder(task: str) -> Any:
    """transformers' class of models that end as a task needs it: in logits, hidden states, or scores of a text."""
    import transformers

    names = {"generate": "AutoModelForCausalLM", "embed": "AutoModel", "rerank": "AutoModelForSequenceClassification"}
    return getattr(transformers, names[task])


def attention_implementation(config: Any, task: str = "generate") -> str:
    """icc's attention function where the model's code asks an interface for one, else its own written-out attention."""
    import sys

    cls: Any = _builder(task)._model_mapping[type(config)]
    if isinstance(cls, tuple):
        cls = cls[0]
    asks = hasattr(sys.modules[cls.__module__], "ALL_ATTENTION_FUNCTIONS") or cls._supports_attention_backend
    return NAME if asks else "eager"


def build_meta_model(config: Any, written_out: bool = False, task: str = "generate") -> nn.Module:
    """The model of `config` for a task on meta, float32, with icc's attention and expert functions.

    `written_out` keeps the model's own attention code, which the frontend then recognises by data flow. "embed" leaves
    the LM head out: the model ends with its hidden states. "rerank": it ends with a score per label.
    """
    builder = _builder(task)
    if type(config) not in builder._model_mapping:
        kind = {"generate": "a causal language model", "embed": "a model of text", "rerank": "a classifier of texts"}
        raise UnsupportedModel(
            f"model type {config.model_type!r} is not {kind[task]} in transformers",
            f"icc compiles what {builder.__name__} can load",
        )
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(f"model type {config.model_type!r} is an encoder-decoder")
    register_interfaces()
    text = config.get_text_config()
    for part in {id(config): config, id(text): text}.values():
        part._experts_implementation = NAME
    logging.getLogger("transformers").setLevel(logging.ERROR)
    attention = "eager" if written_out else attention_implementation(config, task)
    try:
        with torch.device("meta"):
            options = _without_pooler(builder._model_mapping[type(config)]) if task == "embed" else {}
            model = builder.from_config(config, dtype=torch.float32, attn_implementation=attention, **options)
    except (IccError, MemoryError):
        raise
    except Exception as error:
        if not written_out and isinstance(error, KeyError) and error.args == (NAME,):
            return build_meta_model(config, True, task)  # a table of attention classes of its own
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise UnsupportedModel(f"transformers cannot build {config.model_type!r}: {reason}") from error
    for module in model.modules():
        if hasattr(module, "config") and hasattr(module.config, "_experts_implementation"):
            module.config._experts_implementation = NAME
    return model.eval()


def _without_pooler(cls: Any) -> dict[str, bool]:
    """What leaves out the layer behind the hidden states that some encoders were trained with."""
    has = not isinstance(cls, tuple) and "add_pooling_layer" in inspect.signature(cls.__init__).parameters
    return {"add_pooling_layer": False} if has else {}


def computed_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Values of the buffers that no checkpoint stores (inverse frequencies and the like), computed on the CPU.

    transformers computes them in `_init_weights` when it loads a model from meta, so that is what runs here, on the
    modules that own such buffers only; their parameters stay on meta and are not touched.
    """
    values: dict[str, Tensor] = {}
    for path, module in list(model.named_modules()):
        names = [n for n in module._non_persistent_buffers_set if module._buffers.get(n) is not None]
        if not names:
            continue
        saved = {n: b for n in names if (b := module._buffers[n]) is not None}
        for n, buffer in saved.items():
            unset = float("nan") if buffer.is_floating_point() else 0  # what nothing computes must not pass unseen
            module._buffers[n] = torch.full_like(buffer, unset, device="cpu")
        with torch.no_grad():
            owner = _owner(model, path)
            owner._init_weights(module)
        for n in names:
            values[f"{path}.{n}" if path else n] = module._buffers[n]  # type: ignore[assignment]
            module._buffers[n] = saved[n]
    return values


def _owner(model: nn.Module, path: str) -> Any:
    """The innermost PreTrainedModel around `path`, whose `_init_weights` knows the module."""
    from transformers import PreTrainedModel

    owner: Any = model
    for i in range(len(path.split("."))):
        module = model.get_submodule(".".join(path.split(".")[: i + 1])) if path else model
        if isinstance(module, PreTrainedModel):
            owner = module
    return owner
