"""Finds the tensors of a checkpoint without a parameter in the model's code that should be reported to the user."""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import nn

from ...weights.handles import Weight
from .ahead import find_layer

_SHOWN = 3
_MAX_NAME = 80
_BUFFERS = (
    r"\.inv_freq$",
    r"(^|\.)position_ids$",
    r"\.masked_bias$",
)  # stored by older versions of transformers, computed now


def worth_telling(
    model: nn.Module,
    places: Mapping[str, str],
    tensors: Mapping[str, Weight],
    num_layers: int,
    task: str,
    sees: bool = False,
) -> list[str]:
    """The names of tensors without a parameter that may change what the model computes.

    Tensors that transformers also ignores silently are left out, and so is the layer that --spec mtp reads. If the task
    is not "generate", tensors outside the model's own modules belong to a head of another task, and are left out.

    places: for each such tensor, the name of the parameter that it would be. sees: the model is multimodal, and tensors
    of its other parts differ in the first part of their names.
    """
    text = {name.split(".")[0] for name in tensors.keys() - places.keys()} if sees else set()
    harmless = [*_BUFFERS, *(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())]
    if find_layer(tensors, num_layers) is not None:
        harmless += [rf"(^|\.)layers\.{num_layers}\.", r"^mtp\."]
    known = re.compile("|".join(f"({pattern})" for pattern in harmless))
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    own = {name for name, _ in model.named_children()}
    return [
        name
        for name, place in places.items()
        if not known.search(name)
        and not known.search(place)
        and (not sees or name.split(".")[0] in text)
        and (task == "generate" or place.removeprefix(prefix).split(".")[0] in own)
    ]


def in_words(names: list[str]) -> str:
    """One line about these tensors for the user."""
    shown = [repr(name if len(name) <= _MAX_NAME else f"{name[:_MAX_NAME]}..") for name in names[:_SHOWN]]
    more = ", .." if len(names) > _SHOWN else ""
    what = "1 tensor of the checkpoint is" if len(names) == 1 else f"{len(names)} tensors of the checkpoint are"
    return f"{what} not read, because the model's code has no place for such a name: {', '.join(shown)}{more}"
