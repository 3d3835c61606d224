"""Every listed family through the frontend: the reference interpreter's logits equal those of transformers."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch
from icc.compiler.frontend.load import load_graph
from icc.compiler.graph.graph import Graph, attention_spec
from icc.compiler.graph.interpret import interpret
from icc.compiler.graph.tensor_types import type_of
from icc.compiler.ops import named_arguments
from sizes import soak
from transformers import LlamaConfig

pytestmark = pytest.mark.slow

TOLERANCE = 2e-5
IDS = torch.randint(3, 119, (21,), generator=torch.Generator().manual_seed(1)).tolist()
NAMES = """
    llama-yarn opt-post_norm_no_bias qwen3_moe-mixed_renormalized gptj-written_out_attention
    bamba-state_space recurrent_gemma-linear_recurrence rwkv-shifted_tokens
    llama4-chunks_and_scaled_inputs inkling-bias_of_queries
""".split()
# tests of engines run the same traces
COMPILED = """
    llama-mqa_tied_biases_llama3 gemma2 gemma3-odd_untied phi3-mha_partial_tied gpt2 gpt_neox opt mixtral
    gpt_oss-yarn_odd cohere-interleaved_rotary deepseek_v3-latent_grouped_routing
""".split()
# the special features of each are in the others; bloom is in test_alibi_becomes_slopes
OTHERS = """
    bloom-alibi falcon-written_out_mqa
    llama-dynamic qwen3-odd_tied_biases granite-multipliers
    llama llama-odd llama-mha mistral mistral-odd mistral-no_window_tied qwen2-window gemma2-no_caps phi3-longrope
    gpt2-untied_scaled_relu gpt_neo-local_attention qwen2 qwen2-tied_yarn qwen3 gemma2-odd gemma3 phi3 gpt2-odd
    gpt_neox-no_bias_tied mixtral-odd qwen3_moe gpt_oss lfm2-short_convolutions qwen3_next-delta_rule
    llama-linear gpt_neox-sequential_full_rotary opt-projected_untied mixtral-top1_window kimi_linear-decay_per_row
    jamba-selective_scan longcat_flash-experts_that_are_the_token deepseek_v32-index deepseek_v32-picked_tokens
    xlstm-matrix_memory
    minimax-lightning_attention jetmoe-experts_that_ask zamba-heads_of_scans zaya-grouped_convolutions
    inkling2-windows_of_taps xlnet-shifted_rows gemma3n-sparse_activations doge-bias_of_keys
""".split()


# rotary tables are chosen by the longest sequence, while the reference gets a short one; an index that picks as many
# tokens as there are need not be computed
SHORT = {"phi3-longrope": 32, "deepseek_v32-index": 64}


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference, as a share of the largest logit."""
    assert found.shape == expected.shape
    assert expected.std() > 1e-3, "the reference says nothing"
    return float((found - expected).abs().max() / expected.abs().max())


def check(tiny: ModuleType, name: str, path: Path, max_seq_len: int | None = None, **options: object) -> Graph:
    """Save, trace, interpret and compare one configuration."""
    torch.set_num_threads(1)
    model = tiny.save_tiny(tiny.tiny_configs()[name], path, **options)
    graph = load_graph(path, max_seq_len)
    assert relative_error(interpret(graph, IDS), tiny.reference_logits(model, IDS)) < TOLERANCE
    return graph


def test_names_are_complete(tiny: ModuleType) -> None:
    assert sorted(NAMES + COMPILED + OTHERS) == sorted(tiny.tiny_configs())


@pytest.mark.parametrize("name", [*NAMES, *soak(*COMPILED, *OTHERS)])
def test_logits_equal_transformers(tiny: ModuleType, name: str, tmp_path: Path) -> None:
    check(tiny, name, tmp_path, max_seq_len=SHORT.get(name))


def test_a_module_as_wide_as_nothing_adds_nothing(tiny: ModuleType, tmp_path: Path) -> None:
    """For instance shared experts of width 0; no product over zero elements reaches a back end."""
    model = tiny.save_tiny(LlamaConfig(**{**tiny.BASE, "intermediate_size": 0}), tmp_path)
    graph = load_graph(tmp_path)
    assert relative_error(interpret(graph, IDS), tiny.reference_logits(model, IDS)) < TOLERANCE
    assert all(0 not in type_of(node).shape for node in graph.nodes if node.op == "call_function" and node.users)


def test_longrope_is_chosen_by_the_longest_sequence(tiny: ModuleType, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    model = tiny.save_tiny(tiny.tiny_configs()["phi3-longrope"], tmp_path)
    ids = (IDS * 3)[:48]
    graph = load_graph(tmp_path, 128)
    assert relative_error(interpret(graph, ids), tiny.reference_logits(model, ids)) < TOLERANCE


@pytest.mark.parametrize("dtype", ["bfloat16", *soak("float16")])
@pytest.mark.parametrize("name", ["qwen3_moe", *soak("llama-odd", "gpt2")])
def test_half_precision_checkpoints(tiny: ModuleType, name: str, dtype: str, tmp_path: Path) -> None:
    graph = check(tiny, name, tmp_path, dtype=dtype)
    assert graph.info.dtype == getattr(torch, dtype)


@pytest.mark.parametrize("name", ["mixtral", *soak("llama", "gemma2")])
def test_sharded_checkpoints(tiny: ModuleType, name: str, tmp_path: Path) -> None:
    check(tiny, name, tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2


def test_window_longer_than_the_trace_is_kept(tiny: ModuleType, tmp_path: Path) -> None:
    graph = check(tiny, "gpt_neo-local_attention", tmp_path)
    assert [attention_spec(n).mask.window for n in graph.attention_nodes] == [0, 6]


def test_alibi_becomes_slopes(tiny: ModuleType, tmp_path: Path) -> None:
    graph = check(tiny, "bloom-alibi", tmp_path)
    calls = graph.attention_nodes
    slopes = graph.weight(named_arguments(calls[0])["alibi"]).load()
    assert len(calls) == 2 and slopes.shape == (3,) and bool((slopes > 0).all())


def test_each_attention_layer_has_its_own_cache(tiny: ModuleType, tmp_path: Path) -> None:
    graph = check(tiny, "llama", tmp_path)
    assert [attention_spec(n).layer for n in graph.attention_nodes] == [0, 1]


def test_positions_that_do_not_start_at_zero_are_the_models_own(tiny: ModuleType, tmp_path: Path) -> None:
    graph = check(tiny, "opt", tmp_path)  # its table has two rows before position 0
    assert graph.input("positions") is not None
