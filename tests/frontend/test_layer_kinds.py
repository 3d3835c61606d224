"""One layer of each kind is traced, and the graph is the one that a trace of every layer gives."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from icc.compiler.frontend import load
from icc.compiler.frontend.export import trace
from icc.compiler.frontend.layers.kinds import LayerKinds
from icc.compiler.graph.graph import Graph
from icc.compiler.graph.printer import print_graph
from icc.compiler.weights.handles import Constant
from layer_kinds import LARGE, NAMES, configs
from sizes import soak
from torch import Tensor, nn

pytestmark = pytest.mark.slow


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[LayerKinds | None]]:
    """A list that gets the kinds of each trace; None for a trace of every layer."""
    torch.set_num_threads(1)
    made: list[LayerKinds | None] = []
    export = trace.export

    def spy(model: nn.Module, length: int, kinds: LayerKinds | None = None, *options: Any) -> Any:
        made.append(kinds)
        return export(model, length, kinds, *options)

    monkeypatch.setattr(load, "export", spy)
    yield made


def same_graph(a: Graph, b: Graph) -> None:
    """Assert that text, modules, order and every weight of two graphs are equal."""
    assert print_graph(a, modules=True) == print_graph(b, modules=True)
    assert [n.target for n in a.nodes if n.op == "get_attr"] == [n.target for n in b.nodes if n.op == "get_attr"]
    assert list(a.weights) == list(b.weights)
    for name, weight in a.weights.items():
        assert type(weight) is type(b.weights[name])
        assert torch.equal(weight.load(), b.weights[name].load())
    assert a.info == b.info


def repeats(traces: list[LayerKinds | None]) -> int:
    """The number of layers that the trace before the last one left out; 0 if that trace was given up."""
    assert traces[-1] is None
    kinds = traces[-2]
    return len(kinds.repeats) if kinds is not None else 0


def test_names_are_complete(tiny: ModuleType) -> None:
    assert sorted(NAMES + LARGE) == sorted(configs(tiny))


@pytest.mark.parametrize("name", [*NAMES, *soak(*LARGE)])
def test_graph_is_that_of_every_layer(
    tiny: ModuleType, name: str, tmp_path: Path, traces: list[LayerKinds | None]
) -> None:
    config, left_out = configs(tiny)[name]
    tiny.save_tiny(config, tmp_path)
    graph = load.load_graph(tmp_path)
    same_graph(graph, load.load_graph(tmp_path, every_layer=True))
    assert repeats(traces) == left_out


class Layer(nn.Module):
    """A layer of the models below; subclasses add what they test."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.scale = 0.5
        self.up = nn.Linear(8, 8)

    def forward(self, x: Tensor, *others: Any) -> Any:
        return x + self.up(x) * self.scale


class Model(nn.Module):
    """A causal language model of three layers that mix no tokens."""

    def __init__(self, layer: type[Layer]) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.layers = nn.ModuleList([layer(i) for i in range(3)])
        self.head = nn.Linear(8, 16)

    def run(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def forward(self, input_ids: Tensor, **kwargs: Any) -> Any:
        return SimpleNamespace(logits=self.head(self.run(self.embed(input_ids))))


def trace_both(
    model_class: type[Model], layer: type[Layer], change: Any = None, values: dict[str, Tensor] | None = None
) -> None:
    """The graphs of a model are equal however it is traced; `change` gets the model first. `values`: not random."""
    config = transformers.LlamaConfig(vocab_size=16, hidden_size=8, num_attention_heads=1, num_hidden_layers=3)
    generator = torch.Generator().manual_seed(0)
    graphs = []
    weights: dict[str, Any] = {name: Constant(value) for name, value in (values or {}).items()}
    for every_layer in (False, True):
        with torch.device("meta"):
            model = model_class(layer).eval()
        if change is not None:
            change(model)
        for name, tensor in model.state_dict().items():
            if name not in weights:
                weights[name] = Constant(torch.randn(tensor.shape, generator=generator))
        graphs.append(load.trace_model(model, config, weights, 64, every_layer))
    same_graph(*graphs)


def test_an_index_that_nobody_reads_may_differ(traces: list[LayerKinds | None]) -> None:
    trace_both(Model, Layer)
    assert len(traces) == 2 and repeats(traces) == 2


def test_an_index_that_is_read_makes_another_kind(traces: list[LayerKinds | None]) -> None:
    class Indexed(Layer):
        def forward(self, x: Tensor, *others: Any) -> Any:
            return super().forward(x) * [1.0, 2.0, 1.0][self.index]

    trace_both(Model, Indexed)
    assert len(traces) == 2 and repeats(traces) == 0


def test_a_value_that_differs_makes_another_kind(traces: list[LayerKinds | None]) -> None:
    def change(model: Any) -> None:
        model.layers[1].scale = 0.25

    trace_both(Model, Layer, change)
    assert repeats(traces) == 1


def test_a_function_of_its_own_makes_another_kind(traces: list[LayerKinds | None]) -> None:
    class Own(Layer):
        def __init__(self, index: int) -> None:
            super().__init__(index)
            self.factor = lambda: index

        def forward(self, x: Tensor, *others: Any) -> Any:
            return super().forward(x) * self.factor()

    trace_both(Model, Own)
    assert repeats(traces) == 0


def test_other_shapes_make_another_kind(traces: list[LayerKinds | None]) -> None:
    def change(model: Any) -> None:
        model.layers[0].up = nn.Linear(8, 8, bias=False, device="meta")

    trace_both(Model, Layer, change)
    assert repeats(traces) == 1


def test_layers_that_share_modules_are_all_traced(traces: list[LayerKinds | None]) -> None:
    def share(model: Any) -> None:
        model.layers[2].up = model.layers[0].up

    def repeat(model: Any) -> None:
        model.layers = nn.ModuleList([model.layers[0]] * 3)

    for change in (share, repeat):
        trace_both(Model, Layer, change)
        assert repeats(traces) == 0


def test_layers_that_share_weights(traces: list[LayerKinds | None]) -> None:
    def change(model: Any) -> None:
        model.layers[2].up.weight = model.layers[0].up.weight

    trace_both(Model, Layer, change)
    assert repeats(traces) == 1  # the last layer has the weight of the first, and its own bias


def test_layers_that_share_all_weights(traces: list[LayerKinds | None]) -> None:
    def change(model: Any) -> None:
        for layer in model.layers:
            layer.up.weight, layer.up.bias = model.layers[0].up.weight, model.layers[0].up.bias

    trace_both(Model, Layer, change)
    assert repeats(traces) == 2


def test_a_weight_tied_to_elsewhere_is_not_renamed(traces: list[LayerKinds | None]) -> None:
    def change(model: Any) -> None:
        model.head = nn.Linear(8, 8, device="meta")
        model.layers[2].up.weight = model.head.weight

    trace_both(Model, Layer, change)
    assert repeats(traces) == 1


def test_the_same_tensor_twice_is_another_call(traces: list[LayerKinds | None]) -> None:
    class Two(Layer):
        def forward(self, x: Tensor, *others: Any) -> Any:
            return super().forward(x) + others[0]

    class First(Model):
        def run(self, x: Tensor) -> Tensor:
            first = x
            for layer in self.layers:
                x = layer(x, first)
            return x

    trace_both(First, Two)
    assert repeats(traces) == 1


def test_values_of_one_layer_handed_to_the_next_in_a_mapping(traces: list[LayerKinds | None]) -> None:
    class Leaving(Layer):
        def forward(self, x: Tensor, *others: Any) -> Any:
            out = super().forward(x) + others[0].get("last", 0.0)
            others[0]["last"] = x
            return out

    class Shared(Model):
        def run(self, x: Tensor) -> Tensor:
            shared: dict[str, Tensor] = {}
            for layer in self.layers:
                x = layer(x, shared)
            return x + shared["last"]

    trace_both(Shared, Leaving)
    assert len(traces) == 2 and repeats(traces) == 1


def test_an_argument_that_hides_its_content(traces: list[LayerKinds | None]) -> None:
    class Shared(Model):
        def run(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x, SimpleNamespace())
            return x

    trace_both(Shared, Layer)
    assert len(traces) == 2 and repeats(traces) == 0


def test_several_results(traces: list[LayerKinds | None]) -> None:
    class Several(Layer):
        def forward(self, x: Tensor, *others: Any) -> Any:
            return super().forward(x), x * 2.0, None

    class Summing(Model):
        def run(self, x: Tensor) -> Tensor:
            total = x
            for layer in self.layers:
                x, twice, _ = layer(x)
                total = total + twice
            return total + x

    trace_both(Summing, Several)
    assert len(traces) == 2 and repeats(traces) == 2


@pytest.mark.parametrize(
    ("write", "given_up", "left_out"),
    [("inputs", True, 0), ("part", True, 0), ("attribute", False, 0), ("result", False, 2)],
)
def test_writes_are_noticed(write: str, given_up: bool, left_out: int, traces: list[LayerKinds | None]) -> None:
    class Writing(Layer):
        def forward(self, x: Tensor, *others: Any) -> Any:
            if write == "inputs":
                x.mul_(2.0)
            out = super().forward(x)
            if write == "result":
                out.mul_(2.0)
            if write == "part":
                out[..., 1:] += 1.0
            if write == "attribute":
                self.kept = out
            return out

    trace_both(Model, Writing)
    assert len(traces) == (3 if given_up else 2)
    assert given_up or repeats(traces) == left_out


def test_a_value_that_leaves_by_the_back_door(traces: list[LayerKinds | None]) -> None:
    kept: list[Tensor] = []

    class Leaking(Layer):
        def forward(self, x: Tensor, *others: Any) -> Any:
            kept.append(self.up(x))
            return super().forward(x)

    class Collecting(Model):
        def run(self, x: Tensor) -> Tensor:
            kept.clear()
            x = super().run(x)
            return x + kept[0]

    trace_both(Collecting, Leaking)
    assert len(traces) == 3  # the first trace was given up


def test_a_value_that_comes_in_by_the_back_door(traces: list[LayerKinds | None]) -> None:
    now: list[Tensor] = []

    class Peeking(Layer):
        def forward(self, x: Tensor, *others: Any) -> Any:
            return super().forward(x) + now[0]

    class Setting(Model):
        def run(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                now[:] = [x * 2.0]
                x = layer(x)
            return x

    trace_both(Setting, Peeking)
    assert len(traces) == 3


class Attending(Layer):
    """Attention written out, with a mask that is stored with the layer."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.register_buffer("mask", torch.zeros(64, 64))

    def forward(self, x: Tensor, *others: Any) -> Any:
        tokens = x.shape[1]
        scores = x @ x.transpose(1, 2) + self.mask[:tokens, :tokens]
        return super().forward(x) + torch.softmax(scores, dim=-1) @ x


@pytest.mark.parametrize(("window", "given_up"), [(64, False), (8, True)])
def test_values_that_decide_what_is_computed(window: int, given_up: bool, traces: list[LayerKinds | None]) -> None:
    far = torch.arange(64)[:, None] - torch.arange(64)[None, :]
    masks = [torch.where((far >= 0) & (far < w), 0.0, -1e9) for w in (64, 64, window)]
    trace_both(Model, Attending, values={f"layers.{i}.mask": mask for i, mask in enumerate(masks)})
    assert len(traces) == (3 if given_up else 2)
    assert given_up or repeats(traces) == 2
