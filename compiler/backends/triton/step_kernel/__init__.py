"""Several launches of a decode step as one persistent kernel: which program computes which tile, and what waits for
what."""
