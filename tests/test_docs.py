"""What README and docs tell people to type is what the command line takes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from icc.compiler.cli import COMMANDS

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands(page: Path) -> Iterator[str]:
    """Every `icc ...`, `python ENGINE ...` of a page: indented lines, and code between backquotes."""
    text = page.read_text()
    for line in [
        *re.findall(r"^ {4}((?:icc|python ENGINE) .*)$", text, re.M),
        *re.findall(r"`(icc [a-z][^`\n]*)`", text),
    ]:
        yield re.split(r"\s{3,}|\s+#\s", line)[0]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_and_options_exist(page: Path) -> None:
    for line in commands(page):
        words = shlex.split(re.sub(r"[\[\]…]|(?<=[a-z])\|\S+", " ", line).replace("python ENGINE", "icc"))
        names = [name for name in (" ".join(words[1:3]), words[1]) if name in COMMANDS]
        assert names, f"{page.name}: {line}"
        known = {
            option for param in COMMANDS[names[0]].load().params for option in (*param.opts, *param.secondary_opts)
        }
        known |= {"--help", "--debug"}
        for word in words[2:]:
            assert not word.startswith("-") or word in {"-", *known}, f"{page.name}: {line}: {word}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_every_command_has_a_page() -> None:
    told = "".join(page.read_text() for page in PAGES)
    assert not [name for name in COMMANDS if f"icc {name}" not in told], "commands that no page tells of"
    assert all(isinstance(lazy.load(), click.Command) for lazy in COMMANDS.values())
