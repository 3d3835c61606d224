"""Watermark: how answers are marked, so that the owner of the key can detect them; and its notation as an option."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from ..errors import RequestError, bounds
from .gumbel import two_keys

Method = Literal["kgw", "gumbel", "dual_key_gumbel", "synthid"]
# inclusive bounds of the fields
BOUNDS: dict[str, tuple[float, float]] = {
    "key": (1, 2**64 - 1),
    "ratio": (0.01, 0.99),
    "bias": (0.0, 20.0),
    "alpha": (0.0, 1.0),
}
MOST_KEYS = 64  # keys of "synthid"; other methods have one
OPTIONS: dict[Method, tuple[str, ...]] = {
    "kgw": ("bias", "ratio"),
    "gumbel": (),
    "dual_key_gumbel": ("alpha",),
    "synthid": (),
}
# Placeholders for the tokens before an answer's first token, for methods that ignore the prompt: as many as a token's
# mark depends on. They equal those of vLLM and transformers.
_STARTS: dict[Method, tuple[int, ...]] = {
    "kgw": (),
    "gumbel": (-1,) * 4,
    "dual_key_gumbel": (-1,) * 4,
    "synthid": (0,) * 4,
}
FORM = "[METHOD:]KEY[+KEY..][,bias=B][,ratio=R][,alpha=A]"


@dataclass(frozen=True, slots=True)
class Watermark:
    """How tokens are marked. key: a secret number with which texts are marked and detected; for "synthid" one or
    several.

    method "kgw" (Kirchenbauer et al. 2023, arXiv:2301.10226): the previous token selects a share `ratio` of the
    vocabulary, to whose logits `bias` is added; as transformers' WatermarkLogitsProcessor does with
    seeding_scheme="lefthash" and key as hashing_key.

    "gumbel" (Aaronson 2022; Kuditipudi et al. 2023, arXiv:2307.15593): the answer's four previous tokens give every
    token a number, and the token with the largest number ** (1 / probability) is taken; averaged over keys, tokens have
    the model's distribution. Greedy answers are not marked. "dual_key_gumbel": the same with one of two keys that are
    derived from this one, for each token the second with probability `alpha`. Both as vLLM's algorithms of these names,
    with its PRF and context width.

    "synthid" (Dathathri et al. 2024, doi:10.1038/s41586-024-08025-4): each key gives every token a bit that depends on
    the answer's four previous tokens, and a tournament per key makes tokens with the bit likelier; as transformers'
    SynthIDTextWatermarkLogitsProcessor with ngram_len=5 and key as its keys.

    RequestError for numbers outside BOUNDS.
    """

    key: int | tuple[int, ...]
    method: Method = "kgw"
    ratio: float = 0.25
    bias: float = 2.0
    alpha: float = 0.1

    def __post_init__(self) -> None:
        if self.method not in get_args(Method):
            raise _wrong(f"method {self.method!r}: must be one of {', '.join(get_args(Method))}")
        if self.method != "synthid" and not isinstance(self.key, int):
            raise _wrong(f"key: {self.method} takes one, not several")
        if not 1 <= len(self.keys) <= MOST_KEYS:
            raise _wrong(f"{len(self.keys)} keys: must be 1 to {MOST_KEYS}")
        for name in BOUNDS:
            for value in self.keys if name == "key" else [getattr(self, name)]:
                _check(name, value)

    @property
    def keys(self) -> tuple[int, ...]:
        """All keys."""
        return self.key if isinstance(self.key, tuple) else (self.key,)

    @property
    def shares(self) -> Sequence[tuple[int, float]]:
        """The one or two keys of Gumbel-max, each with the probability that it marks a token."""
        [key] = self.keys
        if self.method == "gumbel":
            return [(key, 1.0)]
        return list(zip(two_keys(key), (1 - self.alpha, self.alpha), strict=True))

    @property
    def width(self) -> int:
        """How many previous tokens a token's mark depends on."""
        return len(self.start) or 1

    @property
    def start(self) -> tuple[int, ...]:
        """The placeholders `[width]` for the tokens before an answer's first; empty if the prompt's tokens are used."""
        return _STARTS[self.method]


def watermark(text: str) -> Watermark:
    """Parse a watermark option: 15485863, kgw:15485863,bias=2,ratio=0.25, gumbel:@FILE, where FILE contains the key,
    synthid:654+400+836. ValueError says what is wrong."""
    marked, *options = text.split(",")
    method, colon, key = marked.rpartition(":")
    fields: dict[str, float] = {}
    for option in options:
        name, equals, value = option.partition("=")
        if name not in BOUNDS or name == "key" or not equals:
            raise ValueError(f"{option!r}: must be like {FORM}")
        fields[name] = _number(value, float, option[:40])
    if method in OPTIONS and (unknown := fields.keys() - OPTIONS[method]):
        raise ValueError(f"{unknown.pop()}: {method} has no such option")
    shown = key if key.startswith("@") else key[:40]
    if key.startswith("@"):
        try:
            key = "+".join(Path(key[1:]).read_text(encoding="utf-8").replace(",", " ").split())
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{key[1:]} cannot be read: {error}") from error
    try:
        keys = tuple(_number(one, int, shown) for one in key.split("+"))  # the content of a file is secret
        return Watermark(one_or_all(keys), method if colon else "kgw", **fields)  # type: ignore[arg-type]
    except RequestError as error:
        raise ValueError(error.message.removeprefix("watermark: ")) from error


def one_or_all(keys: int | Sequence[int]) -> int | tuple[int, ...]:
    """Keys in the form of Watermark.key: a number if there is one."""
    if isinstance(keys, int):
        return keys
    return keys[0] if len(keys) == 1 else tuple(keys)


def _number(text: str, kind: type[int] | type[float], shown: str) -> int | float:
    try:
        return kind(text)
    except ValueError:
        raise ValueError(f"{shown!r} is no number: must be like {FORM}") from None


def _check(name: str, value: object) -> None:
    low, high = BOUNDS[name]
    number = isinstance(value, int if name == "key" else int | float) and not isinstance(value, bool)
    if not number or not low <= value <= high:  # type: ignore[operator]
        kind = "an integer" if name == "key" else "a number"
        raise _wrong(f"{name} = {str(value)[:40]}: must be {kind} from {bounds(low, high)}")


def _wrong(said: str) -> RequestError:
    return RequestError(f"watermark: {said}", field="watermark")
