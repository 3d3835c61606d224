"""Quantization of linear layers: round to nearest, AWQ, GPTQ. What changes is how weights are stored, not the graph."""
