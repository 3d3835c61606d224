"""The value of `--spec`, parsed before anything heavy is imported."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ...runtime.format.lookahead import LOOKAHEAD, Lookahead
from ..drafters import FROM_FILES, LAYERS
from ..errors import UsageError

if TYPE_CHECKING:
    from .head_files import MedusaHead


@dataclass(frozen=True)
class SpecChoice:
    """The parsed value of `--spec`: a drafter. path: the directory of its weights, for drafters in FROM_FILES; else
    None. layers: for layer-skip, the number of layers after which it exits."""

    drafter: str
    path: Path | None = None
    layers: int = 0

    @property
    def is_layer(self) -> bool:
        """Whether the drafter is a layer of the engine, over tokens and hidden states."""
        return self.drafter in LAYERS

    @property
    def heads(self) -> Path | None:
        """The directory of Medusa heads; None for other drafters."""
        return self.path if self.drafter == "medusa" else None

    @classmethod
    def parse(cls, text: str) -> SpecChoice | None:
        """`none` (the result is None), `ngram`, `suffix`, `lookahead`, `lookahead:W,N,G`, `mtp`, `eagle:DIR`,
        `assistant:DIR`, `dflash:DIR`, `medusa:DIR` or `layer-skip:LAYERS`; UsageError for anything else."""
        drafter, _, value = text.partition(":")
        if drafter in ("", "none"):
            return None
        if drafter == LOOKAHEAD:
            Lookahead.parse(value)
            return cls(text)
        layers = int(value) if drafter == "layer-skip" and value.isascii() and value.isdigit() else 0
        known: dict[str, bool] = {"layer-skip": layers > 0}
        known |= dict.fromkeys(("ngram", "suffix", "mtp"), not value) | dict.fromkeys(FROM_FILES, bool(value))
        if not known.get(drafter):
            hint = (
                "uno:DIR and draft:ENGINE are given when the engine runs"
                if drafter in ("uno", "draft")
                else "give mtp, eagle:DIR, assistant:DIR, dflash:DIR, medusa:DIR, layer-skip:LAYERS, ngram, suffix, "
                "lookahead or none"
            )
            raise UsageError(f"--spec {text!r} is not known at compile time", hint)
        return cls(drafter, Path(value) if drafter in FROM_FILES else None, layers)

    def read_heads(self) -> tuple[MedusaHead, ...]:
        """The heads to insert; () for other drafters. CheckpointError or TensorError as `head_files.read_heads`."""
        from .head_files import read_heads

        return () if self.heads is None else read_heads(self.heads)
