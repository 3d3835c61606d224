"""Renders templates of `codegen_templates/`; no other module uses jinja2.

A template gets one frozen dataclass as `p` and, if `p` is the kernel of a step, the step as `s`.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import jinja2

from .errors import CodegenError

TEMPLATES = Path(__file__).resolve().parents[2] / "codegen_templates"
_folders = [TEMPLATES]


def add_templates(folder: Path) -> None:
    """Also look for templates in a folder of another package, for its layouts and kernels."""
    if folder not in _folders:
        _folders.append(folder)
        _environment.cache_clear()


@lru_cache(maxsize=1)
def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(_folders),
        undefined=jinja2.StrictUndefined,
        autoescape=False,
        keep_trailing_newline=True,
        trim_blocks=False,
    )


def render(template: str, params: object, step: object = None) -> str:
    """The text of `template` (a path under codegen_templates/); an unknown field is an error."""
    return _environment().get_template(template).render(p=params, s=step)


def read_header(path: str) -> str:
    """The text of a header from icc's own folder or one that `add_templates` added. CodegenError if no folder has
    it."""
    for folder in _folders:
        if (folder / path).is_file():
            return (folder / path).read_text()
    raise CodegenError(f"there is no header {path} in {', '.join(map(str, _folders))}", "add_templates adds a folder")
