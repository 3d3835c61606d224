"""The check of types fails if pyright would succeed only because it analyzed no files."""

from __future__ import annotations

from pathlib import Path

import lint_types
import pytest

PROJECT = '[tool.pyright]\ninclude = ["{include}"]\nstrict = ["{strict}"]\n'


@pytest.mark.parametrize(
    ("include", "strict", "text", "said"),
    [
        ("code", "code", "number: int = 1\n", "pyright: 1 files, 0 faults"),
        ("code", "code", "number: int = 'one'\n", "code/one.py:1:15: error: "),
        ("code", "none", "number: int = 1\n", "strict: there is no none"),
        ("gone", "code", "number: int = 1\n", "include: there is no gone"),
        (".code", "code", "number: int = 1\n", "pyright has analyzed 0 of 1 files"),
    ],
)
def test_what_is_said(
    include: str, strict: str, text: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "pyproject.toml").write_text(PROJECT.format(include=include, strict=strict))
    for folder in ("code", ".code"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "one.py").write_text(text)
    assert lint_types.main(tmp_path) == ("0 faults" not in said)
    assert said in capsys.readouterr().out
