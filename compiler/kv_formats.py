"""The formats in which a KV cache can store numbers, by name, with their reference. Formats of weights are
StorageFormats.

A format has one entry here, and one in the table of each back end that has kernels for it (`CPU_CACHES`,
`TRITON_CACHES`). Another package adds its own with `register_kv_format`, or an entry point of `icc.kv_formats`. This
module imports torch only when numbers are encoded or decoded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from ..runtime import extensions
from ..runtime.format.kv import KVLayer
from ..runtime.format.kv_numbers import KV_NUMBERS, KVNumbers
from .errors import ExtensionError, UsageError

if TYPE_CHECKING:
    from torch import Tensor

GROUP = "icc.kv_formats"  # entry points of other packages: a KVFormat by its name
AUTO = "auto"


@dataclass(frozen=True)
class KVFormat(ABC):
    """How keys and values are stored. `numbers` has the sizes, and the name that programs use.

    said: its memory and loss, for `--help`. options: its names on the command line; its own name if there are none.
    tolerance: how far canaries of correct kernels may be off because of it. narrower: the format that --kv-bits tries
    after it, "" for none. mixed: before they are rounded, vectors go through a Walsh-Hadamard transform, on 64 elements
    at a time, and on powers of two for the rest (QuaRot, Ashkboos et al. 2024).
    """

    numbers: KVNumbers
    said: str
    tolerance: float
    options: tuple[str, ...] = ()
    narrower: str = ""
    mixed: bool = False

    @property
    def name(self) -> str:
        """The format's name, which KVGroup.dtype holds."""
        return self.numbers.name

    def shares(self, value_dim: int) -> bool:
        """Whether values that are the first `value_dim` elements of keys need not be stored again."""
        from .ops.kept import MIXED_BLOCK

        return not self.mixed or value_dim % MIXED_BLOCK == 0

    def layer(self, layer: KVLayer) -> KVLayer:
        """The layer's cache in this format: if values cannot be the beginning of keys, they are stored separately."""
        return msgspec.structs.replace(layer, shared=layer.shared and self.shares(layer.value_dim))

    @abstractmethod
    def encode(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """The elements of vectors float32 [..., dim] as memory holds them, and the scales beside each vector.

        Elements: [..., dim], or if packed bytes [..., dim / elements per byte, rounded up]. Beside them: float32 scales
        [..., 1], for packed elements float16 scales and centres [..., 2], or None if numbers are not scaled.
        """

    @abstractmethod
    def decode(self, codes: Tensor, beside: Tensor | None, dim: int) -> Tensor:
        """The vectors float32 [..., dim] that kernels read from `encode`'s results. beside: None if the format has no
        scales."""

    def kept(self, x: Tensor) -> Tensor:
        """Vectors [..., dim] of any float type after `encode` and `decode`, float32."""
        return self.decode(*self.encode(x.float()), x.shape[-1])


class FloatCache(KVFormat):
    """Floats without codes."""

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        from .ops.kept import FLOATS

        return x.to(FLOATS[self.name]), None

    def decode(self, codes: Tensor, beside: Tensor | None, dim: int) -> Tensor:
        return codes.float()


class Int8Cache(KVFormat):
    """int8 codes with a scale."""

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        from .ops.kept import int8_codes

        return int8_codes(x)

    def decode(self, codes: Tensor, beside: Tensor | None, dim: int) -> Tensor:
        assert beside is not None
        return codes.float() * beside


class Float8Cache(KVFormat):
    """Bytes of e4m3 with a scale. Kernels read an 8-bit float as 2^-8 of its value, and the scale compensates for
    it."""

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        from .ops.kept import e4m3_codes

        return e4m3_codes(x)

    def decode(self, codes: Tensor, beside: Tensor | None, dim: int) -> Tensor:
        from .ops.kept import e4m3_values

        assert beside is not None
        return e4m3_values(codes, beside)


class MixedCache(KVFormat):
    """Codes of a mixed vector relative to its centre, several to a byte, with a step and a centre per vector."""

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        from .ops.kept import mixed_codes

        return mixed_codes(x, self.numbers.bits)

    def decode(self, codes: Tensor, beside: Tensor | None, dim: int) -> Tensor:
        from .ops.kept import mixed_values

        assert beside is not None
        return mixed_values(codes, beside, self.numbers.bits, dim)


# Tolerances: in 27 tiny random models, whose attention is sharper than that of trained ones, correct caches were off by
# at most 0.009 (i8), 0.13 (f8), 0.31 (i4) and 0.81 (i2, where the check only tells nonsense from rounding: 1.4 is
# chance).
_KNOWN = (
    FloatCache(KV_NUMBERS["f32"], "4 bytes each", 0.0, narrower="f16"),
    FloatCache(KV_NUMBERS["bf16"], "2 bytes, rounded to 8 bits of precision", 0.02, narrower="i8"),
    FloatCache(KV_NUMBERS["f16"], "2 bytes, rounded to 11 bits of precision", 0.0, ("f16", "fp16"), narrower="i8"),
    Int8Cache(
        KV_NUMBERS["i8"], "1 byte, with scales: about half the memory of bf16", 0.05, ("int8",), narrower="i4"
    ),
    Float8Cache(KV_NUMBERS["f8"], "1 byte, 8-bit floats (e4m3) with scales", 0.2, ("fp8",), narrower="i4"),
    MixedCache(
        KV_NUMBERS["i4"], "half a byte, after mixing: a little over a quarter of bf16", 0.4, ("int4",),
        narrower="i2", mixed=True,
    ),
    MixedCache(
        KV_NUMBERS["i2"], "a quarter of a byte; for trying out: most models lose too much", 0.9, ("int2",), mixed=True
    ),
)  # fmt: skip
_FORMATS: dict[str, KVFormat] = {form.name: form for form in _KNOWN}


def register_kv_format(form: KVFormat) -> None:
    """Add a format; ValueError if another format has its name, or its sizes do not allow a memory layout."""
    if form.numbers.problem():
        raise ValueError(f"{form.name}: {form.numbers.problem()}")
    if _FORMATS.setdefault(form.name, form) is not form:
        raise ValueError(f"there is a KV format {form.name!r} already")


def find_kv_format(name: str) -> KVFormat:
    """The format that programs call `name`; UsageError if there is none, ExtensionError if it cannot be loaded."""
    if name not in _FORMATS:
        form = extensions.load(GROUP, name)
        if form is None:
            known = ", ".join(sorted({*_FORMATS, *extensions.names(GROUP)}))
            raise UsageError(f"unknown KV format {name!r}", f"known: {known}")
        if not isinstance(form, KVFormat) or form.name != name:
            raise ExtensionError(f"{GROUP} {name!r} is not a KVFormat of that name")
        if problem := form.numbers.problem():
            raise ExtensionError(f"{GROUP} {name!r}: {problem}")
        register_kv_format(form)
    return _FORMATS[name]


def narrowing(name: str) -> Iterator[KVFormat]:
    """A format and the ones that --kv-bits tries as alternatives, each narrower than the one before."""
    while name:
        form = find_kv_format(name)
        yield form
        name = form.narrower


def cache_options() -> dict[str, str]:
    """The values of --kv-cache, each with its help text. Formats of other packages are listed but not loaded."""
    said = {AUTO: "the target's default: 2 bytes each, for f32 weights on a CPU 4"}
    for form in _FORMATS.values():
        own, *others = form.options or (form.name,)
        said |= {own: form.said} | {other: f"the same as {own}" for other in others}
    return said | {name: "of another package" for name in extensions.names(GROUP) if name not in said}


def read_cache_option(text: str) -> str:
    """The name of the format that --kv-cache asks for; "" for "auto". UsageError if there is none of that name."""
    if text == AUTO:
        return ""
    for form in _FORMATS.values():
        if text in (form.options or (form.name,)):
            return form.name
    if text not in cache_options():
        raise UsageError(f"--kv-cache {text!r} is unknown", f"choose from: {', '.join(cache_options())}")
    return find_kv_format(text).name
