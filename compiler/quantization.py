"""What --quant and --quant-head stand for: a method and a storage format. The only list of them."""

from __future__ import annotations

from dataclasses import dataclass

GROUPS = (128, 64, 32, 16)  # values per scale that kernels have


@dataclass(frozen=True)
class Quantization:
    """How the weights of a compile are quantized.

    method: the pass that chooses the codes, "rtn" for quantize-rtn; "awq+gptq" for the scales of the one and the codes
    of the other. format: what it stores, by the name that `find_format` knows. summary: what help says of it.
    calibrated: whether it reads text. encoding: the format where an engine
    for CPUs only ever computes many tokens at a time, "" for the same.
    """

    method: str
    format: str
    summary: str
    calibrated: bool = False
    encoding: str = ""

    @property
    def grouped(self) -> bool:
        """Whether --group-size says how many weights share a scale."""
        return self.format in ("q4", "q8", "nf4")


QUANTIZATIONS: dict[str, Quantization | None] = {
    "none": None,
    "rtn4": Quantization("rtn", "q4", "4 bits, rounded to the nearest value"),
    "nf4": Quantization("rtn", "nf4", "4 bits, the nearest of 16 quantiles of a normal distribution"),
    "mxfp4": Quantization("rtn", "mxfp4", "4-bit floats with a power of two per 32, as gpt-oss has them"),
    "mxfp4a8": Quantization("rtn", "mxfp4a8", "mxfp4, for products with 8-bit floats per 32 (MXFP8) on GPUs of sm_100"),
    "fp8": Quantization("rtn", "e4m3", "8-bit floats (e4m3), a scale per output channel"),
    "awq4": Quantization("awq", "q4", "4 bits, scaled by how large activations are (AWQ)", calibrated=True),
    "gptq4": Quantization("gptq", "q4", "4 bits, each error made up for by later weights (GPTQ)", calibrated=True),
    "awqgptq4": Quantization(
        "awq+gptq",
        "q4",
        "4 bits, scaled as by awq4, then rounded as by gptq4, and each code chosen again",
        calibrated=True,
    ),
    "int8": Quantization(
        "smooth",
        "i8",
        "8 bits per output channel, for products with int8 activations (SmoothQuant); of --task embed and rerank on "
        "CPUs 7 bits per group",
        calibrated=True,
        encoding="i7",
    ),
    "auto": Quantization("auto", "q4", "the bits that pay, by weight, within --size or --bits", calibrated=True),
}
HEAD_FORMATS: dict[str, str | None] = {"none": None, "int8": "q8", "4bit": "q4"}  # None: left as stored
_HEADS = {"none": "as in the checkpoint", "int8": "8 bits", "4bit": "4 bits, rounded to the nearest value"}


def explained() -> dict[str, str]:
    """The values of --quant and what they mean."""
    texts = {name: "as in the checkpoint" if found is None else found.summary for name, found in QUANTIZATIONS.items()}
    read = {name for name, found in QUANTIZATIONS.items() if found is not None and found.calibrated}
    return {name: f"{text}; reads calibration text" if name in read else text for name, text in texts.items()}


def heads_explained() -> dict[str, str]:
    """The values of --quant-head and what they mean."""
    return {name: _HEADS[name] for name in HEAD_FORMATS}
