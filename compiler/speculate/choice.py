"""What `--spec` asks for; read before anything heavy is imported."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import UsageError

if TYPE_CHECKING:
    from .head_files import MedusaHead


@dataclass(frozen=True)
class SpecChoice:
    """What `--spec` asked for: a drafter, for medusa the directory of its heads, for layer-skip its layers."""

    drafter: str
    heads: Path | None = None
    layers: int = 0

    @classmethod
    def parse(cls, text: str) -> SpecChoice | None:
        """`none`, `ngram`, `suffix`, `mtp`, `medusa:DIR` or `layer-skip:LAYERS`; UsageError for anything else."""
        drafter, _, value = text.partition(":")
        if drafter in ("", "none"):
            return None
        layers = int(value) if drafter == "layer-skip" and value.isascii() and value.isdigit() else 0
        plain = dict.fromkeys(("ngram", "suffix", "mtp"), not value)
        known = {"medusa": bool(value), "layer-skip": layers > 0, **plain}
        if not known.get(drafter):
            hint = "give mtp, medusa:DIR, layer-skip:LAYERS, ngram, suffix or none"
            raise UsageError(f"--spec {text!r} is not known at compile time", hint)
        return cls(drafter, Path(value) if drafter == "medusa" else None, layers)

    def read_heads(self) -> tuple[MedusaHead, ...]:
        """The heads to insert, none for other drafters."""
        from .head_files import read_heads

        return () if self.heads is None else read_heads(self.heads)
