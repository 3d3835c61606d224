"""Prices: what tokens cost, from a file, for usage and metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec

from ...errors import UsageError

_Price = Annotated[float, msgspec.Meta(ge=0)]


class Prices(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What `per` tokens cost: of a prompt, of those of a prompt that the prefix cache had, and of an answer."""

    input: _Price
    output: _Price
    cached_input: _Price = 0.0
    per: Annotated[int, msgspec.Meta(gt=0)] = 1_000_000
    currency: str = "USD"

    def cost(self, prompt: int, cached: int, answer: int) -> float:
        """What a request costs whose prompt has so many tokens, of which so many were cached."""
        return ((prompt - cached) * self.input + cached * self.cached_input + answer * self.output) / self.per

    def saved(self, cached: int) -> float:
        """What it would have cost more if nothing of the prompt had been cached."""
        return cached * (self.input - self.cached_input) / self.per


def read_prices(path: Path) -> Prices:
    """The prices of a JSON file, {"input": 3, "cached_input": 0.3, "output": 15}. UsageError says what is wrong."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Prices)
    except OSError as error:
        raise UsageError(f"--prices {path}: cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UsageError(
            f"--prices {path}: {error}", 'such as {"input": 3, "cached_input": 0.3, "output": 15}, per million tokens'
        ) from error
    if found.cached_input > found.input:
        raise UsageError(f"--prices {path}: cached_input costs more than input", "they stand the other way round?")
    return found
