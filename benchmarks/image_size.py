"""The size of the image of docs/kubernetes/Dockerfile beyond its base: the sum of its installed packages.

    python benchmarks/image_size.py

Follows the requirements of icc and its extra `serve` through the packages that are installed here, and counts the
files that the Dockerfile keeps: without compiled Python, tests and hf-xet. Prints a line per package above a megabyte,
and the sum. BASE is the unpacked size of python:3.11-slim, which is not measured here.
"""

from __future__ import annotations

import argparse
import json
import tomllib
from importlib.metadata import distribution
from pathlib import Path, PurePosixPath

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
LEFT_OUT = ("hf-xet",)  # the Dockerfile removes these, too
BASE = 130e6  # bytes: python:3.11-slim of Debian 12 and 13, as `docker images` lists it
MOST = 300e6


def is_kept(name: PurePosixPath) -> bool:
    """Whether a file of a package is in the image."""
    return name.suffix != ".pyc" and "tests" not in name.parts[:-1]


def sizes() -> dict[str, int]:
    """The bytes of every package that `icc-llm[serve]` needs, by name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    waiting = [Requirement(text) for text in [*project["dependencies"], *project["optional-dependencies"]["serve"]]]
    found: dict[str, int] = {}
    while waiting:
        wanted = waiting.pop()
        name = wanted.name.lower().replace("_", "-")
        if name in found or name in LEFT_OUT:
            continue
        package = distribution(name)
        files = [file for file in package.files or [] if is_kept(file)]
        found[name] = sum(Path(file.locate()).stat().st_size for file in files if Path(file.locate()).is_file())
        for text in package.requires or []:
            needed = Requirement(text)
            if any(needed.marker is None or needed.marker.evaluate({"extra": e}) for e in ("", *wanted.extras)):
                waiting.append(needed)
    own = [file for part in ("runtime", "compiler", "passes", "codegen_templates") for file in (ROOT / part).rglob("*")]
    found["icc-llm"] = sum(file.stat().st_size for file in own if file.is_file() and file.suffix != ".pyc")
    return found


def main() -> None:
    """Print the table and the sum."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    found = sizes()
    for name, size in sorted(found.items(), key=lambda one: -one[1]):
        if size > 1e6:
            print(f"{size / 1e6:8.1f} MB  {name}")
    total = sum(found.values())
    print(f"{total / 1e6:8.1f} MB  {len(found)} packages; with the base about {(total + BASE) / 1e6:.0f} MB")
    print(json.dumps({"packages_mb": round(total / 1e6, 1), "image_mb": round((total + BASE) / 1e6)}))


if __name__ == "__main__":
    main()
