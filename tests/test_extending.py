"""docs/extending.md is true: its package is installed in a folder, and its commands print what the page says."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from acme_package import BLOCKS, install, write_acme


def python(folder: Path, code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


RUN = """
import contextlib, io, json, sys
from icc.compiler.cli import main
done = []
for arguments in json.loads(sys.argv[1]):
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(arguments, prog_name="icc")
        except SystemExit as end:
            code = end.code
    done.append((code, out.getvalue(), err.getvalue()))
print(json.dumps(done))
"""


def icc(folder: Path, *commands: str) -> list[tuple[int, str, str]]:
    """Exit code, output and errors of each command, one after the other in a process of their own."""
    done = python(folder, RUN, json.dumps([shlex.split(command) for command in commands]))
    assert not done.returncode, done.stderr
    return [tuple(one) for one in json.loads(done.stdout)]


@pytest.fixture(scope="module")
def acme(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the page's package."""
    folder = tmp_path_factory.mktemp("site")
    write_acme(folder)
    return folder


def test_the_commands_print_what_the_page_says(acme: Path) -> None:
    [console] = [text for kind, text in BLOCKS if kind == "console"]
    commands = [part.partition("\n") for part in console.split("$ icc ")[1:]]
    assert len(commands) == 2
    done = icc(acme, *(command for command, _, _ in commands))
    for (_, output, errors), (_, _, expected) in zip(done, commands, strict=True):
        assert output == expected, errors


def test_the_target_is_found(acme: Path) -> None:
    done = python(acme, "from icc.compiler.targets import find_target; print(find_target('rtx6000ada').bandwidth)")
    assert done.stdout == "960.0\n", done.stderr
    [(_, _, errors)] = icc(acme, "compile model --target rtx6000")
    assert "rtx6000ada" in errors


def test_the_quantization_is_a_value_of_quant(acme: Path) -> None:
    code = """
from pathlib import Path
from icc.compiler.options import CompileOptions
from icc.passes.pipelines import quantize
options = CompileOptions(Path("model"), Path("out"), quant="rtn-s8", quant_head="rtn-s8")
[found] = [p for p in quantize(options.quant, options.quant_head, (), ()) if p.name == "quantize-rtn"]
print(found.format, found.head)
"""
    done = python(acme, code)
    assert done.stdout == "s8 s8\n", done.stderr
    helped, *unknown = icc(acme, "compile --help", "compile model --quant s9", "compile model --quant-head s9")
    text = " ".join(helped[1].split())
    assert "rtn-s8 of another package" in text and "rtn-s8 as --quant rtn-s8 stores weights" in text
    assert all(code == 2 and "'s9' is not one of" in errors and "'rtn-s8'" in errors for code, _, errors in unknown)


def test_nothing_is_loaded_before_it_is_asked_for(acme: Path) -> None:
    code = "import sys, icc.compiler.cli, icc.compiler.ops, icc.passes.registry as r; print(r.pass_names())"
    done = python(acme, f"{code}; assert 'acme' not in sys.modules")
    assert not done.returncode and "'acme-softsign'" in done.stdout, done.stderr
    [(_, _, errors)] = icc(acme, "opt graph.txt -p softsign")
    assert "acme-softsign" in errors


def test_what_cannot_be_loaded_names_its_package(acme: Path, tmp_path: Path) -> None:
    odd = {"odd": "json:dumps"}
    install(tmp_path, {"icc.passes": {"gone": "nowhere:Pass", **odd}, "icc.targets": odd, "icc.quantizations": odd})
    (tmp_path / "graph.txt").write_text((acme / "graph.txt").read_text())
    gone, odd_pass, odd_target, odd_quant = icc(
        tmp_path,
        "opt graph.txt -p gone",
        "opt graph.txt -p odd",
        "compile model --target odd",
        "compile model --quant odd",
    )
    words = "error: acme: icc.passes 'gone' (nowhere:Pass) cannot be loaded: No module named 'nowhere'\n"
    assert gone == (34, "", words)
    assert "icc.passes 'odd' is not a Pass" in odd_pass[2]
    assert "icc.targets 'odd' is not a Target" in odd_target[2]
    assert "icc.quantizations 'odd' is not a Quantization" in odd_quant[2]
