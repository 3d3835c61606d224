"""Small graphs: built by hand, and traced from tiny transformers models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from icc.compiler.frontend.load import load_graph
from icc.compiler.graph.graph import Graph, ModelInfo
from icc.compiler.graph.tensor_types import TensorType
from icc.compiler.ops import OPS
from icc.compiler.weights.handles import Constant
from icc.passes.base import PassContext
from icc.passes.manager import run_passes
from icc.passes.pipelines import canonicalize
from torch import Tensor, fx

VOCAB = 48


class Builder:
    """A graph over token ids, written op by op; `finish` sets the output."""

    def __init__(self, seed: int = 0) -> None:
        self.random = torch.Generator().manual_seed(seed)
        info = ModelInfo("Test", VOCAB, 64, 1, 0, None, torch.float32)
        self.dtype = torch.float32
        self.graph = Graph(fx.Graph(), {}, info, max_seq_len=64)
        self.tokens = self.graph.fx.placeholder("token_ids")
        self.tokens.meta["type"] = TensorType("tokens", (), torch.int64)

    def weight(self, name: str, *shape: int, scale: float = 0.2) -> fx.Node:
        return self.constant(name, torch.randn(*shape, generator=self.random) * scale)

    def constant(self, name: str, value: Tensor) -> fx.Node:
        return self.graph.add_weight(name, Constant(value.to(self.dtype)))

    def op(self, name: str, *args: object) -> fx.Node:
        return self.graph.call(OPS[name].overload, *args)

    def aten(self, name: str, *args: object) -> fx.Node:
        packet, _, overload = name.partition(".")
        return self.graph.call(getattr(getattr(torch.ops.aten, packet), overload or "default"), *args)

    def linear(self, x: fx.Node, name: str, n: int, k: int, bias: bool = False) -> fx.Node:
        return self.op("linear", x, self.weight(name, n, k), self.weight(name + ".bias", n) if bias else None)

    def embed(self, width: int) -> fx.Node:
        return self.op("embedding", self.tokens, self.weight("embed", VOCAB, width, scale=1.0))

    def finish(self, out: fx.Node) -> Graph:
        self.graph.returns(logits=out)
        return self.graph


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """One thread: tensors are tiny here, and more threads would only slow each other down."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def builder() -> Builder:
    return Builder()


@pytest.fixture
def new_builder() -> Callable[[int], Builder]:
    return Builder


def _configs() -> dict[str, object]:
    import transformers as hf

    base = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    base |= {"vocab_size": 120, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    opt = {k: v for k, v in base.items() if k != "intermediate_size"} | {"ffn_dim": 96, "word_embed_proj_dim": 64}
    return {
        "llama": hf.LlamaConfig(**base, num_key_value_heads=2, attention_bias=True, tie_word_embeddings=True),
        "gemma2": hf.Gemma2Config(**base, num_key_value_heads=2, head_dim=16, sliding_window=8),
        "opt": hf.OPTConfig(**opt),
        "gpt2": hf.GPT2Config(n_embd=64, n_layer=2, n_head=4, vocab_size=120, n_positions=64),
        "mixtral": hf.MixtralConfig(**base, num_key_value_heads=2, num_local_experts=4),
    }


FAMILIES = ("llama", "gemma2", "opt", "gpt2", "mixtral")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory of a tiny random checkpoint of a family, with norm weights that are not all one."""
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        if family not in made:
            from transformers import AutoModelForCausalLM

            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(_configs()[family], dtype=torch.float32)
            for parameter in model.parameters():
                noise = torch.randn_like(parameter)
                parameter.data.copy_(noise * 0.15 if parameter.dim() > 1 else parameter.data + noise * 0.2)
            made[family] = tmp_path_factory.mktemp(family)
            model.save_pretrained(made[family])
        return made[family]

    return make


@pytest.fixture(scope="session")
def traced(checkpoint: Callable[[str], Path]) -> Callable[[str], Graph]:
    """A canonical graph of a tiny model of that family; each caller gets its own copy."""
    made: dict[str, Graph] = {}

    def load(family: str) -> Graph:
        if family not in made:
            made[family] = load_graph(checkpoint(family))
            run_passes(made[family], canonicalize(), PassContext())
        first = made[family]
        return replace(first, fx=deepcopy(first.fx), weights=dict(first.weights), facts=set(first.facts))

    return load
