"""The tensors of an EAGLE-3 drafter, and the tokens that it can guess."""

from __future__ import annotations

from pathlib import Path

import torch

from ...errors import TensorError
from ...weights.handles import Weight
from ..drafter_files import DrafterTensors
from .config import READ


class EagleTensors(DrafterTensors):
    """The tensors of a directory under speculators' names: SpecForge's `midlayer.` is `layers.0.`."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, READ, _name)

    def vocabulary(self, draft: int, tokens: int) -> torch.Tensor | None:
        """int64 [draft]: the id among the model's `tokens` tokens of each of the drafter's, from the offsets `d2t`
        [draft]; None if the ids are equal. TensorError if `d2t` is needed and missing or is invalid, or if `t2d`
        [tokens], which marks the drafter's tokens, contradicts it."""
        offsets, known = self.find("d2t", (draft,)), self.find("t2d", (tokens,))
        if offsets is None:
            if draft < tokens:
                raise TensorError("d2t", f"is missing from {self._directory}", "draft_vocab_size asks for it")
            return None
        _expect_integers("d2t", offsets)
        found = offsets.load().to(torch.int64) + torch.arange(draft)
        if int(found.min()) < 0 or int(found.max()) >= tokens or len(found.unique()) < draft:
            raise TensorError("d2t", f"does not name {draft} different tokens of the model's {tokens}")
        if known is not None:
            _expect_integers("t2d", known)
            if not torch.equal(known.load().bool().nonzero()[:, 0], found.sort().values):
                raise TensorError("t2d", "marks other tokens than d2t names", "the drafter is damaged")
        return None if torch.equal(found, torch.arange(tokens)) else found


def _name(stored: str) -> str:
    name = stored.removeprefix("model.")
    return "layers.0." + name.removeprefix("midlayer.") if name.startswith("midlayer.") else name


def _expect_integers(name: str, weight: Weight) -> None:
    if weight.dtype.is_floating_point:
        raise TensorError(name, f"has dtype {str(weight.dtype).removeprefix('torch.')}, not integers")
