"""Environments of packages from PyPI that are tried beside icc, each of its own under build/."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def environment(name: str, packages: list[str], group: str) -> Path:
    """The Python of an environment with these packages, which is made if it is not there: with `uv` where that is
    installed, or else with venv and pip. group: the folder of build/ that it is in; $CLIENT_ENVIRONMENTS: another."""
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
