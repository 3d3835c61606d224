"""An ONNX file as a source of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

from torch import nn

from ....errors import CheckpointError, UnsupportedModel
from ....weights.handles import Weight
from ..ahead import LayerAhead
from ..identify import onnx_config, onnx_files
from .container import open_container
from .errors import UNEXPECTED, one_line
from .inputs import labels_of
from .module import OnnxModel, TypedOnnxModel

_AGAIN = "check it with onnx.checker, and export it again"


class OnnxFile:
    """One ONNX file.

    files: the folder of config.json and tokenizer.json, if they exist. config: read for lengths and names only, because
    the graph defines the computation.
    """

    layered = False
    unread: Sequence[str] = ()
    told = ""
    tensors: Mapping[str, Weight] = MappingProxyType({})

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files = onnx_files(path)
        self.config = _config(onnx_config(self.files))
        try:
            self.container = open_container(path)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
        except UNEXPECTED as error:
            raise CheckpointError(f"{path} is damaged: {one_line(error)}", _AGAIN) from error

    def weights(self, model: nn.Module) -> dict[str, Weight]:
        """See ModelSource."""
        assert isinstance(model, OnnxModel)
        return model.handles

    def build(self, written_out: bool, task: str) -> nn.Module:
        """See ModelSource. Attention is always written out, as in the file."""
        try:
            return self._built(task)
        except UNEXPECTED as error:
            raise CheckpointError(
                f"{self.path} has a node that is none of its op: {one_line(error)}", _AGAIN
            ) from error

    def layer_ahead(self) -> LayerAhead | None:
        """See ModelSource. None: a file has no such layer."""
        return None

    def _built(self, task: str) -> nn.Module:
        if task != "rerank":
            return OnnxModel(self.container, hidden=task == "embed").eval()
        labels = labels_of(self.path, self.container.graph)
        if isinstance(labels, int) and labels > 2:
            raise UnsupportedModel(f"{self.path} has {labels} labels", "--task rerank is for one or two labels")
        if any(info.name == "token_type_ids" for info in self.container.graph.input):
            return TypedOnnxModel(self.container, self.config).eval()
        return OnnxModel(self.container).eval()


def _config(found: dict[str, Any]) -> Any:
    config = SimpleNamespace(**{"vocab_size": 0, "hidden_size": 0, "num_hidden_layers": 0, **found})
    config.get_text_config = lambda: config
    return config
