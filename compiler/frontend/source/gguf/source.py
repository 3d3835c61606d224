"""A GGUF file as a source of a model."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from .....runtime.format.gguf import GgufContainer
from ....errors import CheckpointError, TensorError
from ....weights.handles import Constant, Weight
from ..ahead import LayerAhead, one_layer
from ..conversion import completed
from ..model import build_meta_model, computed_buffers
from ..refuse import check_config
from .ahead import as_model, parts_of_layer
from .config import read_config
from .rope import rope_factors
from .split import open_container
from .tensors import handle, weights_of
from .tokenizer import write_files


class GgufFile:
    """One file, or any file of a split model.

    files: a temporary directory with the other files of a checkpoint, made from the metadata; it is deleted with this
    object.
    """

    layered = True
    unread: Sequence[str] = ()
    told = ""
    tensors: Mapping[str, Weight] = MappingProxyType({})

    def __init__(self, path: Path, task: str = "generate") -> None:
        self.path = path
        self.container = open_container(path)
        self.config = read_config(self.container)
        check_config(path, {"model_type": self.config.model_type}, task)
        self._folder = tempfile.TemporaryDirectory(prefix="icc-gguf-")
        self.files = Path(self._folder.name)
        write_files(self.container, self.config, self.files)

    def weights(self, model: nn.Module) -> dict[str, Weight]:
        """See ModelSource. Quantized blocks are kept."""
        return self._weights(self.container, model, self.config)

    def _weights(self, container: GgufContainer, model: nn.Module, config: Any) -> dict[str, Weight]:
        computed = self._with_factors(computed_buffers(model))
        try:
            found = weights_of(container, model, config)
        except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
            reason = " ".join(str(error).split())[:100]
            raise CheckpointError(f"{self.path}: tensors are of other sizes than the metadata say: {reason}") from error
        for name, parameter in model.state_dict().items():
            if name.endswith("_proj.bias") and name not in found:  # files may lack that of the output
                found[name] = Constant(torch.zeros(()).expand(parameter.shape))
            elif name.endswith("token_type_embeddings.weight") and name not in found:  # DistilBERT has no token types
                found[name] = Constant(torch.zeros(()).expand(parameter.shape))
        return completed(model, found, computed)

    def build(self, written_out: bool, task: str) -> nn.Module:
        """See ModelSource."""
        return build_meta_model(self.config, written_out, task)

    def layer_ahead(self) -> LayerAhead | None:
        """See ModelSource."""
        alone = as_model(self.container)
        if alone is None:
            return None
        config = one_layer(self.config)
        model = build_meta_model(config)
        return LayerAhead(model, self._weights(alone, model, config), parts_of_layer(self.container, self.config))

    def _with_factors(self, computed: dict[str, Tensor]) -> dict[str, Tensor]:
        """Rotary frequencies divided by the file's factors, if it has some."""
        entry = rope_factors(self.container, self.config.to_dict())
        if entry is None:
            return computed
        factors = handle(entry).load().to(torch.float32).reshape(-1)
        found = {name: value for name, value in computed.items() if name.endswith("inv_freq")}
        if any(value.shape != factors.shape for value in found.values()) or not bool((factors != 0).all()):
            raise TensorError(entry.name, f"has {len(factors)} factors, none 0, for other frequencies")
        return computed | {name: value / factors for name, value in found.items()}
