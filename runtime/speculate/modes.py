"""The names of `--spec-accept`: how guesses may be accepted. Imports no numpy, for commands that only parse."""

from __future__ import annotations

LOSSLESS, TYPICAL = "lossless", "typical"
