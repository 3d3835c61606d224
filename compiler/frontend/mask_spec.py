"""What stands for an attention mask while a model is traced: nothing is computed, and nobody may look inside."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors import UnsupportedModel


@dataclass(frozen=True)
class MaskSpec:
    """What a mask allows, in the words of icc::attention: by default, to be causal. Models hand it to the attention
    function without looking inside."""

    window: int = 0
    chunk: int = 0
    ahead: int = 0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise MaskUsed()

    def __getitem__(self, index: Any) -> Any:
        raise MaskUsed()

    def __radd__(self, other: Any) -> Any:
        raise MaskUsed()

    __add__ = __mul__ = __rmul__ = __sub__ = __rsub__ = __and__ = __rand__ = __invert__ = __radd__  # type: ignore


class MaskUsed(UnsupportedModel):
    """A model computes with its attention mask instead of handing it to an attention function."""

    def __init__(self) -> None:
        super().__init__(
            "the model computes with its attention mask (attention of its own, such as learned sparse attention)",
            "icc compiles causal, sliding-window, chunked and ALiBi attention",
            op="attention_mask",
        )
