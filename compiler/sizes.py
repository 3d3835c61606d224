"""`--size` and `--bits`: how many bytes the weights may take."""

from __future__ import annotations

import re

from .errors import UsageError

_UNITS = {"": 1, "B": 1, "kB": 10**3, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_MOST = 2**63  # bytes


def read_size(text: str) -> int:
    """The bytes of a size such as 92MB or 1.5GiB; ValueError if it is not a size."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if found is None or found[2] not in _UNITS:
        raise ValueError(f"{text!r} is not a size, such as 92MB (10^6 bytes) or 1.5GiB")
    size = float(found[1]) * _UNITS[found[2]]
    if size < 1:
        raise ValueError(f"{text!r} is no bytes at all")
    if size >= _MOST:  # also for so many digits that the float is infinite
        raise ValueError(f"{text[:20]!r} is more than any memory has")
    return int(size)


def check_auto(quant: str, size: int | None, bits: float | None) -> None:
    """Raise UsageError if --size and --bits do not fit --quant or each other; None: not given."""
    if quant != "auto":
        for name, value in (("--size", size), ("--bits", bits)):
            if value is not None:
                raise UsageError(f"{name} is for --quant auto", f"add --quant auto, or leave {name} out")
        return
    if size is not None and bits is not None:
        raise UsageError("--size and --bits say the same thing in two ways", "give one of them")
    if bits is not None and not 0 < bits <= 64:
        raise UsageError(f"--bits must be above 0 and at most 64, not {bits:g}")
