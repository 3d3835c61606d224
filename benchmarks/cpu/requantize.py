"""Convert a GGUF file to another type by llama.cpp's own quantizer; run it with a Python that has llama-cpp-python.

    build/peers/bin/python benchmarks/cpu/requantize.py SmolLM2.Q4_1.gguf SmolLM2.Q4_K_M.gguf Q4_K_M

Quantized values are quantized again, so use the file only to measure speed, which does not depend on values.
"""

from __future__ import annotations

import argparse

import llama_cpp as lc

KINDS = {"F16": 1, "Q4_0": 2, "Q8_0": 7, "Q6_K": 18, "Q4_K_M": 15, "Q5_K_M": 17}  # llama_ftype of llama.h

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source")
    parser.add_argument("out")
    parser.add_argument("kind", choices=KINDS)
    a = parser.parse_args()
    options = lc.llama_model_quantize_default_params()
    options.ftype, options.allow_requantize, options.nthread = KINDS[a.kind], True, 2
    if lc.llama_model_quantize(a.source.encode(), a.out.encode(), options):
        raise SystemExit(f"llama.cpp cannot make {a.kind} of {a.source}")
