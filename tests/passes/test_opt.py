"""`icc opt` and the names of passes: its output, its comparison of logits, and its refusals."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch
from click.testing import CliRunner, Result
from graph_tracing import aten, trace
from icc.compiler import opt
from icc.compiler.cli import main
from icc.compiler.errors import PassError, UsageError
from icc.compiler.graph.graph import Graph
from icc.compiler.graph.printer import print_graph
from icc.passes import pipelines
from icc.passes.base import Pass, PassContext, PassResult
from icc.passes.canonicalize.simplify import Simplify
from icc.passes.prerequisites import facts_of
from icc.passes.quantize.rtn import QuantizeRtn
from icc.passes.registry import PASSES, PHASES, find_pass, parse_passes

GATED = """\
graph(%token_ids: i64[T]):
  %0: f32[T, 8] = icc.embedding(%token_ids, @x: f32[16, 8])
  %1: f32[T, 8] = aten.silu(%0)
  %2: f32[T, 8] = aten.mul.Tensor(%1, %0)
  return %2
"""


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["opt", *map(str, arguments)])


@pytest.fixture
def gated(tmp_path: Path) -> Path:
    path = tmp_path / "gated.txt"
    path.write_text(GATED)
    return path


def test_prints_the_graph_after_the_passes(gated: Path) -> None:
    assert run(gated).stdout == run(gated, "-p", "dead-code,simplify").stdout == GATED
    done = run(gated, "-p", "fuse", "--verify", "--run")
    assert 'icc.pointwise([%0], "t0 = silu a0; t1 = mul t0 a0")' in done.stdout
    first, last = done.stderr.splitlines()
    assert first.startswith("ran first, as they are required: ") and not done.exit_code
    assert last == "logits differ by 0.0e+00 (allowed 6.2e-05)"


def test_a_checkpoint(tiny: ModuleType, tmp_path: Path) -> None:
    tiny.save_tiny(tiny.tiny_configs()["llama"], tmp_path)
    passes = "canonicalize,quantize-gptq{group=32},attention,fuse"
    done = run(tmp_path, "-p", passes, "--run", "--modules", "--max-seq-len", 64)
    assert done.exit_code == 0, done.stderr
    assert "icc.paged_attention(" in done.stdout and ": q4g32[" in done.stdout and "# model.layers.0" in done.stdout
    assert "(no bound: a pass changes numbers on purpose)" in done.stderr


def test_explains_refusals(gated: Path) -> None:
    gated.write_text(GATED.replace("aten.silu(%0)", "icc.rms_norm(%0, None, 1e-05)"))
    done = run(gated, "-p", "fuse-add-norm", "--explain", "fuse-add-norm")
    assert done.stdout == (
        "fuse-add-norm at rms_norm_default: the norm does not read a sum\nfuse-add-norm: nothing to do\n"
    )
    assert "no pass or rule is called 'gtpq'" in run(gated, "-p", "simplify", "--explain", "gtpq").stderr
    assert run(gated, "-p", "simplify", "--explain", "gptq").stdout == "gptq refused nothing; ran: simplify\n"


WRONG = {
    "fuse-everything": "there is no pass 'fuse-everything'",
    "dead-code,simplify;fuse": "'simplify;fuse' is not a list of passes",
    "fuse{x=1}": "fuse is a phase of the pipeline and has no options",
    "simplify{merge=true}": "pass 'simplify' has no option 'merge'",
    "simplify{merge_slices=yes}": "option merge_slices of pass 'simplify': 'yes' is not true or false",
    "quantize-rtn{group=much}": "option group of pass 'quantize-rtn': 'much' is not a whole number",
    "insert-medusa-heads{heads=2}": "option 'heads' of pass 'insert-medusa-heads' cannot be written as text",
}


@pytest.mark.parametrize("passes", WRONG)
def test_what_cannot_be_run_is_named(passes: str, gated: Path) -> None:
    done = run(gated, "-p", passes)
    assert done.exit_code and WRONG[passes] in done.stderr and "Traceback" not in done.output


def test_options_are_the_fields_of_a_pass() -> None:
    text = "simplify{merge_slices=true}, quantize-rtn{group=32,keep=*.up+lm_*,head=none}"
    assert parse_passes(text) == [Simplify(True), QuantizeRtn(group=32, keep=("*.up", "lm_*"), head=None)]
    assert parse_passes("") == [] and parse_passes("canonicalize,fuse") == pipelines.canonicalize() + pipelines.fuse()


def test_names_are_those_of_the_passes() -> None:
    assert all(find_pass(name).name == name for name in PASSES)
    assert all(callable(getattr(pipelines, phase)) for phase in PHASES)


class Doubled(Pass):
    """A pass that doubles the logits every time."""

    name = "doubled"

    def run(self, graph: Graph, ctx: PassContext) -> PassResult:
        with graph.fx.inserting_before(graph.end):
            graph.returns(logits=graph.call(aten.mul.Tensor, graph.output, 2.0))
        return PassResult(True, {"doubled": 1})  # type: ignore[arg-type]


def test_a_pass_that_changes_numbers_is_caught() -> None:
    def graph() -> Graph:
        return trace(lambda x: aten.exp.default(x), x="f32[T, 8]")

    with pytest.raises(PassError, match=r"the logits differ by 1\.0e\+00, the passes allow 1\.0e-05"):
        opt.optimize(graph(), [Doubled()], compare=True)
    with pytest.raises(PassError, match="a second run of pass 'doubled' changes the graph again"):
        opt.optimize(graph(), [Doubled()], check=True)


def test_files_with_and_without_passes() -> None:
    file = opt.GraphFile.parse(f"# a case\n{GATED}-- simplify\nafter\n")
    assert (file.comment, file.before, file.passes, file.after) == ("# a case\n", GATED, "simplify", "after\n")
    assert str(file) == f"# a case\n{GATED}-- simplify\nafter\n"
    assert opt.GraphFile.parse(GATED).passes == ""


def test_tokens_fit_the_tables() -> None:
    graph = trace(lambda positions, x: x, positions="", x=torch.ones(2, 8), max_seq_len=5)
    graph = trace(lambda token_ids, positions, x: torch.ops.icc.embedding.default(token_ids, x), max_seq_len=5,
                  token_ids="", positions="", x=torch.ones(2, 8))  # fmt: skip
    ids = opt.token_ids(graph)
    assert len(ids) == 5 and max(ids) < 2 and print_graph(graph)


def test_an_unknown_phase_has_a_hint() -> None:
    with pytest.raises(UsageError) as caught:
        parse_passes("canonical")
    assert "canonicalize" in caught.value.hint


@pytest.fixture(scope="module")
def llama(tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Graph:
    path = tmp_path_factory.mktemp("llama")
    tiny.save_tiny(tiny.tiny_configs()["llama"], path)
    return opt.read_graph(path)[0]


@pytest.mark.parametrize("name", sorted(PASSES))
def test_every_pass_runs_on_a_model_behind_what_it_requires(name: str, llama: Graph) -> None:
    graph = llama.copy()
    found = opt.optimize(graph, parse_passes(name), compare=True)
    assert find_pass(name).requires <= {
        *facts_of(llama.copy()),
        *(f for p in found.added for f in find_pass(p).ensures),
    }
    assert name not in found.added and [r.name for r in found.reports] == [*found.added, name]


def test_strict_refuses_and_says_which_passes_are_missing(llama: Graph) -> None:
    with pytest.raises(PassError, match=r"requires simple, but .* is a view of a view") as refused:
        opt.optimize(llama.copy(), parse_passes("recognize-norms"), strict=True)
    assert refused.value.hint == "give -p simplify,eliminate-common,recognize-norms"
    graph = llama.copy()
    given = opt.optimize(graph, parse_passes("simplify,eliminate-common,recognize-norms"), strict=True)
    assert not given.added and "icc.rms_norm" in print_graph(graph)


def test_tells_which_passes_ran_first(tiny: ModuleType, tmp_path: Path) -> None:
    tiny.save_tiny(tiny.tiny_configs()["llama"], tmp_path)
    done = run(tmp_path, "-p", "paged-attention")
    assert done.stderr == "ran first, as they are required: position-tables, recognize-rope\n" and not done.exit_code
    assert run(tmp_path, "-p", "paged-attention", "--strict").exit_code == PassError.exit_code
