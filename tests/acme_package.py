"""The package of docs/extending.md, installed into a folder as pip would."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

PAGE = (Path(__file__).parents[1] / "docs" / "extending.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", PAGE, re.DOTALL)


def install(folder: Path, groups: dict[str, dict[str, str]]) -> None:
    """Write what pip installs of a package: its modules, and a .dist-info with its entry points."""
    info = folder / "acme-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme\nVersion: 0.1\n")
    lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in points.items()) for group, points in groups.items()]
    (info / "entry_points.txt").write_text("\n".join(lines))


def write_acme(folder: Path) -> None:
    """Write the files of the page and the entry points to `folder`."""
    (folder / "acme").mkdir()
    (folder / "acme" / "__init__.py").touch()
    for kind, text in BLOCKS:
        name, _, body = text.removeprefix("# ").partition("\n")
        if kind in ("python", "text"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(body)
        elif kind == "toml":
            install(folder, tomllib.loads(body)["project"]["entry-points"])
