"""Write the text for benchmarks/frontier.py: 80 KB of English documentation that is installed with icc's tests.

    python benchmarks/frontier_text.py docs.txt

Half of it is Python's own documentation (pydoc_data.topics), half the long descriptions of installed packages, in
equal parts. Neither is in the calibration text, which is source code of the standard library.
"""

from __future__ import annotations

import sys
from importlib.metadata import distribution
from pathlib import Path
from pydoc_data.topics import topics

SIZE = 80_000
PACKAGES = ("fastapi", "msgspec", "numpy", "pytest", "tokenizers", "torch", "transformers", "uvicorn")


def documentation(size: int = SIZE) -> str:
    """`size` characters of documentation, equal on every machine with the same package versions."""
    python = sorted(topics, key=lambda name: (len(topics[name]), name))[len(topics) // 2 :: 3]
    manual = "\n\n".join(topics[name].strip() for name in python)
    each = size // 2 // len(PACKAGES)
    described = [str(distribution(name).metadata.get_payload()).strip() for name in PACKAGES]
    readmes = "\n\n".join(text[:each] for text in described)
    return (manual[: size - len(readmes)] + "\n\n" + readmes)[:size]


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(documentation(), encoding="utf-8")
