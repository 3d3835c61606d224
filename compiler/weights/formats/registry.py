"""The storage formats by name. Other packages add formats with `register_format` or an entry point."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from ....runtime import extensions
from ...errors import UsageError
from .affine import GroupAffine
from .base import StorageFormat
from .blocks import ScaleType, grouped, ternary, with_offsets
from .channel import ChannelInt8
from .dense import BF16, F16, F32, I32
from .float8 import Float8
from .ggml import GGML_FORMATS
from .mixed import find_mixed
from .reduced import ReducedInt8
from .tables import MXFP4A8_FORMAT, fp4, nf4, nvfp4

GROUP = "icc.formats"  # group of entry points: a FormatMaker under its format's name
DEFAULT_GROUP = 128
FormatMaker = Callable[[int], StorageFormat]


def _families(
    name: str, widths: Sequence[int], scales: Sequence[ScaleType], make: Callable[[int, int, ScaleType], StorageFormat]
) -> dict[str, FormatMaker]:
    """Makers of formats by name, for all combinations of bits and scale types, with groups of any size."""

    def maker(bits: int, scale: ScaleType) -> FormatMaker:
        return lambda group: make(bits, group, scale)

    return {
        f"{name}{bits}{'' if scale == 'f16' else '_' + scale}": maker(bits, scale)
        for bits in widths
        for scale in scales
    }


_FORMATS: dict[str, FormatMaker] = {
    "f32": lambda group: F32,
    "bf16": lambda group: BF16,
    "f16": lambda group: F16,
    "i32": lambda group: I32,
    "q4": lambda group: GroupAffine(group, 4),
    "q8": lambda group: GroupAffine(group, 8),
    "q4a8": lambda group: GroupAffine(group, 4, rows8=True),
    "i8": lambda group: ChannelInt8(group, 8),
    "i7": lambda group: ReducedInt8(group, 8),
    **_families("zq", (4, 8), ("f16", "bf16", "f32"), grouped),
    **_families("oq", (2, 3, 4, 5, 6, 8), ("f16", "bf16"), with_offsets),
    "t2_f32": ternary,
    "nf4": nf4,
    "nf4_f32": lambda group: nf4(group, "f32"),
    "fp4_f32": fp4,
    "nvfp4_x": nvfp4,
    "mxfp4a8": lambda group: MXFP4A8_FORMAT,
    "e4m3": lambda group: Float8(),
    "e4m3_k": Float8,
    "e4m3w": lambda group: Float8(alone=True),
    "e4m3w_k": lambda group: Float8(group, alone=True),
    **{name: (lambda group, form=form: form) for name, form in GGML_FORMATS.items()},
}


def register_format(name: str, make: FormatMaker) -> None:
    """Add a format: `make(group)` returns it for groups of that many values; a format with fixed blocks ignores the
    argument. ValueError if another format has the name."""
    known = _FORMATS.setdefault(name, make)
    if known is not make:
        raise ValueError(f"there is a storage format {name!r} already")


def find_format(name: str, group: int = DEFAULT_GROUP) -> StorageFormat:
    """A format by its name, such as q4 or, with the group as in graph texts, q4g32. group: values per group, if the
    name has none. UsageError for an unknown name."""
    if name in _FORMATS:
        return _FORMATS[name](group)
    found = re.fullmatch(r"(.+)g(\d+)", name)
    if found and found[1] in _FORMATS:
        return _FORMATS[found[1]](int(found[2]))
    if (own := find_mixed(name)) is not None:
        return own
    if (made := _extension(name, group)) is not None:
        return made
    known = sorted({*_FORMATS, *extensions.names(GROUP)})
    raise UsageError(f"unknown storage format {name!r}", f"known: {', '.join(known)}")


def _extension(name: str, group: int) -> StorageFormat | None:
    """A format of another package's entry point, which is registered for the rest of the process; None if there is
    none."""
    base = re.fullmatch(r"(.+)g\d+", name)
    for candidate in (name, base[1] if base else name):
        make = extensions.load(GROUP, candidate)
        if make is not None:
            register_format(candidate, make)
            return find_format(name, group)
    return None
