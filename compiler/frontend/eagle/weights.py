"""The tensors of an EAGLE-3 drafter, checked before anything is traced, and the tokens that it can guess."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from ...errors import TensorError, UnsupportedModel
from ...weights.handles import Weight
from ..source.checkpoint import open_checkpoint

# Of training only: what the model itself has, and what rotary modules compute.
_UNREAD = re.compile(r"verifier_norm\.weight|verifier_lm_head\.weight|(.*\.)?rotary_emb\.inv_freq")


class EagleTensors:
    """The tensors of a directory by one set of names: SpecForge's `midlayer.` is `layers.0.`, as speculators has it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._stored = {_name(stored): (stored, weight) for stored, weight in open_checkpoint(directory).items()}
        self._wanted: set[str] = set()

    def find(self, name: str, shape: Sequence[int]) -> Weight | None:
        """The tensor of that name, None where there is none. TensorError where it has another shape."""
        self._wanted.add(name)
        if name not in self._stored:
            return None
        stored, weight = self._stored[name]
        if tuple(weight.shape) != tuple(shape):
            raise TensorError(
                stored,
                f"has shape {list(weight.shape)}, config.json says {list(shape)}",
                f"{self._directory} does not match its configuration",
            )
        return weight

    def get(self, name: str, shape: Sequence[int]) -> Weight:
        """The tensor of that name. TensorError where it is missing, has another shape, or holds no real numbers."""
        weight = self.find(name, shape)
        if weight is None:
            raise TensorError(name, f"is missing from {self._directory}", "config.json asks for it")
        if not weight.dtype.is_floating_point:
            raise TensorError(self._stored[name][0], f"has dtype {str(weight.dtype).removeprefix('torch.')}")
        return weight

    def vocabulary(self, draft: int, tokens: int) -> torch.Tensor | None:
        """int64 [draft]: which of the model's `tokens` tokens each of the drafter's is, by `d2t` [draft], what is to be
        added to a number; None where they are the same. TensorError where that is missing or makes no sense, or where
        `t2d` [tokens], which tokens the drafter has, says something else."""
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

    def check_read(self) -> None:
        """UnsupportedModel for a tensor that nobody asked for, unless it is known to change nothing."""
        for name, (stored, _) in sorted(self._stored.items()):
            if name not in self._wanted and not _UNREAD.fullmatch(name):
                raise UnsupportedModel(
                    f"{self._directory}: tensor {stored!r} is not known, and may change the drafter",
                    "icc reads EAGLE-3 drafters as SpecForge and speculators write them",
                )


def _name(stored: str) -> str:
    name = stored.removeprefix("model.")
    return "layers.0." + name.removeprefix("midlayer.") if name.startswith("midlayer.") else name


def _expect_integers(name: str, weight: Weight) -> None:
    if weight.dtype.is_floating_point:
        raise TensorError(name, f"has dtype {str(weight.dtype).removeprefix('torch.')}, not integers")


def checked(tensors: EagleTensors, shapes: Mapping[str, Sequence[int]]) -> dict[str, Weight]:
    """The tensors of these names and shapes."""
    return {name: tensors.get(name, shape) for name, shape in shapes.items()}
