"""Quantization of linear layers: round to nearest, AWQ, GPTQ. It changes the storage of weights, not the graph."""
