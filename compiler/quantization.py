"""What --quant and --quant-head stand for: a method and a storage format. The only list of them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Quantization:
    """How the weights of a compile are quantized.

    method: the pass that chooses the codes, "rtn" for quantize-rtn. format: what it stores, by the name that
    `find_format` knows. calibrated: whether it reads text.
    """

    method: str
    format: str
    calibrated: bool = False


QUANTIZATIONS: dict[str, Quantization | None] = {
    "none": None,
    "rtn4": Quantization("rtn", "q4"),
    "awq4": Quantization("awq", "q4", calibrated=True),
    "gptq4": Quantization("gptq", "q4", calibrated=True),
}
HEAD_FORMATS: dict[str, str | None] = {"none": None, "int8": "q8", "4bit": "q4"}  # None: left as stored
