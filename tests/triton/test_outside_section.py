"""Sections that icc does not know, made by a pass that is defined here: steps that run on request, with inputs and
outputs by name, on every back end without a change of icc.

One is like a drafter with a state: it takes a hidden state of the step, a state of its own and a token, and gives its
next state and guesses. Another takes nothing from the step. They run again and again after one step.
"""

from __future__ import annotations

import operator
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import icc
import numpy as np
import pytest
import torch
from building import build
from fake_cuda import OnDisk
from icc import SamplingParams
from icc.compiler.errors import PassError
from icc.compiler.frontend.load import load_graph
from icc.compiler.graph.graph import Graph
from icc.compiler.graph.interpret import interpret, interpret_outputs
from icc.compiler.graph.parser import parse_graph
from icc.compiler.graph.printer import print_graph
from icc.compiler.graph.tensor_types import DRAFT_ROWS
from icc.compiler.ops import OPS
from icc.compiler.weights.handles import Constant
from icc.passes import pipelines
from icc.passes.base import Pass, PassContext, PassResult
from icc.passes.manager import run_passes
from icc.passes.quantize.select import lm_heads
from icc.runtime.batch.scheduled import ScheduledBatch, ScheduledSequence
from icc.runtime.commands.inspect import describe_engine
from icc.runtime.errors import UsageError
from icc.runtime.format.batch import BatchArray
from icc.runtime.format.load import open_engine
from icc.runtime.format.manifest import Limits

LIMITS = Limits(max_seq_len=40, max_batch_size=4, max_step_tokens=12)
IDS = [1, 5, 9, 33, 70, 2, 8]
ROWS = ([3], [0, 6], [3], [5, 1, 2], [0, 1, 2, 3, 4, 5, 6])
aten = torch.ops.aten
LINEAR, SELECT, EMBEDDING, TOPK = (OPS[n].overload for n in ("linear", "select_rows", "embedding", "topk"))


@dataclass(frozen=True)
class Preview(Pass):
    """Sections "preview" and "echo". across: adds one that would have to read other tokens."""

    name: ClassVar[str] = "outside-preview"
    across: bool = False

    def run(self, graph: Graph, ctx: PassContext) -> PassResult:
        if graph.sections:
            return PassResult(False)
        [head] = lm_heads(graph)
        hidden, lm_head = head.args[0], graph.weight(head.args[1])  # type: ignore[arg-type]
        vocab, width = lm_head.shape
        state = graph.declare(BatchArray("state", ("D", width), "f32"))
        guess = graph.declare(BatchArray("guess", ("D",), "i32"))
        heard = graph.declare(BatchArray("heard", ("D", 3), "f32"))
        rows = graph.fixed_input(DRAFT_ROWS)
        random = torch.Generator().manual_seed(0)
        mixing = Constant(torch.randn(width, width, generator=random) * 0.1)
        table = Constant(torch.randn(vocab, width, generator=random) * 0.1)
        with graph.fx.inserting_before(graph.end):
            hidden = graph.call(aten.view.default, hidden, [-1, width])
            asked = graph.call(SELECT, hidden, rows)
            together = graph.call(aten.add.Tensor, asked, state)
            together = graph.call(aten.add.Tensor, together, graph.call(EMBEDDING, guess, graph.add_weight("t", table)))
            following = graph.call(LINEAR, together, graph.add_weight("mixing", mixing), None)
            scores = graph.call(LINEAR, following, graph.add_weight(str(head.args[1].target), lm_head), None)  # type: ignore[union-attr]
            best = graph.call(TOPK, scores, 2, True)
            choices = graph.call(operator.getitem, best, 1)
            twice = graph.call(aten.add.Tensor, heard, heard)
        graph.returns(
            **{"preview.state": following, "preview.best": choices, "echo.twice": twice, "peek.hidden": hidden}
        )
        if self.across:
            [attention] = graph.attention_nodes[-1:]
            with graph.fx.inserting_before(graph.end):
                again = graph.call(attention.target, *attention.args)
            graph.returns(**{"across.hidden": again})
        return PassResult(True, Counter(sections=3))


@pytest.fixture(scope="module")
def model(tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny.save_tiny(tiny.tiny_configs()["llama"], folder)
    return folder


@pytest.fixture(autouse=True)
def inserted(monkeypatch: pytest.MonkeyPatch) -> None:
    before = pipelines.canonicalize
    monkeypatch.setattr(pipelines, "canonicalize", lambda: [*before(), Preview()])


def optimized(model: Path) -> Graph:
    graph = load_graph(model, LIMITS.max_seq_len)
    for phase in (pipelines.canonicalize(), pipelines.attention(), pipelines.fuse()):
        run_passes(graph, phase, PassContext())
    return graph


def inputs_of(round: int) -> dict[str, np.ndarray]:
    """Random rows of all inputs, one for each token of IDS."""
    random = np.random.default_rng(round)
    return {
        "state": random.normal(size=(len(IDS), 64)).astype(np.float32),
        "guess": random.integers(0, 119, len(IDS)).astype(np.int32),
        "heard": random.normal(size=(len(IDS), 3)).astype(np.float32),
    }


def compare(executor: Any, graph: Graph, bound: float) -> None:
    """Check every section in turn, each time for other rows and with other inputs."""
    executor.step(ScheduledBatch((ScheduledSequence(1, tuple(IDS), 0, ((0,),), len(IDS)),)))
    for round, rows in enumerate(ROWS):
        given = inputs_of(round)
        wanted = interpret_outputs(graph, IDS, {name: torch.from_numpy(value) for name, value in given.items()})
        asked = {"draft_rows": np.array(rows, np.int32)}
        found = executor.run("preview", {**asked, "state": given["state"][rows], "guess": given["guess"][rows]})
        close(found["state"], wanted["preview.state"][rows], bound)
        assert found["best"].dtype == np.int32 and found["best"].shape == (len(rows), 2)
        if bound < 1e-3:  # else a nearly equal token may come first
            assert np.array_equal(found["best"], wanted["preview.best"][rows].numpy())
        heard = executor.run("echo", {"heard": given["heard"][rows]})
        close(heard["twice"], wanted["echo.twice"][rows], bound)
        close(executor.run("peek", asked)["hidden"], wanted["peek.hidden"][rows], bound)


def close(found: np.ndarray, wanted: torch.Tensor, bound: float) -> None:
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, wanted.numpy(), atol=bound * float(wanted.abs().max()))


def test_on_the_cpu(model: Path, tmp_path: Path) -> None:
    limits = {"max_seq_len": 40, "max_batch_size": 4, "max_step_tokens": 12}
    engine = icc.compile(model, tmp_path / "x.engine", target="native", quant="none", **limits)
    assert describe_engine(engine)["sections"] == ["preview", "echo", "peek"]
    opened = open_engine(engine)
    assert opened.program.inputs == [] and set(opened.program.sections[0].inputs) == {"draft_rows", "state", "guess"}
    opened.close()
    with icc.load(engine, threads=2) as llm:
        plain = llm.generate([IDS], SamplingParams(max_tokens=5, ignore_eos=True))
        graph = optimized(model)
        compare(llm.executor, graph, 1e-5)
        assert llm.generate([IDS], SamplingParams(max_tokens=5, ignore_eos=True)) == plain
        np.testing.assert_allclose(llm.logits(IDS), interpret(graph, IDS), atol=1e-4)
        with pytest.raises(UsageError, match="section 'echo' is given heard, not draft_rows"):
            llm.executor.run("echo", {"draft_rows": np.zeros(1)})


def test_on_ranks_of_the_cpu(tiny: Any, tmp_path: Path) -> None:
    """The inputs of a section reach all ranks, also more rows than fit a control block of fixed size."""
    length, config = 4400, tiny.tiny_configs()["llama"]
    config.max_position_embeddings = length
    tiny.save_tiny(config, tmp_path / "model")
    limits = {"max_seq_len": length, "max_batch_size": 4, "max_step_tokens": length}
    engine = icc.compile(
        tmp_path / "model", tmp_path / "x.engine", target="native", quant="none", tensor_parallel=2, **limits
    )
    with icc.load(engine, threads=2) as llm:
        executor: Any = llm.executor
        compare(executor, optimized(tmp_path / "model"), 1e-5)
        assert executor.max_logit_rows == length
        table = tuple(range(-(-length // executor.groups[0].block_size)))
        ids = tuple((7 * i + i * i) % 119 for i in range(length))
        executor.step(ScheduledBatch((ScheduledSequence(1, ids, 0, (table,), length),)))
        rows = np.random.default_rng(3).permutation(length).astype(np.int32)
        state = np.random.default_rng(4).normal(size=(length, 64)).astype(np.float32)
        given = {"draft_rows": rows, "state": state, "guess": rows % 119}
        whole = executor.run("preview", given)
        for part in (slice(0, 100), slice(4050, 4160)):
            few = executor.run("preview", {name: values[part] for name, values in given.items()})
            np.testing.assert_allclose(whole["state"][part], few["state"], atol=1e-4)
            assert (whole["best"][part] == few["best"]).mean() > 0.99


def test_in_an_interpreted_plan(model: Path) -> None:
    engine = build(model, "none", LIMITS)
    with engine.llm(num_blocks=32) as llm:
        compare(llm.executor, engine.graph, 2e-2)


def test_through_the_driver_of_a_gpu(model: Path) -> None:
    built = build(model, "none", LIMITS)
    executor, driver = OnDisk(built.engine(), built, built.objects()).executor()
    compare(executor, built.graph, 2e-2)
    executor.close()
    assert not driver.live and not driver.memory


def test_the_text_of_a_graph_tells_its_sections(model: Path) -> None:
    text = print_graph(optimized(model))
    assert "%state: f32[D, 64], %guess: i32[D], %heard: f32[D, 3]" in text
    assert text.count("preview.state=%") == text.count("echo.twice=%") == text.count("peek.hidden=%") == 1
    assert print_graph(parse_graph(text)) == text


def test_a_section_that_needs_other_tokens_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = load_graph(model, LIMITS.max_seq_len)
    run_passes(graph, [*pipelines.canonicalize()[:-1], Preview(across=True)], PassContext())
    with pytest.raises(PassError, match=r"section across: .* reads other tokens"):
        run_passes(graph, pipelines.attention(), PassContext())
