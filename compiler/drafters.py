"""The drafters that `--spec` may name at compile time, as far as options must know them."""

from __future__ import annotations

FROM_FILES = ("eagle", "assistant", "dflash", "medusa")  # drafters with weights of their own, in a directory
LAYERS = ("mtp", "eagle", "assistant", "dflash")  # drafters that are a layer over tokens and hidden states
EXPLAINED = {
    "none": "no speculation",
    "mtp": "the checkpoint's layer that predicts further tokens",
    "eagle:DIR": "the EAGLE-3 drafter in this directory",
    "assistant:DIR": "the assistant in this directory, which reads the model's keys and values",
    "dflash:DIR": "the DFlash drafter in this directory, which guesses a block at once",
    "medusa:DIR": "the heads in this directory, see icc train-heads",
    "layer-skip:LAYERS": "the model's first layers",
    "ngram": "what followed the same tokens before",
    "suffix": "what most often followed them, in past answers too",
    "lookahead[:W,N,G]": "n-grams that the model finds meanwhile",
}
