"""GGUF files as models: the graph's logits are those of transformers with the values of the file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from building import build
from gguf_models import write_model
from icc.compiler.errors import TensorError, UnsupportedModel
from icc.compiler.frontend.load import load_graph
from icc.compiler.graph.graph import Graph
from icc.compiler.graph.interpret import interpret
from icc.compiler.ops import OPS
from icc.compiler.weights.formats.ggml import GGML_FORMATS
from icc.compiler.weights.handles import QuantizedWeight, RoundedWeight
from icc.passes import pipelines
from icc.passes.base import PassContext
from icc.passes.manager import run_passes
from icc.runtime.format.manifest import Limits
from sizes import soak

IDS = np.random.default_rng(0).integers(3, 119, 13).tolist()
PRODUCTS = [OPS[name].overload for name in ("linear", "expert_linear")]
KINDS = [name.upper() for name in sorted(GGML_FORMATS)]
WIDE = {
    "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 120, "max_position_embeddings": 128, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def each_kind() -> Callable[[str], str]:
    """A function that gives each tensor the next format in turn."""
    found: dict[str, str] = {}
    return lambda name: found.setdefault(name, KINDS[len(found) % len(KINDS)])


def make(config: Any, arch: str, path: Path, kind_of: Callable[[str], str], **options: Any) -> Any:
    """Write a random model; returns transformers' model with the file's values."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.08) if parameter.dim() > 1 else parameter.data.add_(0.1)
    return write_model(model, arch, path, kind_of, **options)


def logits(model: Any) -> np.ndarray:
    with torch.no_grad():
        return model(input_ids=torch.tensor([IDS]), use_cache=False).logits[0].numpy()


def error(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def stored(graph: Graph) -> set[str]:
    return {w.describe().split("[")[0] for w in graph.weights.values()}


@pytest.fixture(scope="module")
def every_format(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray]:
    """A file of a llama that has all formats, and its logits."""
    from transformers import LlamaConfig

    path = tmp_path_factory.mktemp("gguf") / "all.gguf"
    config = LlamaConfig(**{**WIDE, "num_hidden_layers": 3})  # 23 matrices
    return path, logits(make(config, "llama", path, each_kind()))


def test_a_model_of_all_formats(every_format: tuple[Path, np.ndarray]) -> None:
    path, expected = every_format
    graph = load_graph(path)
    assert {*GGML_FORMATS} <= stored(graph) <= {*GGML_FORMATS, "f32", "i64"}
    assert error(interpret(graph, IDS).numpy(), expected) < 2e-5


@pytest.mark.soak
def test_all_formats_in_the_interpreted_plan(every_format: tuple[Path, np.ndarray]) -> None:
    path, _ = every_format
    engine = build(path, limits=Limits(max_seq_len=20, max_batch_size=2, max_step_tokens=16), block_size=4)
    assert {f"g{name}" for name in GGML_FORMATS} <= {w.format for w in engine.program.weights.values()}
    found, expected = engine.llm().logits(IDS), interpret(engine.graph, IDS).numpy()
    assert error(found, expected) < 0.02  # activations are bfloat16


def test_a_quantization_that_is_asked_for_starts_from_the_values(every_format: tuple[Path, np.ndarray]) -> None:
    graph = load_graph(every_format[0])
    for phase in (pipelines.canonicalize(), pipelines.quantize("rtn4", "int8", (), ())):
        run_passes(graph, phase, PassContext())
    assert {"q4g128", "q8g128"} <= stored(graph)
    rounded = [w for w in graph.weights.values() if isinstance(w, RoundedWeight)]
    assert len(rounded) == 22 and all(isinstance(w.source, QuantizedWeight) for w in rounded)
    assert w_snr(rounded[0]) > 15


def w_snr(weight: RoundedWeight) -> float:
    """The signal-to-noise ratio after rounding, in dB."""
    weight.parts()
    return weight.snr_db or 0.0


FAMILIES = ["gemma3", "qwen3moe"]
OTHERS = soak("gpt2", "qwen2-tied", "llama-biases_tied", "qwen2", "qwen3", "gemma2", "phi3")


def family(name: str) -> tuple[Any, str]:
    import transformers as t

    heads = {**WIDE, "head_dim": 64}
    gemma = {**heads, "sliding_window": 8, "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 64}
    gpt2 = {"n_embd": 256, "n_layer": 2, "n_head": 4, "vocab_size": 120, "n_positions": 64}
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "norm_topk_prob": True}
    configs = {
        "qwen2": lambda: t.Qwen2Config(**WIDE),
        "qwen2-tied": lambda: t.Qwen2Config(**WIDE, tie_word_embeddings=True),
        "qwen3": lambda: t.Qwen3Config(**heads),
        "gemma2": lambda: t.Gemma2Config(**gemma),
        "gemma3": lambda: t.Gemma3TextConfig(**gemma),
        "gpt2": lambda: t.GPT2Config(**gpt2, bos_token_id=1, eos_token_id=2),
        "qwen3moe": lambda: t.Qwen3MoeConfig(**heads, **moe),
        "llama-biases_tied": lambda: t.LlamaConfig(
            **WIDE, tie_word_embeddings=True, attention_bias=True, mlp_bias=True
        ),
        "phi3": lambda: t.Phi3Config(**WIDE),
    }
    return configs[name](), name.split("-")[0]


@pytest.mark.parametrize("name", [*FAMILIES, *OTHERS])
def test_families(name: str, tmp_path: Path) -> None:
    config, arch = family(name)
    path = tmp_path / "m.gguf"
    model = make(config, arch, path, lambda tensor: "Q4_K" if "ffn" in tensor or "attn" in tensor else "Q6_K")
    graph = load_graph(path, 64)
    for phase in (pipelines.canonicalize(), pipelines.attention(), pipelines.fuse()):
        run_passes(graph, phase, PassContext())
    assert error(interpret(graph, IDS).numpy(), logits(model)) < 3e-5
    read = [n.args[1] for n in graph.nodes if n.target in PRODUCTS]
    kinds = {graph.weights[str(n.target)].describe().split("[")[0] for n in read}
    assert kinds - {"f32"} == {"q4_k", "q6_k"} and len(read) >= 9
    assert ("f32" in kinds) == (arch == "qwen3moe")  # a router


@pytest.mark.parametrize("kind", ["BF16", *soak("F16", "F32", "Q8_0")])
def test_dense_types(kind: str, tmp_path: Path) -> None:
    from transformers import LlamaConfig

    path = tmp_path / "m.gguf"
    model = make(LlamaConfig(**WIDE), "llama", path, lambda tensor: kind)
    graph = load_graph(path, 64)
    assert kind.lower() in stored(graph)
    assert error(interpret(graph, IDS).numpy(), logits(model)) < 2e-5


def test_rotary_factors_that_are_a_tensor(tmp_path: Path) -> None:
    from transformers import LlamaConfig

    scaled = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0}
    scaled |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    config, path = LlamaConfig(**WIDE, rope_parameters=scaled), tmp_path / "m.gguf"
    model = make(config, "llama", path, lambda tensor: "Q8_0", metadata=lambda w: w.add_tensor(
        "rope_freqs.weight", (10000.0 ** -(np.arange(32) / 32) / _frequencies(config)).astype(np.float32)
    ))  # fmt: skip
    assert error(interpret(load_graph(path, 64), IDS).numpy(), logits(model)) < 2e-5


def _frequencies(config: Any) -> np.ndarray:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    return ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))[0].numpy()


def test_what_no_model_has_is_refused_by_name(tmp_path: Path) -> None:
    from transformers import LlamaConfig

    path = tmp_path / "m.gguf"
    make(LlamaConfig(**WIDE), "llama", path, lambda tensor: "Q8_0", metadata=lambda w: w.add_tensor(
        "blk.0.attn_sub_norm.weight", np.ones(256, np.float32)
    ))  # fmt: skip
    with pytest.raises(TensorError, match=r"'blk\.0\.attn_sub_norm\.weight': is in the file, and"):
        load_graph(path)
    writer = gguf.GGUFWriter(path, "blip")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(UnsupportedModel, match="architecture 'blip', which icc has no table for"):
        load_graph(path)
