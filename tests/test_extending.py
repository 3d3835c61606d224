"""docs/extending.md is right: its package is installed in a folder, and its commands print what the page says."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from acme_package import BLOCKS, install, write_acme
from icc.runtime import extensions
from icc.runtime.errors import ExtensionError
from icc.runtime.speculate.choose import _of_a_package


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
    """The exit code, output and errors of each command, all run one after the other in one separate process."""
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
    assert all(code == 2 and "'s9' is" in errors and "rtn-s8" in errors for code, _, errors in unknown)


ENGINE = """
import sys
from pathlib import Path
import icc, tiny_models, torch
from transformers.activations import ACT2FN
ACT2FN["softsign"] = torch.nn.Softsign
config = tiny_models.tiny_configs()["llama"]
config.hidden_act = "softsign"
model = tiny_models.save_tiny(config, Path("model"))
made = icc.compile("model", "made", target="native", passes="acme-softsign", dump_passes="dump", max_seq_len=128)
assert "acme.softsign" in Path("dump/packages/00-acme-softsign.txt").read_text()
assert "abs a0" in next(Path("dump/fuse").glob("*-fuse-pointwise.txt")).read_text()
answers, ids = [], list(range(100))  # most tokens have been seen with another behind them
for spec in ("none", "acme-pairs:3"):
    with icc.load(made, spec=spec, verify_answers=True) as llm:
        if spec != "none":
            llm.loop.speculator.adaptive = False  # it guesses whatever that costs
        [answer] = llm.generate([ids], icc.SamplingParams(max_tokens=24, ignore_eos=True))
        answers.append(answer.token_ids)
        if spec == "none":
            right = tiny_models.reference_logits(model, ids)
            assert (torch.tensor(llm.logits(ids)) - torch.as_tensor(right)).abs().max() < 1e-3 * right.abs().max()
        else:
            assert llm.loop.speculator.counts.guesses > 0
assert answers[0] == answers[1]
try:
    icc.compile("model", "other", target="native", passes="paged-attention")
except icc.IccError as error:
    assert error.exit_code == 17 and "requires rope" in error.message
else:
    raise AssertionError("it is too early for that pass")
"""


def test_the_pass_and_the_drafter_in_an_engine(acme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """--passes puts the op into kernels, which agree with transformers; the drafter's guesses change nothing."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    done = python(acme, ENGINE)
    assert not done.returncode, done.stderr
    unknown, odd, many = icc(
        acme,
        "compile model --passes acme-softsin",
        "run made --spec acme-pear --ids 5",
        "run made --spec acme-pairs:many --ids 5",
    )
    assert many[0] == 2 and "'many' is no number of guesses" in many[2]
    assert unknown[0] == 2 and "acme-softsign" in unknown[2]
    assert odd[0] == 2 and "acme-pairs or draft:ENGINE" in odd[2]


MODEL = """
import json, sys
from pathlib import Path
import tiny_models
config = tiny_models.tiny_configs()["llama"]
tiny_models.save_tiny(config, Path("own"))
file = Path("own/config.json")
named = {"model_type": "acme", "hidden_act": "acme-softsign", "architectures": ["AcmeForCausalLM"]}
file.write_text(json.dumps({**json.loads(file.read_text()), **named}))
for name in list(sys.modules):
    assert not name.startswith("acme")
import torch
from icc.compiler.frontend.load import load_graph
from icc.compiler.graph.interpret import interpret
from icc.compiler.graph.printer import print_graph
from transformers import AutoModelForCausalLM
graph, ids = load_graph(Path("own")), list(range(20))
assert "acme.softsign" in print_graph(graph)
right = AutoModelForCausalLM.from_pretrained("own", dtype=torch.float32)(torch.tensor([ids])).logits[0]
assert (interpret(graph, ids) - right).abs().max() < 1e-4 * right.abs().max()
"""


def test_a_model_of_the_package_calls_the_op(acme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model type and an activation that transformers lacks, from the module that config.json names."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))
    done = python(acme, MODEL)
    assert not done.returncode, done.stderr


WITHOUT_A_GPU = """
import sys
sys.argv[1:] = ["sq8", "e5m2"]
import acme.test_gpu_kv, acme.test_gpu_op as of_ops
of_ops.test_softsign()
of_ops.softsign.instructions = lambda body, x: body("div", x, body("add", body("abs", x), 2.0))
of_ops.test_softsign()
"""


def test_its_kernels_for_gpus_are_checked_without_one(acme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page's tests pass, and the last one fails if fusion computes another op."""
    monkeypatch.delenv("TRITON_INTERPRET")  # the page sets it itself
    done = python(acme, WITHOUT_A_GPU)
    assert "line 7, in <module>" in done.stderr
    last = done.stderr.rstrip().rpartition("\n")[2]
    assert last.startswith("ValueError: acme.softsign, sample 0, a prompt of 3 tokens: 21 of 21 numbers are off by")


def test_a_drafter_that_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception of a package becomes one line that names the package."""
    monkeypatch.setattr(extensions, "load", lambda group, name: lambda argument, engine, executor: int(argument))
    with pytest.raises(ExtensionError, match=r"'pairs' fails for 'many', .*: ValueError: invalid literal"):
        _of_a_package("pairs", "many", None, None)  # type: ignore[arg-type]
    with pytest.raises(ExtensionError, match="'pairs' makes no Drafter but 5"):
        _of_a_package("pairs", "5", None, None)  # type: ignore[arg-type]


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


ODD = """
from dataclasses import dataclass
from typing import ClassVar
import torch
from icc.compiler.kv_formats import FloatCache
from icc.compiler.ops import Traits, op
from icc.passes.base import Pass
from icc.passes.rules import call
from icc.runtime.format.kv_numbers import KVNumbers

@dataclass(frozen=True)
class Nothing(Pass):
    name: ClassVar[str] = "nothing"
    def run(self, graph, ctx):
        pass

def packet():
    return call(torch.ops.aten.tanh, 1)

def six():
    return FloatCache(KVNumbers("six", 6), "", 0.0)

@op(Traits(elementwise=True), namespace="odd", instructions=lambda body, x: body("softmax", x))
def drawn(x: torch.Tensor) -> torch.Tensor:
    return x + 0.0

@op(Traits(elementwise=True), namespace="odd")
def looks(x: torch.Tensor) -> torch.Tensor:
    return x if x.max() > 0 else -x

def short():
    @op(Traits(elementwise=True), namespace="odd", instructions=lambda body, x: body("add", x, x))
    def both(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y
"""
GRAPH = """graph(%token_ids: i64[T]):
  %0: f32[T, 8] = icc.embedding(%token_ids, @embed: f32[16, 8])
  %1: f32[T, 8] = odd.drawn(%0)
  return %1
"""


def test_mistakes_of_a_package_are_said_in_one_line(tmp_path: Path) -> None:
    modules = {"packet": "PATTERN = odd.packet()", "six": "SIX = odd.six()", "short": "odd.short()"}
    for name, text in {
        "odd": ODD,
        **{f"odd_{name}": f"import odd\n{text}\n" for name, text in modules.items()},
    }.items():
        (tmp_path / f"{name}.py").write_text(text)
    passes = {"nothing": "odd:Nothing", "other": "odd:Nothing", "packet": "odd_packet:PATTERN", "short": "odd_short:X"}
    install(tmp_path, {"icc.ops": {"odd": "odd"}, "icc.passes": passes, "icc.kv_formats": {"six": "odd_six:SIX"}})
    (tmp_path / "graph.txt").write_text(GRAPH)
    (tmp_path / "looks.txt").write_text(GRAPH.replace("drawn", "looks"))
    lines = {
        "opt looks.txt -p fuse": "odd.looks.default fails on tensors that have shapes and no values: ",
        "opt graph.txt -p fuse": "instructions of odd.drawn.default: there is no opcode 'softmax'",
        "opt graph.txt -p nothing": "pass 'nothing': run must return a PassResult, and returned None",
        "opt graph.txt -p other": "icc.passes 'other': the name of Nothing is 'nothing'",
        "opt graph.txt -p packet": "aten.tanh stands for several overloads: name one of aten.tanh.default",
        "opt graph.txt -p short": "instructions of op 'odd.both' take (body, x, y): too many positional arguments",
        "compile model --kv-cache six": "icc.kv_formats 'six': elements of 6 bits, and not 1, 2, 4, 8, 16 or 32",
        "opt graph.txt --explain nothing": "nothing refused nothing; ran: no pass",
    }
    for (_, output, errors), said in zip(icc(tmp_path, *lines), lines.values(), strict=True):
        assert said in output + errors and "Traceback" not in errors
