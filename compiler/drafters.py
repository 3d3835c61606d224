"""What `--spec` may name at compile time, as far as options must know it."""

from __future__ import annotations

FROM_FILES = ("eagle", "assistant", "dflash", "medusa")  # drafters with weights of their own, in a directory
LAYERS = ("mtp", "eagle", "assistant", "dflash")  # those that are a layer over tokens and hidden states
