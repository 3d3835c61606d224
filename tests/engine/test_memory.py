"""`icc inspect --memory`: the stated bytes are those of an engine that is filled to the stated limit."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import icc
import pytest
from click.testing import CliRunner
from icc.compiler.cli import main
from icc.runtime.commands.filling import states_touched
from icc.runtime.executor.cpu import memory
from icc.runtime.format.kv import KVGroup, KVLayer, KVLayout, KVMemory
from icc.runtime.format.manifest import Limits
from sizes import soak

STEP = 512


class Load(NamedTuple):
    """A model type, values that override the tiny ones, options of its compile, and loads: (sequences, length, how many
    of these tokens are generated; 8 if missing). The first load is the engine's limit."""

    kind: str
    values: dict[str, Any]
    options: dict[str, Any]
    loads: tuple[tuple[int, ...], ...]


GEMMA = {"head_dim": 128, "max_position_embeddings": 32768, "num_hidden_layers": 6}
GEMMA |= {"layer_types": ["sliding_attention"] * 5 + ["full_attention"]}
LLAMA = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 2048}
DELTA = {
    "num_key_value_heads": 2, "head_dim": 128, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 48, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_num_key_heads": 4, "linear_num_value_heads": 8, "layer_types": ["linear_attention", "full_attention"],
    "max_position_embeddings": 2048,
}  # fmt: skip
SSD = {
    "num_key_value_heads": 2, "mamba_n_heads": 16, "mamba_d_head": 64, "mamba_expand": 16, "mamba_d_state": 128,
    "mamba_n_groups": 1, "mamba_chunk_size": 64, "attn_layer_indices": [1], "max_position_embeddings": 2048,
}  # fmt: skip
MLA = {
    "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128,
    "v_head_dim": 128, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1,
    "moe_intermediate_size": 48, "first_k_dense_replace": 1, "max_position_embeddings": 2048,
}  # fmt: skip
INDEX = {key: MLA[key] for key in MLA if key != "first_k_dense_replace"} | {
    "n_group": 1, "index_topk": 64, "index_n_heads": 16, "index_head_dim": 128, "mlp_layer_types": ["dense", "sparse"],
}  # fmt: skip
LRU = {
    "num_hidden_layers": 3, "num_key_value_heads": 1, "lru_width": 1024, "head_dim": 128, "attention_window_size": 40,
    "max_position_embeddings": 2048,
    "block_types": ["recurrent", "recurrent", "attention"],
}  # fmt: skip
SHORT = {"num_key_value_heads": 2, "hidden_size": 1024, "conv_L_cache": 4, "block_multiple_of": 16} | {
    "num_hidden_layers": 4, "layer_types": ["conv", "conv", "full_attention", "conv"], "max_position_embeddings": 2048,
}  # fmt: skip
DECODER = {"d_model": 512, "decoder_layers": 2, "decoder_attention_heads": 8, "decoder_ffn_dim": 96} | {
    "max_position_embeddings": 2048
}
WIDE = {  # caches so large that an error in their size shows beside everything else
    "windows": Load(
        "gemma3_text",
        {**GEMMA, "num_attention_heads": 8, "num_key_value_heads": 8, "sliding_window": 40},
        {},
        ((32, 256), (5, 100)),
    ),
    "windows at 32k": Load(
        "gemma3_text",
        {**GEMMA, "num_attention_heads": 2, "num_key_value_heads": 2, "sliding_window": 1024},
        {},
        ((1, 32768),),
    ),
    "latents": Load("deepseek_v3", MLA, {}, ((32, 512), (7, 200))),
    "latents of 8 bits": Load("deepseek_v3", MLA, {"kv_cache": "int8"}, ((32, 512), (7, 200))),
    "picked tokens": Load("deepseek_v32", INDEX, {}, ((32, 512), (7, 200))),
    "codes of 4 bits": Load("llama", LLAMA, {"kv_cache": "int4"}, ((16, 1024), (3, 700))),
    "codes of 2 bits": Load("llama", LLAMA, {"kv_cache": "int2"}, ((32, 1024), (3, 700))),
    "an encoder-decoder's decoder": Load("pegasus", DECODER, {}, ((8, 1024), (3, 700))),
    "streaming": Load("llama", LLAMA, {"kv_policy": "streaming:sinks=4,window=252"}, ((8, 1024), (3, 900))),
    "h2o": Load("llama", LLAMA, {"kv_policy": "h2o:budget=256,recent=64"}, ((8, 1024), (3, 700))),
    "snapkv": Load("llama", LLAMA, {"kv_policy": "snapkv:budget=256,recent=32"}, ((8, 1024, 800),)),
    "states": Load("qwen3_next", DELTA, {}, ((16, 512), (5, 100), (1, 40))),
    "states of 16 bits": Load("qwen3_next", DELTA, {"state_cache": "bf16"}, ((16, 512), (3, 300))),
    "short convolutions": Load("lfm2", SHORT, {}, ((16, 512), (4, 90))),
    "linear recurrences": Load("recurrent_gemma", LRU, {}, ((16, 512), (4, 90, 1))),  # prompts of the stated length
    "state spaces": Load("bamba", SSD, {}, ((16, 512), (4, 90, 1))),
}


def stated(engine: Path, *options: object) -> dict[str, Any]:
    done = CliRunner().invoke(main, ["inspect", str(engine), "--memory", "--json", *map(str, options)])
    assert done.exit_code == 0, done.output
    return json.loads(done.output)


def takes(engine: Path, sequences: int, length: int, answer: int = 8) -> int:
    """The bytes of a process that has filled the engine with this load."""
    filled = [sys.executable, Path(__file__).with_name("filled.py"), engine, *map(str, (sequences, length, answer))]
    return int(subprocess.run(filled, capture_output=True, check=True, text=True).stdout)


@pytest.mark.parametrize("name", soak(*WIDE))
def test_a_filled_cache_takes_what_is_stated(name: str, tiny: Any, tmp_path: Path) -> None:
    import transformers

    load = WIDE[name]
    config = transformers.AutoConfig.for_model(load.kind, **{**tiny.BASE, **load.values})
    tiny.save_tiny(config, tmp_path / "model")
    most, length, *_ = load.loads[0]
    limits = {"max_seq_len": length, "max_step_tokens": STEP, "max_batch_size": most}
    engine = icc.compile(tmp_path / "model", tmp_path / "engine", target="native", **limits, **load.options)
    found = {asked: (takes(engine, *asked), stated(engine, *options(asked))["total_bytes"]) for asked in load.loads}
    for asked, (taken, total) in found.items():
        print(f"{name} {asked}: {taken / 1e6:.1f} MB, stated {total / 1e6:.1f} ({100 * (total / taken - 1):+.2f} %)")
    for taken, total in found.values():
        assert taken == pytest.approx(total, rel=0.02)


@pytest.mark.soak
def test_an_engine_that_embeds_takes_what_is_stated(tmp_path: Path) -> None:
    import transformers

    config = transformers.ModernBertConfig(
        hidden_size=512, intermediate_size=768, num_hidden_layers=4, num_attention_heads=8, vocab_size=30000,
        max_position_embeddings=2048, pad_token_id=0, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2,
    )  # fmt: skip
    transformers.ModernBertModel(config).save_pretrained(tmp_path / "model")
    limits = {"max_seq_len": 2048, "max_step_tokens": 4096, "max_batch_size": 8}
    engine = icc.compile(tmp_path / "model", tmp_path / "engine", target="native", task="embed", **limits)
    for asked in ((8, 2048), (3, 300)):
        assert takes(engine, *asked, 0) == pytest.approx(stated(engine, *options(asked))["total_bytes"], rel=0.02)


def options(asked: tuple[int, ...]) -> tuple[object, ...]:
    return "--sequences", asked[0], "--length", asked[1]


def test_a_filled_engine_takes_what_is_stated(compiled: Callable[..., Any]) -> None:
    """An engine with states that other tests compile too."""
    engine = compiled("qwen3_next-delta_rule", max_step_tokens=48, max_batch_size=4).engine
    facts = stated(engine)
    assert (facts["sequences"], facts["length"]) == (4, 256)
    assert takes(engine, 4, 256) == pytest.approx(facts["total_bytes"], rel=0.02)
    paged, states = facts["kv_cache"]
    assert (
        states["states"] + states["checkpoints"] == 4 * (2 + 2) + 2
        and paged["bytes"] == paged["blocks"] * paged["block_bytes"]
    )
    with icc.load(engine) as llm:
        cache = llm.executor.device.cache
        assert paged["bytes"] + states["states_bytes"] + states["checkpoints_bytes"] == cache.nbytes
    for options, words in ((("--memory", "--sequences", "5"), "1 to 4"), (("--length", "9"), "add --memory")):
        refused = CliRunner().invoke(main, ["inspect", str(engine), *options])
        assert refused.exit_code == 2 and words in refused.output


def test_states_are_counted_as_steps_leave_them() -> None:
    """The numbers of blocks are those that a real engine of these sizes took."""
    layer, limits = KVLayer(2, 16, 16), Limits(512, 16, STEP)
    layout = KVLayout((KVGroup(32, "f32", {0: layer}), KVGroup(32, "f32", {1: KVLayer(state=64)}, "state", 2)))
    cache = KVMemory(layout, layout.blocks_needed(limits, 16))
    assert cache.num_blocks == (256, 66)
    for load, touched in (((512, 16), [249, 49]), ((100, 5), [20, 15]), ((40, 1), [2, 2]), ((1, 1), [1, 1])):
        assert states_touched(cache, Limits(*load, STEP)) == touched


def test_touched_memory_is_counted_in_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    mib = 1 << 20
    monkeypatch.setattr(memory, "read_text", lambda file: "always [madvise] never")
    assert memory.touched_bytes([(0, 1), (mib, 1), (3 * mib, 2 * mib)], 5 * mib) == 6 * mib
    assert memory.touched_bytes([(0, 1), (4 * mib, 1)], 5 * mib) == 4 * mib
    assert memory.touched_bytes([(4095, 2)], mib) == 8192
    monkeypatch.setattr(memory, "read_text", lambda file: "always madvise [never]")
    assert memory.touched_bytes([(0, 1), (4095, 2), (5 * mib - 1, 1)], 5 * mib) == 3 * 4096
    assert memory.touched_bytes([(5, 0)], mib) == 0
