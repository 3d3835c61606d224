"""The storage formats of weights: one file per family."""
