"""Prices of tokens, from a file, for usage and metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec

from ...errors import UsageError

_Price = Annotated[float, msgspec.Meta(ge=0)]


class Prices(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Prices of `per` tokens: of a prompt, of a prompt's tokens found in the prefix cache, and of an answer."""

    input: _Price
    output: _Price
    cached_input: _Price = 0.0
    per: Annotated[int, msgspec.Meta(gt=0)] = 1_000_000
    currency: str = "USD"

    def cost(self, prompt: int, cached: int, answer: int) -> float:
        """The cost of a request, in `currency`. prompt, cached, answer: tokens; the cached ones are part of the
        prompt's."""
        return ((prompt - cached) * self.input + cached * self.cached_input + answer * self.output) / self.per

    def saved(self, cached: int) -> float:
        """How much more a request would have cost without the prefix cache, in `currency`. cached: tokens."""
        return cached * (self.input - self.cached_input) / self.per


def read_prices(path: Path) -> Prices:
    """Read prices from a JSON file such as {"input": 3, "cached_input": 0.3, "output": 15}. UsageError if it is
    wrong."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Prices)
    except OSError as error:
        raise UsageError(f"--prices {path}: cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UsageError(
            f"--prices {path}: {error}", 'such as {"input": 3, "cached_input": 0.3, "output": 15}, per million tokens'
        ) from error
    if found.cached_input > found.input:
        raise UsageError(f"--prices {path}: cached_input costs more than input", "are the two swapped?")
    return found
