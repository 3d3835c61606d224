"""Watermark: how answers are marked so that whoever has the key can tell them, and how that is written."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from ..errors import RequestError

Method = Literal["kgw", "gumbel"]
# inclusive bounds of the numbers
BOUNDS: dict[str, tuple[float, float]] = {"key": (1, 2**63 - 1), "ratio": (0.01, 0.99), "bias": (0.0, 20.0)}
WIDTHS: dict[Method, int] = {"kgw": 1, "gumbel": 4}  # tokens before a token that its mark hangs on
FORM = "[METHOD:]KEY[,bias=B][,ratio=R]"


@dataclass(frozen=True, slots=True)
class Watermark:
    """How tokens are marked. key: a number that is kept secret: with it texts are marked and told.

    method "kgw" (Kirchenbauer et al. 2023, arXiv:2301.10226): the token before picks a share `ratio` of the vocabulary,
    whose logits get `bias` more; as transformers' WatermarkLogitsProcessor does with seeding_scheme="lefthash" and key
    for hashing_key. "gumbel" (Aaronson 2022; Kuditipudi et al. 2023, arXiv:2307.15593): the four tokens before give
    every token a number, and the one of the largest number ** (1 / probability) is taken: over keys, the tokens have
    the model's distribution. Greedy answers get no mark of it. RequestError for numbers out of BOUNDS.
    """

    key: int
    method: Method = "kgw"
    ratio: float = 0.25
    bias: float = 2.0

    def __post_init__(self) -> None:
        if self.method not in get_args(Method):
            raise _wrong(f"method {self.method!r}: must be one of {', '.join(get_args(Method))}")
        for name, (low, high) in BOUNDS.items():
            value = getattr(self, name)
            number = isinstance(value, int) if name == "key" else isinstance(value, int | float)
            if not number or isinstance(value, bool) or not low <= value <= high:
                raise _wrong(f"{name} = {str(value)[:40]}: must be {_kind(name)} from {low:g} to {high:g}")

    @property
    def width(self) -> int:
        """How many tokens before a token its mark hangs on."""
        return WIDTHS[self.method]


def watermark(text: str) -> Watermark:
    """A watermark as options of the command line have it: 15485863, kgw:15485863,bias=2,ratio=0.25, gumbel:@FILE, where
    FILE holds the key. ValueError says what is wrong."""
    marked, *options = text.split(",")
    method, colon, key = marked.rpartition(":")
    fields: dict[str, float] = {}
    for option in options:
        name, equals, value = option.partition("=")
        if name not in ("bias", "ratio") or not equals:
            raise ValueError(f"{option!r}: must be like {FORM}")
        fields[name] = _number(value, float, option)
    if key.startswith("@"):
        try:
            key = Path(key[1:]).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{key[1:]} cannot be read: {error}") from error
    try:
        return Watermark(_number(key, int, key), method if colon else "kgw", **fields)  # type: ignore[arg-type]
    except RequestError as error:
        raise ValueError(error.message.removeprefix("watermark: ")) from error


def _number(text: str, kind: type[int] | type[float], shown: str) -> int | float:
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"{shown[:40]!r} is no number: must be like {FORM}") from None


def _kind(name: str) -> str:
    return "an integer" if name == "key" else "a number"


def _wrong(said: str) -> RequestError:
    return RequestError(f"watermark: {said}", field="watermark")
