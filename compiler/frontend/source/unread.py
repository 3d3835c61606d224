"""A model of which only the configuration is available: shapes and dtypes, to plan a compile without its weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import IccError
from ...weights.handles import Constant, Weight
from .ahead import LayerAhead
from .conversion import follow_ties
from .identify import find_checkpoint
from .model import build_meta_model, computed_buffers, load_config
from .refuse import check_config
from .source import ModelSource, open_source


@dataclass
class UnreadWeight(Weight):
    """A weight of which only shape and dtype are known. It loads as zeros that take no memory."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def load(self) -> Tensor:
        """Zeros of the shape, expanded from one number in memory."""
        return torch.zeros(1, dtype=self.dtype).expand(self.shape) if self.shape else torch.zeros((), dtype=self.dtype)


class ConfigOnly:
    """A directory with config.json. Weights have the shapes of the model's code; floats have the configuration's
    dtype."""

    layered = True
    unread: Sequence[str] = ()
    told = ""
    tensors: Mapping[str, Weight] = MappingProxyType({})

    def __init__(self, path: Path, task: str = "generate") -> None:
        found = find_checkpoint(path)
        check_config(found.path, found.config, task)
        self.files = found.path
        self.config = load_config(found.path)
        self._dtype = _stated_dtype(self.config)

    def build(self, written_out: bool, task: str) -> nn.Module:
        """See ModelSource."""
        return build_meta_model(self.config, written_out, task)

    def weights(self, model: nn.Module) -> dict[str, Weight]:
        """See ModelSource."""
        expected = dict(model.state_dict())
        ties: dict[str, str] = getattr(model, "all_tied_weights_keys", {}) or {}
        found: dict[str, Weight] = {
            name: UnreadWeight(tuple(value.shape), self._dtype if value.is_floating_point() else value.dtype)
            for name, value in expected.items()
            if name not in ties
        }
        found |= {name: Constant(value) for name, value in computed_buffers(model).items()}
        follow_ties(model, found, expected)
        return found

    def layer_ahead(self) -> LayerAhead | None:
        """See ModelSource. None: a configuration does not describe this layer."""
        return None


def planned_source(path: Path, task: str = "generate") -> ModelSource:
    """The checkpoint in a directory if its files exist, whose headers state each weight's dtype; else its config.json
    alone."""
    try:
        return open_source(path, task)
    except IccError:
        if path.is_file():
            raise
        return ConfigOnly(path, task)


def _stated_dtype(config: Any) -> torch.dtype:
    """The dtype of weights that the configuration states; float32 if it states none, as in transformers."""
    for part in (config, config.get_text_config()):
        found = getattr(part, "dtype", None)
        found = getattr(torch, found, None) if isinstance(found, str) else found
        if isinstance(found, torch.dtype):
            return found
    return torch.float32
