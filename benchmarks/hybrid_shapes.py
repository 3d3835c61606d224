"""Layers with the widths of published models, for hybrid.py: as transformers and as a GGUF file name them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

VOCAB = 8192
Rows = Iterator[tuple[str, tuple[int, ...]]]


@dataclass(frozen=True)
class Shape:
    """A model of a few layers. config: transformers' arguments. arch, keys: the GGUF file's architecture and metadata.
    blocks: the types of its matrices that are not Q4_0, by the ends of their names. group: the group size of icc's
    codes; 0 if icc compiles the GGUF file itself: config then has only hidden_size, num_hidden_layers,
    tie_word_embeddings and num_experts_per_tok."""

    kind: str
    config: dict[str, Any]
    arch: str
    keys: dict[str, int | list[int]] = field(default_factory=dict)
    group: int = 128
    blocks: dict[str, str] = field(default_factory=dict)

    @property
    def width(self) -> int:
        return self.config["hidden_size"]

    def rows(self) -> Rows:
        """Yield the name and shape, rows first, of each tensor of the GGUF file; a shape that ends in 0: float32."""
        yield "token_embd.weight", (VOCAB, self.width)
        yield "token_embd_norm.weight" if self.arch == "lfm2" else "output_norm.weight", (self.width,)
        if not self.config["tie_word_embeddings"]:
            yield "output.weight", (VOCAB, self.width)
        for layer in range(self.config["num_hidden_layers"]):
            yield from ((f"blk.{layer}.{name}", size) for name, size in LAYERS[self.arch](self, layer))


def mamba2(shape: Shape, layer: int) -> Rows:
    inner, groups, heads = 2 * WIDTH, 2 * 128, 64
    yield "attn_norm.weight", (WIDTH,)
    yield "ssm_in.weight", (2 * inner + groups + heads, WIDTH)
    yield "ssm_conv1d.weight", (inner + groups, 4, 0)
    yield "ssm_conv1d.bias", (inner + groups,)
    yield "ssm_dt.bias", (heads,)
    yield "ssm_a", (heads, 1, 0)
    yield "ssm_d", (heads, 1, 0)
    yield "ssm_norm.weight", (1, inner, 0)
    yield "ssm_out.weight", (WIDTH, inner)


def lfm2(shape: Shape, layer: int) -> Rows:
    yield "attn_norm.weight", (WIDTH,)
    yield "ffn_norm.weight", (WIDTH,)
    for name in ("gate", "up"):
        yield f"ffn_{name}.weight", (8192, WIDTH)
    yield "ffn_down.weight", (WIDTH, 8192)
    if shape.config["layer_types"][layer] == "conv":
        yield "shortconv.conv.weight", (WIDTH, 3, 0)
        yield "shortconv.in_proj.weight", (3 * WIDTH, WIDTH)
        yield "shortconv.out_proj.weight", (WIDTH, WIDTH)
        return
    yield "attn_q_norm.weight", (64,)
    yield "attn_k_norm.weight", (64,)
    for name, size in (("q", WIDTH), ("k", 512), ("v", 512), ("output", WIDTH)):
        yield f"attn_{name}.weight", (size, WIDTH)


def qwen3next(shape: Shape, layer: int) -> Rows:
    yield "attn_norm.weight", (WIDTH,)
    yield "post_attention_norm.weight", (WIDTH,)
    if shape.config["layer_types"][layer] == "full_attention":
        yield "attn_q_norm.weight", (256,)
        yield "attn_k_norm.weight", (256,)
        for name, size in (("q", 8192), ("k", 512), ("v", 512)):
            yield f"attn_{name}.weight", (size, WIDTH)
        yield "attn_output.weight", (WIDTH, 4096)
    else:
        yield "attn_qkv.weight", (8192, WIDTH)
        yield "attn_gate.weight", (4096, WIDTH)
        yield "ssm_conv1d.weight", (8192, 4, 0)
        yield "ssm_dt.bias", (32,)
        yield "ssm_a", (32,)
        yield "ssm_ba.weight", (64, WIDTH)
        yield "ssm_norm.weight", (128,)
        yield "ssm_out.weight", (WIDTH, 4096)
    yield "ffn_gate_inp.weight", (EXPERTS, WIDTH, 0)
    yield "ffn_gate_inp_shexp.weight", (WIDTH,)
    for name in ("gate", "up"):
        yield f"ffn_{name}_exps.weight", (EXPERTS, 512, WIDTH)
        yield f"ffn_{name}_shexp.weight", (512, WIDTH)
    yield "ffn_down_exps.weight", (EXPERTS, WIDTH, 512)
    yield "ffn_down_shexp.weight", (WIDTH, 512)


def experts(shape: Shape) -> Rows:
    """Yield the router and the three matrices of the experts."""
    count, inner = shape.keys["expert_count"], shape.keys["expert_feed_forward_length"]
    assert isinstance(count, int) and isinstance(inner, int)
    yield "ffn_gate_inp.weight", (count, shape.width, 0)
    for name in ("gate", "up"):
        yield f"ffn_{name}_exps.weight", (count, inner, shape.width)
    yield "ffn_down_exps.weight", (count, shape.width, inner)


def qwen3moe(shape: Shape, layer: int) -> Rows:
    yield "attn_norm.weight", (WIDTH,)
    yield "ffn_norm.weight", (WIDTH,)
    yield "attn_q_norm.weight", (128,)
    yield "attn_k_norm.weight", (128,)
    for name, size in (("q", 4096), ("k", 512), ("v", 512)):
        yield f"attn_{name}.weight", (size, WIDTH)
    yield "attn_output.weight", (WIDTH, 4096)
    yield from experts(shape)


def gpt_oss(shape: Shape, layer: int) -> Rows:
    yield "attn_norm.weight", (2880,)
    yield "post_attention_norm.weight", (2880,)
    for name, size in (("q", 4096), ("k", 512), ("v", 512)):
        yield f"attn_{name}.weight", (size, 2880)
        yield f"attn_{name}.bias", (size,)
    yield "attn_output.weight", (2880, 4096)
    yield "attn_output.bias", (2880,)
    yield "attn_sinks.weight", (64,)
    yield from experts(shape)
    yield "ffn_gate_inp.bias", (32,)
    for name in ("gate", "up", "down"):
        yield f"ffn_{name}_exps.bias", (32, 2880, 0)


LAYERS = {"mamba2": mamba2, "lfm2": lfm2, "qwen3next": qwen3next, "qwen3moe": qwen3moe, "gpt-oss": gpt_oss}
EXPERTS, WIDTH = 16, 2048
COMMON = {"vocab_size": VOCAB, "hidden_size": WIDTH, "tie_word_embeddings": True, "max_position_embeddings": 4096}
_SSM = {"ssm.conv_kernel": 4, "ssm.inner_size": 4096, "ssm.state_size": 128}
SHAPES = {
    "mamba2": Shape(
        "mamba2",
        {**COMMON, "num_heads": 64, "head_dim": 64, "state_size": 128, "n_groups": 1, "num_hidden_layers": 6},
        "mamba2",
        {**_SSM, "ssm.time_step_rank": 64, "ssm.group_count": 1, "feed_forward_length": 0, "attention.head_count": 0},
    ),
    "lfm2": Shape(
        "lfm2",
        {
            **COMMON, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8,
            "block_auto_adjust_ff_dim": False, "num_hidden_layers": 4,
            "layer_types": ["conv", "conv", "full_attention", "conv"],
        },
        "lfm2",
        {
            "feed_forward_length": 8192, "attention.head_count": 32, "attention.head_count_kv": [0, 0, 8, 0],
            "shortconv.l_cache": 3,
        },
    ),
    "qwen3next": Shape(
        "qwen3_next",
        {
            **COMMON, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "num_experts": EXPERTS,
            "num_experts_per_tok": 10, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
            "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
            "linear_value_head_dim": 128, "num_hidden_layers": 4,
            "layer_types": [*["linear_attention"] * 3, "full_attention"],
        },
        "qwen3next",
        {
            **_SSM, "ssm.time_step_rank": 32, "ssm.group_count": 16, "attention.head_count": 16,
            "attention.head_count_kv": 2, "attention.key_length": 256, "attention.value_length": 256,
            "feed_forward_length": 512, "expert_count": EXPERTS, "expert_used_count": 10,
            "expert_feed_forward_length": 512, "expert_shared_feed_forward_length": 512, "rope.dimension_count": 64,
        },
        group=32,
    ),
    "qwen3moe": Shape(  # Qwen3-30B-A3B, four of 48 layers, all experts
        "qwen3_moe",
        {**COMMON, "num_hidden_layers": 4, "num_experts_per_tok": 8},
        "qwen3moe",
        {
            "attention.head_count": 32, "attention.head_count_kv": 4, "attention.key_length": 128,
            "attention.value_length": 128, "feed_forward_length": 6144, "expert_count": 128, "expert_used_count": 8,
            "expert_feed_forward_length": 768,
        },
        group=0,
    ),
    "gpt-oss": Shape(  # gpt-oss-20b, four of 24 layers
        "gpt_oss",
        {**COMMON, "hidden_size": 2880, "tie_word_embeddings": False, "num_hidden_layers": 4, "num_experts_per_tok": 4},
        "gpt-oss",
        {
            "attention.head_count": 64, "attention.head_count_kv": 8, "attention.key_length": 64,
            "attention.value_length": 64, "attention.sliding_window": 128, "feed_forward_length": 2880,
            "expert_count": 32, "expert_used_count": 4, "expert_feed_forward_length": 2880,
        },
        group=0,
        blocks={"_exps.weight": "MXFP4", "": "Q8_0"},
    ),
}  # fmt: skip
