"""ONNX files as sources of models: read, checked, and run node by node with torch while the frontend traces them."""
