"""Prompts for `icc bench --spec`: held-out Python to continue, and held-out Python to rewrite with an edit.

    python benchmarks/spec_prompts.py heldout > heldout.json
    python benchmarks/spec_prompts.py edit > edit.json

A prompt of `edit` is an excerpt of a held-out module, followed by the first lines of a copy in which a name is changed.
The model has to continue the copy: an editor's task, in a form for models that are not instruction-tuned.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from pathlib import Path

HELDOUT = Path(__file__).parent.parent / "samples" / "pystd" / "heldout"
LINES, COPIED = 24, 8  # lines of an excerpt, and of its copy in the prompt
NAME = re.compile(r"\b[a-z_][a-z_0-9]{4,}\b")


def heldout(text: str) -> list[str]:
    """Two excerpts of LINES lines, which begin at a third and at two thirds of the file."""
    lines = text.splitlines(keepends=True)
    return ["".join(lines[start : start + LINES]) for start in (len(lines) // 3, 2 * len(lines) // 3)]


def edit(text: str) -> list[str]:
    """Each excerpt, followed by the beginning of its copy in which the most common name is changed."""
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
