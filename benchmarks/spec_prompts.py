"""Prompts for `icc bench --spec`: held-out Python to go on with, and held-out Python to write again with an edit.

    python benchmarks/spec_prompts.py heldout > heldout.json
    python benchmarks/spec_prompts.py edit > edit.json

A prompt of `edit` is a piece of a held-out module, the same piece with a name changed as far as its first lines, and
the model has to go on: what an editor asks of a model, in a form that a model without instruction follows.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from pathlib import Path

HELDOUT = Path(__file__).parent.parent / "samples" / "pystd" / "heldout"
LINES, COPIED = 24, 8  # lines of a piece, and of its copy those that are given
NAME = re.compile(r"\b[a-z_][a-z_0-9]{4,}\b")


def heldout(text: str) -> list[str]:
    """Pieces of about a screen, from a third and two thirds of the file."""
    lines = text.splitlines(keepends=True)
    return ["".join(lines[start : start + LINES]) for start in (len(lines) // 3, 2 * len(lines) // 3)]


def edit(text: str) -> list[str]:
    """Each piece, and the beginning of its copy in which the commonest name has another."""
    prompts = []
    for piece in heldout(text):
        names = Counter(NAME.findall(piece)).most_common(1)
        lines = piece.splitlines(keepends=True)
        old = names[0][0] if names else "self"
        copy = "".join(lines[:COPIED]).replace(old, f"new_{old}")
        prompts.append(f"{piece}\n{copy}")
    return prompts


def main() -> None:
    """Parse the command line and print the prompts as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("heldout", "edit"))
    parser.add_argument("--text", type=Path, default=HELDOUT, help="a directory of *.txt files")
    chosen = parser.parse_args()
    make = {"heldout": heldout, "edit": edit}[chosen.kind]
    texts = [file.read_text(encoding="utf-8") for file in sorted(chosen.text.glob("*.txt"))]
    print(json.dumps([prompt for text in texts for prompt in make(text)], indent=0))


if __name__ == "__main__":
    main()
