"""How guesses may be accepted, by the names that `--spec-accept` takes; without numpy, for commands that only parse."""

from __future__ import annotations

LOSSLESS, TYPICAL = "lossless", "typical"
