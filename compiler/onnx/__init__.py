"""A graph as an ONNX file: standard ops, 4 and 8-bit products as MatMulNBits. Reading ONNX files is the frontend's."""
