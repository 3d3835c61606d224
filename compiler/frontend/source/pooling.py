"""Reads how hidden states are pooled from the files that sentence-transformers wrote beside a checkpoint."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal

from ....runtime.format.manifest import Pooling as Kind
from ...errors import CheckpointError, UnsupportedModel

# by sentence-transformers' current names; older files have a flag for each, in this order
_MODES: dict[str, Kind] = {
    "cls": "cls",
    "max": "max",
    "mean": "mean",
    "mean_sqrt_len_tokens": "mean_sqrt_len",
    "weightedmean": "weightedmean",
    "lasttoken": "last",
}
_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
_HINT = "give it with --pooling"
_ACTIVATIONS = {
    "Identity": "identity",
    "Tanh": "tanh",
    "ReLU": "relu",
    "GELU": "gelu",
    "Sigmoid": "sigmoid",
    "SiLU": "silu",
}
_NAMES = {"Dense": "dense", "LayerNorm": "layer_norm", "Normalize": "normalize"}
_NOTHING = ("Dropout",)  # has no effect in inference
_VECTOR = "sentence_embedding"
_ENDLESS = 10**9  # tokens; tokenizers without a limit state a larger number


@dataclass(frozen=True)
class LayerBehind:
    """A layer after the pooling: its kind (see TailLayer), the directory of its weights, its activation function, and
    whether its input is added to the result."""

    kind: Literal["dense", "layer_norm", "normalize"]
    path: Path
    activation: str = "identity"
    adds_input: bool = False


@dataclass(frozen=True)
class Pooling:
    """How hidden states become one vector, from sentence-transformers' files.

    kinds: poolings whose vectors are concatenated; () if not stated. normalize: whether vectors are scaled to length 1
    at the end. layers: those between pooling and scaling. prompted: whether tokens of a prompt are pooled, too.
    max_tokens: tokens of the longest text that the model is meant for, 0 if not stated. prompts: prompts by name.
    default_prompt: the name of the prompt that is used if none is asked for, "" for none. lower_case: whether texts are
    lower-cased, whatever the tokenizer says.
    """

    kinds: tuple[Kind, ...] = ()
    normalize: bool = True
    layers: tuple[LayerBehind, ...] = ()
    prompted: bool = True
    max_tokens: int = 0
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt: str = ""
    lower_case: bool = False

    def settled(self, looks_ahead: bool) -> tuple[Kind, ...]:
        """The kinds of pooling; if not stated, the mean if tokens see later ones, else the last token."""
        return self.kinds or (("mean",) if looks_ahead else ("last",))

    def in_graph(self, looks_ahead: bool) -> bool:
        """Whether the graph can compute the pooling: it is one token's row, or the mean of a whole sequence with
        attention in both directions."""
        kinds = self.settled(looks_ahead)
        return self.prompted and (kinds in (("cls",), ("last",)) or (looks_ahead and kinds == ("mean",)))

    def dense(self, looks_ahead: bool) -> tuple[LayerBehind, ...]:
        """The layers after the pooling that the graph computes: the leading dense layers, if the graph computes the
        pooling."""
        plain = takewhile(lambda layer: layer.kind == "dense" and not layer.adds_input, self.layers)
        return tuple(plain) if self.in_graph(looks_ahead) else ()


def read_pooling(model_dir: Path, kind: Kind | None = None) -> Pooling:
    """The pooling of a checkpoint. kind: overrides the kind of pooling in its files; None: theirs.

    modules.json lists the modules that sentence-transformers runs in order: Transformer, Pooling, then others. Without
    it, vectors are normalized. UnsupportedModel for a module or mode that icc lacks.
    """
    kinds = () if kind is None else (kind,)
    listing = model_dir / "modules.json"
    if not listing.is_file():
        return Pooling(kinds)
    modules = [module for module in read_json(listing, list) if isinstance(module, dict)]
    names = [str(module.get("type", "")).rsplit(".", 1)[-1] for module in modules]
    if names[:2] != ["Transformer", "Pooling"] or set(names[2:]) - {*_NAMES, *_NOTHING}:
        raise UnsupportedModel(
            f"{listing} has the modules {', '.join(names)}",
            f"icc computes Transformer, Pooling, and behind them {', '.join(_NAMES)}",
        )
    folders = [_folder(model_dir, module) for module in modules]
    pooled = _config(folders[1]) if kind is None else {}
    behind = zip(names[2:], folders[2:], strict=True)
    layers = [_layer(name, folder) for name, folder in behind if name not in _NOTHING]
    normalize = bool(layers) and layers[-1].kind == "normalize"
    texts = _settings(folders[0])
    prompts, default = read_prompts(model_dir)
    return Pooling(
        kinds or _kinds(folders[1], pooled),
        normalize,
        tuple(layers[:-1] if normalize else layers),
        pooled.get("include_prompt") is not False,
        max_tokens(model_dir, folders[0]),
        prompts,
        default,
        texts.get("do_lower_case") is True,
    )


def _folder(model_dir: Path, module: dict[str, Any]) -> Path:
    """The folder of a module's files. CheckpointError if it is outside the checkpoint."""
    name = str(module.get("path", ""))
    path = model_dir / name
    if not path.resolve().is_relative_to(model_dir.resolve()):
        raise CheckpointError(f"{model_dir / 'modules.json'} names a folder outside of the checkpoint: {name!r}")
    return path


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        raise CheckpointError(f"{path} is missing", _HINT)
    return read_json(path, dict)


def _kinds(folder: Path, config: dict[str, Any]) -> tuple[Kind, ...]:
    named = config.get("pooling_mode")
    if named is None:
        others = (name for name in config if name.startswith("pooling_mode_") and name not in _FLAGS)
        modes = [_FLAGS.get(name, name) for name in (*_FLAGS, *others) if config.get(name) is True]
    else:
        modes = [str(one) for one in (named if isinstance(named, list) else [named])]
    if unknown := [mode for mode in modes if mode not in _MODES]:
        raise UnsupportedModel(f"{folder / 'config.json'} asks for {' and '.join(unknown)}", _HINT)
    return tuple(_MODES[mode] for mode in modes) or ("mean",)


def _layer(name: str, folder: Path) -> LayerBehind:
    path = folder / "config.json"
    config = read_json(path, dict) if path.is_file() else {}
    places = [config.get(f"module_{end}_name") or _VECTOR for end in ("input", "output")]
    if places != [_VECTOR, _VECTOR]:
        raise UnsupportedModel(f"{path}: a module of {' and '.join(places)}: icc makes one vector of a text")
    if name != "Dense":
        return LayerBehind(_NAMES[name], folder)  # type: ignore[arg-type]
    function = str(config.get("activation_function", "torch.nn.Tanh")).rsplit(".", 1)[-1]
    if function not in _ACTIVATIONS:
        raise UnsupportedModel(f"{path} has the activation function {function}", f"icc has {', '.join(_ACTIVATIONS)}")
    return LayerBehind("dense", folder, _ACTIVATIONS[function], config.get("use_residual") is True)


def _settings(folder: Path) -> dict[str, Any]:
    """The settings of tokenization; {} if there are none. Older files are named after the model's type."""
    found = sorted(folder.glob("sentence_*_config.json"))
    return read_json(found[0], dict) if found else {}


def max_tokens(model_dir: Path, folder: Path) -> int:
    """The number of tokens of the longest text that a model is meant for; 0 if not stated. folder: that of its
    Transformer module."""
    found = _settings(folder).get("max_seq_length")
    path = model_dir / "tokenizer_config.json"
    if found is None and path.is_file():
        found = read_json(path, dict).get("model_max_length")
    return found if isinstance(found, int) and 0 < found < _ENDLESS else 0


def read_prompts(model_dir: Path) -> tuple[dict[str, str], str]:
    """The prompts by name, and the name of the default prompt, "" for none."""
    path = model_dir / "config_sentence_transformers.json"
    config = read_json(path, dict) if path.is_file() else {}
    prompts = config.get("prompts")
    if not isinstance(prompts, dict):
        return {}, ""
    default = config.get("default_prompt_name")
    return {str(name): text for name, text in prompts.items() if isinstance(text, str)}, str(default or "")


def read_json(path: Path, kind: type) -> Any:
    """The JSON array or object in a file. kind: list or dict. CheckpointError if the file holds anything else."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}", "download the checkpoint again") from error
    if not isinstance(found, kind):
        raise CheckpointError(f"{path} is not a JSON {'array' if kind is list else 'object'}")
    return found
