"""Adds a tokenizer to a random checkpoint: a trained one, padded with words that no text contains.

    python benchmarks/serve/make_vocab.py build/cpu/llama-1b samples/pystd/tokenizer.json build/serve/llama-1b

Servers read and write text; a random model generates any of its tokens, so every token needs its own text. The weights
are linked, not copied.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def padded(tokenizer: dict, size: int) -> dict:
    """The byte-level BPE tokenizer extended to `size` tokens; no merge produces an added token."""
    vocab = tokenizer["model"]["vocab"]
    vocab |= {f"\u0120w{index}": index for index in range(len(vocab), size)}
    return tokenizer


def main() -> None:
    """Write the checkpoint with its tokenizer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("out", type=Path)
    a = parser.parse_args()
    a.out.mkdir(parents=True, exist_ok=True)
    config = json.loads((a.model / "config.json").read_text())
    tokenizer = padded(json.loads(a.tokenizer.read_text()), config["vocab_size"])
    (a.out / "tokenizer.json").write_text(json.dumps(tokenizer))
    (a.out / "config.json").write_text(json.dumps(config))
    weights = a.out / "model.safetensors"
    weights.unlink(missing_ok=True)
    weights.symlink_to((a.model / "model.safetensors").resolve())


if __name__ == "__main__":
    main()
