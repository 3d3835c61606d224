"""The record of one weight's quantization, for report.json."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..compiler.weights.handles import QuantizedWeight, Weight


@dataclass
class QuantRecord:
    """One quantized weight: its method and its error. `scaled`: whether AWQ folded scales into the producer of its
    input.

    `output_snr_db` compares the layer's outputs on calibration inputs (None if there were none). source: the weight
    before it was rounded, with the same scales.
    """

    name: str
    method: str
    format: str
    weight: QuantizedWeight = field(repr=False)
    output_snr_db: float | None = None
    scaled: bool = False
    source: Weight | None = field(default=None, repr=False)

    @property
    def weight_snr_db(self) -> float:
        """Signal-to-noise ratio of the stored weights, in dB; known once they are packed, computed before that."""
        if self.weight.snr_db is None:
            self.weight.parts()
        assert self.weight.snr_db is not None, "parts() measures"
        return self.weight.snr_db

    def as_json(self) -> dict[str, Any]:
        """The record as report.json shows it."""
        snr = None if self.output_snr_db is None else round(self.output_snr_db, 2)
        return {
            "name": self.name,
            "method": self.method,
            "format": self.format,
            "scaled": self.scaled,
            "weight_snr_db": round(self.weight_snr_db, 2),
            "output_snr_db": snr,
        }
