"""The layer that predicts the token after the next one, as a graph: published layer patterns of checkpoints, and GGUF
files, make the guesses of transformers' modules."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from draft_graphs import graph_with_layer, guesses
from icc.compiler.errors import TensorError, UnsupportedModel
from icc.compiler.frontend.mtp import load_mtp
from icc.compiler.frontend.source.source import open_source
from icc.compiler.graph.graph import Graph
from mtp_models import LAYOUTS, WithLayer, layouts, reference, save_with_mtp
from safetensors.torch import load_file, save_file
from sizes import usual

pytestmark = pytest.mark.slow

TEXT = [1, 5, 9, 33, 70, 2, 8, 61, 17, 99, 4, 4]
# llama.cpp's names after "blk.N.", gguf-py/gguf/constants.py
NEXTN = {
    "enorm": "nextn.enorm", "hnorm": "nextn.hnorm", "eh_proj": "nextn.eh_proj",
    "shared_head.norm": "nextn.shared_head_norm", "pre_fc_norm_embedding": "nextn.enorm",
    "pre_fc_norm_hidden": "nextn.hnorm", "fc": "nextn.eh_proj", "norm": "nextn.shared_head_norm",
}  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], WithLayer]:
    """A function that gives the checkpoint of a name, created once."""
    folder = tmp_path_factory.mktemp("mtp")
    configs = layouts()
    plain = configs["qwen3_5"].to_dict() | {"layer_types": ["full_attention"] * 2, "num_hidden_layers": 2}
    configs["qwen3_5-attention"] = type(configs["qwen3_5"])(**plain)
    return cache(lambda name: save_with_mtp(configs[name], folder / name, own=name.startswith("qwen")))


def check(path: Path, own: WithLayer) -> Graph:
    """Check a chain, and the first guess after each prefix of a text; returns the graph."""
    graph = graph_with_layer(path, "mtp")
    first, chain = guesses(graph, TEXT, 3)
    assert chain == reference(own, TEXT, 3)
    assert first == [reference(own, TEXT[: n + 1], 1)[0] for n in range(1, len(TEXT))]
    assert len(set(first)) > 4, "a layer that says nothing"
    return graph


@pytest.mark.parametrize("name", usual(LAYOUTS, "qwen3_5"))
def test_published_layer_patterns_guess_as_the_modules_do(name: str, made: Callable[[str], WithLayer]) -> None:
    own = made(name)
    check(own.checkpoint, own)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("eh_proj.weight", torch.zeros(64, 64), r"'eh_proj.weight': has shape \[64, 64\], the config says \[64, 128\]"),
        ("enorm.weight", torch.zeros(32), r"'enorm.weight': has shape \[32\], the config says \[64\]"),
        ("self_attn.q_proj.weight", None, r"self_attn.q_proj.weight': is missing from the checkpoint"),
    ],
)
def test_a_weight_of_the_layer_that_does_not_fit_is_named(
    name: str, value: torch.Tensor | None, words: str, made: Callable[[str], WithLayer], tmp_path: Path
) -> None:
    shutil.copytree(made("glm4_moe").checkpoint, tmp_path / "model")
    stored = load_file(tmp_path / "model" / "model.safetensors")
    del stored[f"model.layers.2.{name}"]
    save_file(
        stored | ({} if value is None else {f"model.layers.2.{name}": value}), tmp_path / "model/model.safetensors"
    )
    with pytest.raises(TensorError, match=rf"{words} \(in the layer that --spec mtp reads\)"):
        load_mtp(open_source(tmp_path / "model"), 64)


def test_a_weight_that_nobody_knows_is_not_left_out(made: Callable[[str], WithLayer], tmp_path: Path) -> None:
    shutil.copytree(made("qwen3_5-attention").checkpoint, tmp_path / "model")
    stored = load_file(tmp_path / "model" / "model.safetensors")
    further = {"mtp.layers.1.input_layernorm.weight": torch.ones(64)}  # a layer that is not read
    save_file(stored | further | {"mtp.fc.bias": torch.ones(64)}, tmp_path / "model/model.safetensors")
    with pytest.raises(UnsupportedModel, match=r"tensor 'eh_proj\.bias' is not known"):
        load_mtp(open_source(tmp_path / "model"), 64)


COPIES = ("nextn.embed_tokens", "nextn.shared_head_head")  # copies of the model's weights in some files


@pytest.mark.parametrize(
    ("name", "arch", "copies"), [("glm4_moe", "glm4moe", COPIES), ("qwen3_5-attention", "qwen35", ())]
)
def test_a_gguf_file_guesses_as_the_checkpoint_does(
    name: str, arch: str, copies: tuple[str, ...], made: Callable[[str], WithLayer], tmp_path: Path
) -> None:
    """The `nextn` tensors of a file like llama.cpp's conversion writes; weights shared with the model are stored
    once."""
    own = made(name)
    graph = check(write_gguf(own, arch, tmp_path / "model.gguf", copies), own)
    assert not any("embed_tokens" in name or "lm_head" in name for name in graph.weights if "draft_layer" in name)


def write_gguf(own: WithLayer, arch: str, path: Path, copies: tuple[str, ...] = ()) -> Path:
    """The checkpoint as a file: names and values are converted like llama.cpp's conversion/glm.py and
    conversion/qwen.py do."""
    config, layers = own.oracle.config, own.oracle.config.num_hidden_layers
    number = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == arch)
    table = gguf.get_tensor_name_map(number, layers + 1)
    writer = gguf.GGUFWriter(path, arch)
    experts: dict[str, dict[int, torch.Tensor]] = {}
    for name, value in load_file(own.checkpoint / "model.safetensors").items():
        renamed = name.replace("mtp.layers.0.", f"model.layers.{layers}.")
        if expert := re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)\.weight", renamed):
            experts.setdefault(f"{expert[1]}.{expert[3]}", {})[int(expert[2])] = value
            continue
        if arch == "qwen35" and name.endswith(("norm.weight", "norm_embedding.weight", "norm_hidden.weight")):
            value = value + 1
        _add(writer, _named(renamed, layers, table), value)
    for name, parts in experts.items():
        _add(writer, f"{table.get_name(name)}.weight", torch.stack([parts[i] for i in range(len(parts))]))
    for copy in copies:
        _add(writer, f"blk.{layers}.{copy}.weight", torch.zeros(config.vocab_size, config.hidden_size))
    _describe(writer, arch, config)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _named(name: str, layers: int, table: Any) -> str:
    part = name.removeprefix(f"model.layers.{layers}.").removeprefix("mtp.").removesuffix(".weight")
    if part + ".weight" != name and part in NEXTN:
        return f"blk.{layers}.{NEXTN[part]}.weight"
    if name.endswith("e_score_correction_bias"):
        return f"blk.{name.split('.')[2]}.exp_probs_b.bias"
    stem, _, end = name.rpartition(".")
    return f"{table.get_name(stem)}.{end}"


def _add(writer: Any, name: str, value: torch.Tensor) -> None:
    assert not name.startswith("None")
    writer.add_tensor(name, value.float().numpy())


def _describe(writer: Any, arch: str, config: Any) -> None:
    writer.add_block_count(config.num_hidden_layers + 1)
    writer.add_nextn_predict_layers(1)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim // 2)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    if arch == "glm4moe":
        writer.add_expert_count(config.n_routed_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_leading_dense_block_count(config.first_k_dense_replace)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        return
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
    writer.add_array(f"{arch}.attention.recurrent_layers", [False] * (config.num_hidden_layers + 1))
    writer.add_full_attention_interval(1)
