"""The command line accepts the commands in README and docs."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from icc.compiler.cli import COMMANDS, main

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands(page: Path) -> Iterator[str]:
    """Every `icc ...` and `python ENGINE ...` of a page, in indented lines and in code between backquotes."""
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


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda page: page.name)
def test_no_sentence_begins_with_a_word_that_needs_the_one_before(page: Path) -> None:
    """The rule for docstrings (lint_docstrings.py) also holds for pages, except in code."""
    text = re.sub(r"```.*?```|`[^`]*`", "", page.read_text(), flags=re.S)
    assert not re.findall(r"(?:^|[.:;!?]\s+|\n\s*\n|\| |- |: {3})(?:Of|So|Those)\b.{0,40}", text)


def test_every_command_has_a_page() -> None:
    told = "".join(page.read_text() for page in PAGES)
    assert not [name for name in COMMANDS if f"icc {name}" not in told], "commands that no page tells of"
    assert all(isinstance(lazy.load(), click.Command) for lazy in COMMANDS.values())


def test_how_it_works_shows_real_graphs() -> None:
    """The lines of graphs on the page are in the graph of the sample, as traced or after all passes."""
    sample, page = str(ROOT / "samples" / "pystd"), (ROOT / "docs" / "how-it-works.md").read_text()
    run = CliRunner()
    passes = "dead-code", "canonicalize,quantize-rtn,attention,fuse"
    graphs = [
        run.invoke(main, ["opt", sample, "--max-seq-len", "1024", "-p", p], catch_exceptions=False) for p in passes
    ]
    lines = {re.sub(r"^ +| +#.*", "", line) for done in graphs for line in done.output.splitlines()}
    shown = [re.sub(r" +#.*", "", line) for line in re.findall(r"^%\d+: .*$", page, re.M)]
    assert len(shown) > 20
    assert not [line for line in shown if line not in lines]
