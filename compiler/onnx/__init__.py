"""Writes a graph as an ONNX file: standard ops, and MatMulNBits for 4-bit and 8-bit products. The frontend reads ONNX
files."""
