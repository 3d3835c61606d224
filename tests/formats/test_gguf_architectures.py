"""Architectures of GGUF files as llama.cpp's converter writes them, recorded without values: the configuration is the
model's, and every tensor is used. benchmarks/gguf_architectures.py, which recorded them, compares logits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from icc.compiler.frontend.source.gguf.arrangement import Arrangement
from icc.compiler.frontend.source.gguf.config import architecture, architecture_of, read_config
from icc.compiler.frontend.source.gguf.tensors import weights_of
from icc.compiler.frontend.source.model import build_meta_model
from icc.compiler.weights.formats.ggml import GGML_FORMATS
from icc.compiler.weights.handles import Constant, PackedWeight
from icc.runtime.format.gguf import GgufContainer, GgufTensor
from sizes import soak

RECORDED: dict[str, Any] = json.loads((Path(__file__).parent / "data/gguf_architectures.json").read_text())
FIRST = ["falcon-new", "gemma4", "gpt-oss", "deepseek2-v3", "qwen3next"]
# fields without effect on logits, or that llama.cpp drops: how a width was derived, tokens, the checkpoint's dtype
FREE = {
    "architectures", "dtype", "bos_token_id", "eos_token_id", "pad_token_id", "transformers_version", "chunk_size",
    "block_multiple_of", "block_auto_adjust_ff_dim", "_name_or_path", "num_ln_in_parallel_attn",
    "max_position_embeddings",
    "multi_query", "per_layer_config", "_sliding_window_pattern", "sliding_window_pattern", "n_ctx", "global_head_dim",
    "head_dim", "mamba_chunk_size", "num_global_key_value_heads", "vocab_size_per_layer_input",
}  # fmt: skip
# expressed differently: factors as a tensor or in the weights, another model type with the same layers, a width after
# rounding to its multiple, a period for something that occurs once
OTHERWISE = (
    "llama-tied-llama3", "mistral", "ministral3", "gpt2", "falcon", "lfm2", "falcon-h1", "jamba", "nemotron-h-moe",
    "apertus", "solar-open", "youtu", "glm4moelite", "qwen35moe",
)  # fmt: skip


def as_file(name: str, folder: Path) -> GgufContainer:
    """A file whose tensors have the recorded values, or none."""
    found, path = RECORDED[name], folder / "m.gguf"
    metadata = {k: np.array(v) if isinstance(v, list) else v for k, v in found["metadata"].items()}
    content, tensors = b"", {}
    for tensor, (shape, values) in found["tensors"].items():
        raw = bytes.fromhex(values)
        tensors[tensor] = GgufTensor(tensor, path, len(content), len(content) + len(raw), tuple(shape), "f32")
        content += raw
    path.write_bytes(content)
    return GgufContainer(path, metadata, tensors)


def close(found: Any, wanted: Any) -> bool:
    """Whether both are equal; numbers may differ by the rounding of the file's float32."""
    if isinstance(wanted, dict):
        return all(close(found.get(key), value) for key, value in wanted.items())
    if isinstance(wanted, list):
        same = isinstance(found, list) and len(found) == len(wanted)
        return same and all(close(a, b) for a, b in zip(found, wanted, strict=True))
    return bool(found == pytest.approx(wanted, rel=1e-6) if isinstance(wanted, float) else found == wanted)


@pytest.mark.parametrize("name", [*FIRST, *soak(*(name for name in RECORDED if name not in FIRST))])
def test_configuration_and_places(name: str, tmp_path: Path) -> None:
    container = as_file(name, tmp_path)
    config = read_config(container)
    wanted, found = RECORDED[name]["config"], config.to_dict()
    differs = {k: (found.get(k), v) for k, v in wanted.items() if k not in FREE and not close(found.get(k), v)}
    assert not differs or name in OTHERWISE
    model = build_meta_model(config, False, "generate")
    sizes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    placed = weights_of(container, model, config)
    assert {name: tuple(weight.shape) for name, weight in placed.items()} == {name: sizes[name] for name in placed}


def arrangement(container: GgufContainer) -> Arrangement:
    own = architecture_of(container), architecture(container)
    return Arrangement(*own, container.tensors, read_config(container))


def test_experts_in_turns(tmp_path: Path) -> None:
    """gpt-oss: transformers interleaves gate and up, [in, out]; blocks are not decoded."""
    container, form = as_file("gpt-oss", tmp_path), GGML_FORMATS["mxfp4"]
    own = arrangement(container)
    values: list[Any] = []
    for seed in (1, 2):
        parts = {
            "codes": torch.randint(0, 16, (3, 5, 64), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
        }
        parts["exponents"] = torch.full((3, 5, 2), 120 + seed, dtype=torch.uint8)
        values.append(PackedWeight.pack(parts, form, (3, 5, 64)))
    gate, up = (value.load() for value in values)
    wanted = torch.stack([gate, up], 2).flatten(1, 2).mT
    assert torch.equal(own.experts(values).load(), wanted)
    assert torch.equal(own.experts([Constant(gate), Constant(up)]).load(), wanted)
    biases = own.experts([Constant(gate[..., 0]), Constant(up[..., 0])])
    assert torch.equal(biases.load(), torch.stack([gate[..., 0], up[..., 0]], -1).flatten(1))
    assert torch.equal(own.down(values[0]).load(), gate.mT)


def test_rows_of_queries_keys_and_values(tmp_path: Path) -> None:
    """Falcon: the converter's permutation is undone."""
    container = as_file("falcon-new", tmp_path)
    numbers = torch.arange(128.0)[:, None].expand(128, 64)
    grouped = numbers.view(2, 4, 16, 64)  # two key heads, each with two query heads, keys, values
    moved = torch.cat([grouped[:, :-2].reshape(64, 64), *(grouped[:, [i]].reshape(32, 64) for i in (-2, -1))])
    found = arrangement(container).undone(Constant(moved), "blk.0.attn_qkv.weight")
    assert torch.equal(found.load(), numbers)


def test_latent_keys_and_values(tmp_path: Path) -> None:
    container = as_file("deepseek2-v3", tmp_path)
    keys, values = torch.randn(4, 16, 16), torch.randn(4, 12, 16)
    found: dict[str, Any] = {"a.kv_b_proj.weight.k": Constant(keys), "a.kv_b_proj.weight.v": Constant(values)}
    joined = arrangement(container).latent(found)["a.kv_b_proj.weight"].load()
    assert not found and torch.equal(joined, torch.cat([keys.mT, values], 1).reshape(4 * 28, 16))
