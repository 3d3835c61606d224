"""Virtual environments for packages from PyPI that are tested with icc, each in its own folder under build/."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def environment(name: str, packages: list[str], group: str) -> Path:
    """The Python of an environment with these packages, which is created if it is missing: with `uv` if that is
    installed, else with venv and pip. group: its folder in build/, unless $CLIENT_ENVIRONMENTS names another."""
    folder = Path(os.environ.get("CLIENT_ENVIRONMENTS", ROOT / "build" / group)) / name
    python = folder / "bin" / "python"
    if not python.exists():
        if uv := shutil.which("uv"):
            subprocess.run([uv, "venv", "-q", "--python", sys.executable, folder], check=True)
            install = [uv, "pip", "install", "-q", "--python", python]
        else:
            subprocess.run([sys.executable, "-m", "venv", folder], check=True)
            install = [python, "-m", "pip", "install", "-q"]
        subprocess.run([*install, *packages], check=True)
    return python
