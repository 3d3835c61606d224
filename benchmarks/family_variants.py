"""Drawn configurations of plain model types through icc: does what no published configuration has come out equal?

    python benchmarks/family_variants.py [--cases 20] [--seed 0] [TYPE ...]

Each case draws a type and, of the fields that its configuration has, the kind of rotary scaling, tied weights, biases,
windows on some layers, head counts and sizes (odd ones too), partial rotary embeddings, soft caps, experts and how they
are routed. The reference interpreter is compared with transformers' eager float32 logits. Exit code 1 where any differ.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

from families import NOISE, TOKENS, TOLERANCE, noise_of, random_model, reference

TYPES = (
    "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "olmo2", "stablelm", "starcoder2", "glm4",
    "cohere2", "granite", "mixtral", "qwen3_moe", "qwen2_moe", "deepseek_v3", "glm4_moe", "gpt_oss", "smollm3",
)  # fmt: skip
HEADS = ((6, 3), (5, 1), (4, 4), (6, 2), (7, 7))  # query heads, key heads


def _rope(draw: random.Random, dims: int, theta: float, share: float) -> dict[str, Any]:
    kinds: tuple[dict[str, Any], ...] = (
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 3.0},
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 8.0},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 16},
        {"rope_type": "longrope", "short_factor": [1.0] * dims, "long_factor": [1.0 + 0.3 * i for i in range(dims)],
         "original_max_position_embeddings": 16, "factor": 4.0},
    )  # fmt: skip
    return {"rope_theta": theta, **draw.choice(kinds), **({"partial_rotary_factor": share} if share < 1 else {})}


def drawn(model_type: str, draw: random.Random) -> Any:
    """A small configuration of the type, and what was drawn for it."""
    from transformers import AutoConfig

    plain = AutoConfig.for_model(model_type)
    heads, kv_heads = draw.choice(HEADS)
    head_dim, share = draw.choice((8, 16, 24)), 1.0
    given = getattr(plain, "rope_parameters", None)
    if isinstance(given, dict) and "partial_rotary_factor" in given:
        share = draw.choice((0.25, 0.5, 1.0))
    layers = draw.choice((2, 3))
    own = hasattr(plain, "head_dim")
    wanted: dict[str, Any] = {
        "vocab_size": 120, "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "head_dim": head_dim, "hidden_size": 48 if own else heads * head_dim, "intermediate_size": 40,
        "max_position_embeddings": 64, "tie_word_embeddings": draw.random() < 0.5,
        "attention_bias": draw.random() < 0.5, "mlp_bias": draw.random() < 0.5, "use_bias": draw.random() < 0.5,
        "sliding_window": draw.choice((None, 8)), "use_sliding_window": draw.random() < 0.5, "max_window_layers": 1,
        "layer_types": [draw.choice(("full_attention", "sliding_attention")) for _ in range(layers)],
        "attn_logit_softcapping": draw.choice((None, 5.0)), "final_logit_softcapping": draw.choice((None, 6.0)),
        "num_experts": 6, "num_local_experts": 6, "n_routed_experts": 6, "num_experts_per_tok": draw.choice((1, 2, 3)),
        "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24, "n_shared_experts": draw.choice((1, 2)),
        "n_group": draw.choice((1, 2)), "topk_group": 1, "norm_topk_prob": draw.random() < 0.5,
        "routed_scaling_factor": 1.5, "first_k_dense_replace": 1, "decoder_sparse_step": draw.choice((1, 2)),
        "q_lora_rank": draw.choice((None, 20)), "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
        "v_head_dim": 12, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "hidden_dropout": 0.0,
    }  # fmt: skip
    chosen = {name: value for name, value in wanted.items() if hasattr(plain, name)}
    if "layer_types" in chosen and "sliding_window" in chosen:
        chosen["layer_types"][-1], chosen["sliding_window"] = "full_attention", 8
    if "layer_types" in chosen and (plain.layer_types is None):
        del chosen["layer_types"]
    if "qk_rope_head_dim" in chosen:
        chosen |= {"head_dim": 8, "num_key_value_heads": heads}
    if isinstance(given, dict) and "rope_theta" in given and model_type != "phi3":
        dims = int((8 if "qk_rope_head_dim" in chosen else head_dim) * share) // 2
        chosen["rope_parameters"] = _rope(draw, dims, 10000.0, share)
    return AutoConfig.for_model(model_type, **chosen), chosen


def main(argv: list[str]) -> int:
    """Command line; 1 if logits of any case differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", default=TYPES)
    parser.add_argument("--cases", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    warnings.filterwarnings("ignore")
    import torch
    from icc.compiler.errors import IccError
    from icc.compiler.frontend.load import load_graph
    from icc.compiler.graph.interpret import interpret

    ids, wrong = torch.randint(3, 119, (TOKENS,), generator=torch.Generator().manual_seed(1)), 0
    for case in range(options.seed, options.seed + options.cases):
        draw = random.Random(case)
        model_type = options.types[case % len(options.types)]
        try:
            config, chosen = drawn(model_type, draw)
            model = random_model(config, "generate")
            expected = reference(model, ids)
        except Exception as error:  # a combination that the type does not have
            print(f"{case:3} {model_type:12} transformers: {str(error).splitlines()[0][:120]}", flush=True)
            continue
        with tempfile.TemporaryDirectory() as scratch:
            model.save_pretrained(Path(scratch) / "model")
            try:
                found = interpret(load_graph(Path(scratch) / "model"), ids.tolist())
            except IccError as error:
                print(f"{case:3} {model_type:12} refused: {error.message[:160]}", flush=True)
                continue
        error = float((found - expected).abs().max() / expected.abs().max())
        noise = (noise_of(model, ids, expected) or 0.0) if error > TOLERANCE else 0.0
        differs = error > max(TOLERANCE, NOISE * noise)
        wrong += differs
        print(
            f"{case:3} {model_type:12} {'DIFFERS' if differs else 'equal'} {error:.0e} (noise {noise:.0e})", flush=True
        )
        if differs:
            print(f"    {chosen}", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
