"""The values of --quant and --quant-head: each is a method and a storage format. The only list of them.

Another package adds its own with `register_quantization`, or an entry point of `icc.quantizations`.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..runtime import extensions
from .errors import ExtensionError, UsageError

GROUP = "icc.quantizations"  # entry points of other packages: a Quantization by its name
GROUPS = (128, 64, 32, 16)  # values per scale that kernels support
ROWS8 = "q4a8"  # the 4-bit format that may be multiplied with rows of 8 bits
METHODS = ("rtn", "awq", "gptq", "awq+gptq", "smooth")  # methods that can be used with a format of another package


@dataclass(frozen=True)
class Quantization:
    """How the weights of a compile are quantized.

    method: the pass that chooses the codes, "rtn" for quantize-rtn; "awq+gptq" for the scales of awq and the codes of
    gptq. format: the storage format, by its name for `find_format`. summary: the help text. encoding: the format in
    engines for CPUs that always compute many tokens at a time, "" for `format`. on_cpu: the format in all engines for
    CPUs, "" for `format`.
    """

    method: str
    format: str
    summary: str
    encoding: str = ""
    on_cpu: str = ""

    @property
    def calibrated(self) -> bool:
        """Whether the method reads calibration text to measure activations."""
        return self.method != "rtn"

    @property
    def grouped(self) -> bool:
        """Whether --group-size sets how many weights share a scale."""
        return self.format in ("q4", "q8", "nf4", ROWS8)

    def stored(self, cpu: bool, encodes: bool) -> str:
        """The format of an engine: for CPUs, or for others. encodes: see `encoding`."""
        return (encodes and self.encoding) or (cpu and self.on_cpu) or self.format


_ROWS8 = "{0}, and steps of many tokens multiply rows of 8 bits on NVIDIA GPUs; on CPUs the same as {0}"
QUANTIZATIONS: dict[str, Quantization | None] = {
    "none": None,
    "rtn4": Quantization("rtn", "q4", "4 bits, rounded to the nearest value"),
    "nf4": Quantization("rtn", "nf4", "4 bits, the nearest of 16 quantiles of a normal distribution"),
    "mxfp4": Quantization("rtn", "mxfp4", "4-bit floats with a power of two per 32, as gpt-oss has them"),
    "mxfp4a8": Quantization("rtn", "mxfp4a8", "mxfp4, for products with 8-bit floats per 32 (MXFP8) on GPUs of sm_100"),
    "fp8": Quantization("rtn", "e4m3", "8-bit floats (e4m3), a scale per output channel"),
    "awq4": Quantization("awq", "q4", "4 bits, scaled by how large activations are (AWQ)"),
    "gptq4": Quantization("gptq", "q4", "4 bits, each error made up for by later weights (GPTQ)"),
    "awqgptq4": Quantization(
        "awq+gptq",
        "q4",
        "4 bits, scaled as by awq4, then rounded as by gptq4, and each code chosen again",
    ),
    "rtn4a8": Quantization("rtn", ROWS8, _ROWS8.format("rtn4"), on_cpu="q4"),
    "awq4a8": Quantization("awq", ROWS8, _ROWS8.format("awq4"), on_cpu="q4"),
    "gptq4a8": Quantization("gptq", ROWS8, _ROWS8.format("gptq4"), on_cpu="q4"),
    "int8": Quantization(
        "smooth",
        "i8",
        "8 bits per output channel, for products with int8 activations (SmoothQuant); of --task embed and rerank on "
        "CPUs 7 bits per group",
        encoding="i7",
    ),
    "auto": Quantization("auto", "q4", "the bits that pay, by weight, within --size or --bits"),
}
SPARSE = ("2:4", "sparse", "sparsegpt", "wanda", "magnitude")  # names that users may try and that icc does not have
_NOT_SPARSE = (
    "icc has no sparse weights: 2:4 by SparseGPT raised perplexity by 23 % at 9 bits per weight, where 8 bits lose "
    "nothing and are multiplied as fast (docs/quantization.md)"
)
_HEAD_FORMATS: dict[str, str | None] = {"none": None, "int8": "q8", "4bit": "q4"}  # None: left as stored
_HEADS = {"none": "as in the checkpoint", "int8": "8 bits", "4bit": "4 bits, rounded to the nearest value"}
_OTHERS: dict[str, Quantization] = {}  # values of other packages


def register_quantization(name: str, found: Quantization) -> None:
    """Add a value of --quant, and of --quant-head for its format. ValueError if the name is taken, or the method is not
    one of METHODS."""
    if found.method not in METHODS:
        raise ValueError(f"the method {found.method!r} is none of {', '.join(METHODS)}")
    if name in QUANTIZATIONS or _OTHERS.setdefault(name, found) is not found:
        raise ValueError(f"there is a quantization {name!r} already")


def find_quantization(name: str) -> Quantization | None:
    """The Quantization of a value of --quant; None for "none". UsageError if it is unknown, ExtensionError if another
    package's entry of that name cannot be loaded or is not a Quantization."""
    if name in QUANTIZATIONS:
        return QUANTIZATIONS[name]
    if name not in _OTHERS:
        found = extensions.load(GROUP, name)
        if found is None:
            if name in SPARSE:
                raise UsageError(f"--quant {name}: {_NOT_SPARSE}", "use fp8 or int8, or gptq4 for fewer bytes")
            raise UsageError(f"--quant {name!r} is unknown", f"choose from: {', '.join(explained())}")
        if not isinstance(found, Quantization):
            raise ExtensionError(f"{GROUP} {name!r} is not a Quantization but {found!r}")
        try:
            register_quantization(name, found)
        except ValueError as error:
            raise ExtensionError(f"{GROUP} {name!r}: {error}") from error
    return _OTHERS[name]


def head_format(name: str) -> str | None:
    """The storage format of a value of --quant-head; None leaves the head as stored. UsageError if it is unknown."""
    if name in _HEAD_FORMATS:
        return _HEAD_FORMATS[name]
    if name not in _other_names():
        raise UsageError(f"--quant-head {name!r} is unknown", f"choose from: {', '.join(heads_explained())}")
    found = find_quantization(name)
    assert found is not None
    return found.format


def _other_names() -> list[str]:
    return sorted({*_OTHERS, *extensions.names(GROUP)})


def explained() -> dict[str, str]:
    """The values of --quant and their help texts. Values of other packages are listed but not loaded."""
    texts = {name: "as in the checkpoint" if found is None else found.summary for name, found in QUANTIZATIONS.items()}
    read = {name for name, found in QUANTIZATIONS.items() if found is not None and found.calibrated}
    texts |= {name: "of another package" for name in _other_names()}
    return {name: f"{text}; reads calibration text" if name in read else text for name, text in texts.items()}


def heads_explained() -> dict[str, str]:
    """The values of --quant-head and their help texts."""
    return _HEADS | {name: f"as --quant {name} stores weights" for name in _other_names()}
