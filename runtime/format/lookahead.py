"""The parameters of lookahead decoding, as in `--spec lookahead:W,N,G` and program.json."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import UsageError
from .speculation import MAX_GUESSES

LOOKAHEAD = "lookahead"


@dataclass(frozen=True, slots=True)
class Lookahead:
    """The window's columns (W, at least 2), the tokens of an n-gram (N, at least 2) and the most n-grams that a step
    verifies (G, at least 1). UsageError for smaller numbers, or if a step cannot run so many guesses."""

    window: int = 7
    ngram: int = 5
    guesses: int = 7

    def __post_init__(self) -> None:
        asked = f"--spec lookahead:{self.window},{self.ngram},{self.guesses}"
        if min(self.window, self.ngram) < 2 or self.guesses < 1:
            raise UsageError(f"{asked}: the window and the n-grams are at least 2, the guesses at least 1")
        if self.size > MAX_GUESSES:
            hint = "give smaller numbers, such as 7,5,7"
            raise UsageError(f"{asked}: {self.size} tokens in a step, at most {MAX_GUESSES} can be verified", hint)

    @property
    def size(self) -> int:
        """How many guesses a step runs, in the window and in n-grams."""
        return (self.window + self.guesses) * (self.ngram - 1) - 1

    @classmethod
    def parse(cls, text: str) -> Lookahead:
        """Parse `W,N,G`; "" means 7,5,7. UsageError for anything else."""
        parts = text.split(",") if text else []
        if parts and not (len(parts) == 3 and all(part.isascii() and part.isdigit() for part in parts)):
            raise UsageError(f"--spec lookahead:{text}: not W,N,G", "give three numbers, such as lookahead:7,5,7")
        return cls(*map(int, parts))
