"""Joins experts that a quantizer split into one linear layer per product of an expert, whatever the model's own names
are.

llm-compressor writes `experts.3.gate_proj`, `up_proj` and `down_proj` (and their biases) for all models, even if their
own checkpoints, and therefore transformers' conversions, have other names (Mixtral's w1, w2, w3) or one tensor for all
experts (Granite, Llama 4, gpt-oss).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

_OWN = re.compile(r"(.+)\.(\d+)\.(gate|up|down)_proj\.(weight|bias)")


def joined(name: str, expected: Mapping[str, Tensor]) -> str | None:
    """The parameter of all experts that one expert's tensor is a part of; None if it is part of none."""
    found = _OWN.fullmatch(name)
    if found is None:
        return None
    experts, _, part, kind = found.groups()
    whole = f"{experts}.{'down' if part == 'down' else 'gate_up'}_proj{'_bias' if kind == 'bias' else ''}"
    return whole if whole in expected else None


@dataclass
class JoinedExperts:
    """The converter of one parameter of all experts, with the interface of transformers' converters: tensors are added,
    then it is run.

    expected: the parameter, [E, N, K] or, for transposed experts, [E, K, N]; [E, N] for biases. between: whether the
    rows of gate and up are interleaved, as in gpt-oss.
    """

    target: str
    expected: Tensor
    transposed: bool
    between: bool
    parts: dict[tuple[int, str], Callable[[], Tensor]] = field(default_factory=dict)

    @classmethod
    def of(cls, target: str, model: nn.Module, expected: Mapping[str, Tensor]) -> JoinedExperts:
        """The converter for a parameter of `model`, by the parameter's name."""
        path = target.rpartition(".")[0]
        module: Any = model.get_submodule(path)
        down, gate_up = (expected[f"{path}.{part}_proj"].shape for part in ("down", "gate_up"))
        transposed = gate_up[1:] == (down[2], 2 * down[1]) and not target.endswith("_bias")
        return cls(target, expected[target], transposed, not getattr(module, "is_concatenated", True))

    def add_tensor(self, first: str, key: str, pattern: str, value: Any) -> None:
        """Add one expert's tensor, whose name in the checkpoint is `key`. value: loads it."""
        found = _OWN.fullmatch(key)
        assert found is not None
        self.parts[int(found[2]), found[3]] = value

    def convert(self, first: str, model: nn.Module, config: Any) -> dict[str, Tensor]:
        """The value of the parameter [E, ..], by the parameter's name."""
        return {self.target: torch.stack([self._expert(number) for number in range(len(self.expected))])}

    def _expert(self, number: int) -> Tensor:
        if "gate_up" not in self.target:
            whole = self.parts[number, "down"]()
        else:
            both = [self.parts[number, part]() for part in ("gate", "up")]
            whole = torch.stack(both, 1).flatten(0, 1) if self.between else torch.cat(both)
        return whole.mT if self.transposed else whole
