"""Does everything compile for every GPU target? One layer of each kind of some models, every --quant, every KV cache.

    python benchmarks/gpu_matrix.py --minutes 20 [--models llama-8b] [--targets h100,b200] [--quants rtn4] [--kv int8]
    python benchmarks/gpu_matrix.py --minutes 60 --sample

Every --quant is compiled with the default KV cache, and every KV cache with unquantized weights: no kernel depends on
both. Values of --quant that store weights in one format have the same kernels, and are compiled once. Weights are
neither read nor written: config.json is enough. Results are kept in OUT.json, from which the next run continues; a run
starts no case after --minutes. OUT.md is made from OUT.json; a cell without a result says "not run".
--sample takes only the few cases of `sample`, which cover every model, target, storage of weights and KV cache.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_resources import LLAMA_8B, lowered, searched
from icc.compiler.backends.triton.objects.loops import loop_faults
from icc.compiler.kv_formats import AUTO, cache_options
from icc.compiler.quantization import QUANTIZATIONS
from icc.compiler.targets import TARGETS
from icc.runtime.errors import IccError

OUT = Path(__file__).with_name("results") / "gpu_matrix"
GPUS = [name for name, target in TARGETS.items() if target.backend != "cpu"]
CACHES = [name for name, said in cache_options().items() if name != AUTO and not said.startswith("the same")]
LLAMA = {**LLAMA_8B, "num_hidden_layers": 1}
# config.json of each model, with one layer of each kind
MODELS: dict[str, dict[str, Any]] = {
    "llama-8b": LLAMA,
    "llama-1b": {
        **LLAMA, "hidden_size": 2048, "intermediate_size": 8192, "head_dim": 64, "tie_word_embeddings": True,
    },
    "llama-70b": {**LLAMA, "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64},
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048,
        "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 1, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
        "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "vocab_size": 151936,
        "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "hidden_act": "silu", "dtype": "bfloat16",
        "tie_word_embeddings": False,
    },
    "deepseek-v3": {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": 7168,
        "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 2, "first_k_dense_replace": 1,
        "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 256,
        "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "norm_topk_prob": True,
        "routed_scaling_factor": 2.5, "vocab_size": 129280, "max_position_embeddings": 163840, "rms_norm_eps": 1e-6,
        "hidden_act": "silu", "dtype": "bfloat16", "tie_word_embeddings": False,
    },
    "gpt-oss": {
        "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": 2880,
        "intermediate_size": 2880, "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"],
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "num_local_experts": 32,
        "num_experts_per_tok": 4, "sliding_window": 128, "vocab_size": 201088, "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5, "hidden_act": "silu", "dtype": "bfloat16", "tie_word_embeddings": False,
    },
    "gemma-3": {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "hidden_size": 3840,
        "intermediate_size": 15360, "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"],
        "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256, "query_pre_attn_scalar": 256,
        "sliding_window": 1024, "vocab_size": 262208, "max_position_embeddings": 131072, "rms_norm_eps": 1e-6,
        "hidden_activation": "gelu_pytorch_tanh", "dtype": "bfloat16", "tie_word_embeddings": True,
    },
}  # fmt: skip
# A sample begins with the cases that users are most likely to compile.
FIRST = [
    *(("llama-8b", target, "awq4") for target in "h100 b200 rtx4090 a100 mi300x rtx5090 mi355x b300".split()),
    ("llama-1b", "h100", "none"), ("gpt-oss", "h100", "mxfp4"), ("qwen3-30b-a3b", "h100", "awq4"),
    ("deepseek-v3", "h100", "fp8"), ("gemma-3", "h100", "awq4"), ("llama-70b", "h100", "awq4"),
]  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One compile. stored: the format of the weights. kv: a KV cache, or "auto" for the default."""

    model: str
    target: str
    quant: str
    kv: str

    @property
    def stored(self) -> str:
        """The format of the weights, which decides on the kernels; "none" if they are not quantized."""
        found = QUANTIZATIONS[self.quant]
        return found.format if found else "none"

    @property
    def key(self) -> str:
        """The key of its result in the state."""
        return f"{self.model}/{self.target}/{self.stored}/{self.kv}"


def compiled(case: Case) -> dict[str, Any]:
    """The result of one case: the number of objects, the tilings that a check refused, the objects that spill, those
    with faulty loops and the faults, those with memory accesses that are not proven correct; or `error`."""
    target, began = TARGETS[case.target], time.perf_counter()
    kv = {} if case.kv == "auto" else {"kv_cache": case.kv}
    try:
        program, limits = lowered(MODELS[case.model], case.target, case.quant, max_seq_len=8192, **kv)
        made = searched(program, limits, target)
    except IccError as error:
        return {"error": re.sub(r"/\S*/model\b", case.model, error.message)}  # the folder of `lowered`
    except Exception as error:  # a defect of icc; the other cases continue
        return {"error": f"ends in {type(error).__name__}: {error}"}
    faults = {key: loop_faults(one.entry, one.loops, target.level) for key, one in made.compiled.items()}
    objects = made.compiled.values()
    return {
        "objects": len(objects),
        "refused": list(map(str, made.refused)),
        "spill": sum(one.spill_bytes > 0 for one in objects),
        "faults": [f"{key}: {'; '.join(found)}" for key, found in faults.items() if found],
        "unshown": sum(map(bool, made.faults.values())),
        "seconds": round(time.perf_counter() - began),
    }


def table(model: str, rows: Sequence[tuple[str, str]], state: dict[str, Any], notes: list[str]) -> Iterator[str]:
    """The table of a model: a row per --quant or KV cache, a column per target. notes: errors, numbered in cells."""
    yield from (f"## {model}\n", f"| --quant, KV cache | {' | '.join(GPUS)} |", f"|---|{'---|' * len(GPUS)}")
    for quant, kv in rows:
        cells = [_cell(state.get(Case(model, target, quant, kv).key), notes) for target in GPUS]
        yield f"| {quant}, {kv} | {' | '.join(cells)} |"
    yield ""


def _cell(found: dict[str, Any] | None, notes: list[str]) -> str:
    if found is None:
        return "not run"
    if "error" in found:
        if found["error"] not in notes:
            notes.append(found["error"])
        return f"**no** ({notes.index(found['error']) + 1})"
    marks = {"refused": len(found["refused"]), "spill": found["spill"], "faults": len(found["faults"])}
    return ", ".join([str(found["objects"]), *(f"{count} {what}" for what, count in marks.items() if count)])


def page(state: dict[str, Any]) -> str:
    """The Markdown page: all tables, and how many cases are compiled."""
    rows = [*((quant, "auto") for quant in QUANTIZATIONS), *(("none", kv) for kv in CACHES)]
    wanted = {case.key for case in cases(list(MODELS), GPUS, list(QUANTIZATIONS), CACHES)}
    notes: list[str] = []
    begun = {key.split("/")[0] for key in state}
    tables = [line for model in MODELS if model in begun for line in table(model, rows, state, notes)]
    left = [f"Not run at all: {', '.join(model for model in MODELS if model not in begun)}.\n"]
    return "\n".join([
        "# What compiles for which GPU\n",
        "Made by `benchmarks/gpu_matrix.py`: one layer of each kind, no weights, nothing run on a "
        f"GPU. {len(wanted & state.keys())} of {len(wanted)} cases are compiled.\n",
        "A cell says how many objects the engine has, how many tilings a check refused before one was taken, and how "
        "many objects spill or have a loop that does what it need not.\n",
        *tables, *left * (len(begun) < len(MODELS)), *(f"{number}. {note}" for number, note in enumerate(notes, 1)), "",
    ])  # fmt: skip


def cases(models: list[str], targets: list[str], quants: list[str], caches: Sequence[str]) -> list[Case]:
    """The cases to compile, in order, one for each set of kernels."""
    pairs = [*((quant, "auto") for quant in quants), *(("none", kv) for kv in caches)]
    found = [Case(model, target, quant, kv) for model in models for quant, kv in pairs for target in targets]
    return list({case.key: case for case in reversed(found)}.values())[::-1]


def sample() -> list[Case]:
    """The cases of FIRST, then Llama 1B: each KV cache on an H100, then pairs of the targets and weight formats that no
    case has yet."""
    found = [Case(*case, "auto") for case in FIRST] + [Case("llama-1b", "h100", "none", kv) for kv in CACHES]
    targets = [name for name in GPUS if name not in {case.target for case in found}]
    stored = {Case("", "", quant, "").stored: quant for quant in reversed(QUANTIZATIONS)}
    quants = [quant for name, quant in stored.items() if name not in {case.stored for case in found}][::-1]
    pairs = [(targets[n % len(targets)], quants[n % len(quants)]) for n in range(max(len(targets), len(quants)))]
    return found + [Case("llama-1b", target, quant, "auto") for target, quant in pairs]


def main() -> None:
    """Compile the cases without a result until the time is over, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0, help="0 only writes the table")
    for name, known in (("models", MODELS), ("targets", GPUS), ("quants", QUANTIZATIONS), ("kv", CACHES)):
        parser.add_argument(f"--{name}", default=",".join(known), help="some of: %(default)s; empty for none")
    parser.add_argument("--sample", action="store_true", help="only a small sample; other choices are ignored")
    parser.add_argument("--again", action="store_true", help="also compile cases that have a result")
    parser.add_argument("--out", type=Path, default=OUT, help="path without its suffix")
    a = parser.parse_args()
    kept, end = a.out.with_suffix(".json"), time.monotonic() + 60 * a.minutes
    state: dict[str, Any] = json.loads(kept.read_text()) if kept.is_file() else {}
    chosen = [list(filter(None, text.split(","))) for text in (a.models, a.targets, a.quants, a.kv)]
    for case in sample() if a.sample else cases(*chosen):
        if time.monotonic() >= end:
            break
        if case.key not in state or a.again:
            state[case.key] = compiled(case)
            kept.write_text(json.dumps(state, indent=1, sort_keys=True) + "\n")
            print(case.key, _cell(state[case.key], []), state[case.key].get("error", ""), flush=True)
    a.out.with_suffix(".md").write_text(page(state))


if __name__ == "__main__":
    main()
