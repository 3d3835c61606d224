"""Quantization of linear layers: round to nearest, AWQ and GPTQ. What changes is how a weight is stored, not the graph."""
