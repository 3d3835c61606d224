"""One command line: every command shows its defaults, answers a mistake in one line, and imports only what it needs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click
import pytest
from icc.compiler.cli import COMMANDS, main
from icc.runtime.cli import commands

from .conftest import ROOT


@pytest.mark.parametrize("name", COMMANDS)
def test_help_shows_every_default(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run([*name.split(), "--help"], "icc") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert shown.startswith(f"Usage: icc {name} [OPTIONS]")
    command = COMMANDS[name].load()
    context = click.Context(command, show_default=True)
    for option in (p for p in command.params if isinstance(p, click.Option)):
        record = option.get_help_record(context)
        assert record is not None and option.help
        text = " ".join(record[1].split())
        assert text in shown
        if isinstance(option.default, str | int | float) and option.default and not option.is_flag:
            assert "[default: " in text, option


def test_help_of_all_lists_all_and_the_runtime_has_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["--help"], "icc") == 0
    shown = capsys.readouterr().out
    assert all(f"\n  {name} " in shown for name in COMMANDS)
    assert set(commands.COMMANDS) < set(COMMANDS)
    assert commands.main(["--help"]) == 0 and "\n  compile " not in capsys.readouterr().out


def test_compile_explains_what_its_options_may_be(capsys: pytest.CaptureFixture[str]) -> None:
    from icc.compiler.choices import POOLINGS, TASKS
    from icc.compiler.kv_formats import cache_options
    from icc.compiler.quantization import QUANTIZATIONS
    from icc.compiler.targets import TARGETS

    assert main.run(["compile", "--help"], "icc") == 0
    lines = capsys.readouterr().out.splitlines()
    options = {
        "target": ("auto", *TARGETS),
        "quant": QUANTIZATIONS,
        "task": TASKS,
        "pooling": POOLINGS,
        "kv-cache": cache_options(),
    }
    for option, values in ((f"--{name}:", values) for name, values in options.items()):
        below = lines[lines.index(option) + 1 :]
        explained = dict(line.split(maxsplit=1) for line in below[: below.index("")] if line[2] != " ")
        assert list(explained) == list(values) and all(len(text) > 3 for text in explained.values())


MISTAKES = {
    "no command": (["complie"], "No such command 'complie'", "icc --help"),
    "no option": (["run", "x", "--thread", "2"], "No such option", "icc run --help"),
    "no engine": (["bench"], "Missing argument 'ENGINE'", "icc bench --help"),
    "no number": (["bench", "x", "--rounds", "a"], "'a' is not a valid integer", "icc bench --help"),
    "no list": (["bench", "x", "--batch-size", "1;2"], "is not a list of integers like 1,2,3", "icc bench --help"),
    "no range": (["bench", "serve", "--prompt-tokens", "9:2"], "no length like 256", "icc bench serve --help"),
    "two prompts": (["run", "ENGINE", "-p", "a", "--ids", "1"], "either --prompt or --ids", "icc run --help"),
    "no prompt": (["run", "ENGINE"], "either --prompt or --ids", "icc run --help"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_a_line_and_a_hint(
    mistake: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", None)  # no input comes
    (tmp_path / "engine.json").write_text("{}")  # read before an engine is loaded
    arguments, message, hint = MISTAKES[mistake]
    assert main.run([str(tmp_path) if word == "ENGINE" else word for word in arguments], "icc") == 2
    shown = capsys.readouterr()
    error, hinted = shown.err.splitlines()
    assert error.startswith("error: ") and message in error and hinted == f"hint: {hint}" and not shown.out


def test_debug_shows_the_traceback_from_either_side_of_the_command() -> None:
    from icc.runtime.errors import EngineFormatError

    for arguments in (["--debug", "inspect", "nothing"], ["inspect", "nothing", "--debug"]):
        with pytest.raises(EngineFormatError):
            main.run(arguments, "icc")


def test_python_m_icc_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "icc", "--version"], cwd=ROOT.parent, capture_output=True, text=True)
    assert done.stdout.startswith("icc, version ")
