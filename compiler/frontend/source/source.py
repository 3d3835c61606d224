"""ModelSource: where a model is read from. Each kind of file or directory has one class, here or in a file beside
this."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from torch import nn

from ....runtime.format.gguf import is_gguf
from ...weights.handles import QuantizedWeight, SortedColumns, Weight
from .ahead import LayerAhead, layer_of_checkpoint
from .checkpoint import open_checkpoint
from .conversion import model_weights
from .float8 import refuse_bare
from .gguf.source import GgufFile
from .identify import find_checkpoint
from .model import build_meta_model, computed_buffers, linears_where, load_config
from .packed import unpacked
from .packing import OF_ACTIVATIONS
from .refuse import check_config, check_layers
from .tokenizer_files import TextFiles, text_files
from .unplaced import worth_telling


class ModelSource(Protocol):
    """A model on disk. Opening it reads headers only; values are read when a weight's handle is loaded."""

    @property
    def config(self) -> Any:
        """transformers' configuration of the model."""
        ...

    @property
    def files(self) -> Path:
        """The directory of the other files of a checkpoint, as transformers names them: config.json, tokenizer.json."""
        ...

    def weights(self, model: nn.Module) -> dict[str, Weight]:
        """A handle for every parameter and buffer of `model` (on meta) by its qualified name.

        Raises TensorError if one is missing or has a wrong shape.
        """
        ...

    @property
    def unread(self) -> Sequence[str]:
        """The names of tensors that `weights` found no parameter for and that should be reported to the user."""
        ...

    @property
    def told(self) -> str:
        """A message for the user about the other files; "" for none."""
        ...

    @property
    def tensors(self) -> Mapping[str, Weight]:
        """The checkpoint's tensors by their own names; empty if these are not names that transformers reads."""
        ...

    def layer_ahead(self) -> LayerAhead | None:
        """The layer for multi-token prediction; None if the source has none."""
        ...

    layered: bool  # whether layers are modules, so that one of each kind may be traced for all

    def build(self, written_out: bool, task: str) -> nn.Module:
        """The model on meta; see `build_meta_model`."""
        ...


class CheckpointDirectory:
    """A Hugging Face directory: config.json and safetensors, in one file or in shards."""

    layered = True
    unread: Sequence[str] = ()

    def __init__(self, path: Path, task: str = "generate") -> None:
        found = find_checkpoint(path)
        packing = check_config(found.path, found.config, task)
        self._path, self._task, self._packed = found.path, task, packing is not None
        self.config = load_config(found.path)
        check_layers(found.path, self.config)
        self.tensors: Mapping[str, Weight] = open_checkpoint(found.path)
        if packing is not None:
            for part in (self.config, self.config.get_text_config()):
                vars(part).pop("quantization_config", None)
            self.tensors = unpacked(self.tensors, packing)
        refuse_bare(self.tensors)

    @cached_property
    def _texts(self) -> TextFiles:
        return text_files(self._path)

    @property
    def files(self) -> Path:
        """See ModelSource."""
        return self._texts.path

    @property
    def told(self) -> str:
        """See ModelSource."""
        return self._texts.told

    def weights(self, model: nn.Module) -> dict[str, Weight]:
        """See ModelSource. Names and layouts are converted as by transformers when it loads the checkpoint."""
        unplaced: dict[str, str] = {}
        found = model_weights(model, self.tensors, computed_buffers(model), unplaced)
        text = self.config.get_text_config()
        layers, sees = getattr(text, "num_hidden_layers", 0), text is not self.config
        if self._packed:
            unplaced = {name: place for name, place in unplaced.items() if not OF_ACTIVATIONS.search(name)}
        self.unread = worth_telling(model, unplaced, self.tensors, layers, self._task, sees)
        return found

    def build(self, written_out: bool, task: str) -> nn.Module:
        """See ModelSource."""
        model = build_meta_model(self.config, written_out, task)
        return linears_where(model, lambda name: isinstance(self.tensors.get(name), (QuantizedWeight, SortedColumns)))

    def layer_ahead(self) -> LayerAhead | None:
        """See ModelSource."""
        return layer_of_checkpoint(self)


def open_source(path: Path, task: str = "generate") -> ModelSource:
    """The source at a path. CheckpointError or UnsupportedModel if there is none that icc can read for the task."""
    found = find_checkpoint(path)
    if found.is_onnx:
        from .onnx.source import OnnxFile  # needs the package onnx

        return OnnxFile(found.path)
    return GgufFile(found.path, task) if is_gguf(found.path) else CheckpointDirectory(found.path, task)
