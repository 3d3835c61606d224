"""ONNX files of other tools as models: icc's graph in the reference interpreter against onnxruntime on the same file.

    python -m venv /tmp/optimum && /tmp/optimum/bin/pip install optimum-onnx onnxruntime      # its own transformers
    /tmp/optimum/bin/python benchmarks/onnx_files.py export build/onnx [FAMILY ...]
    python benchmarks/onnx_files.py check build/onnx

`export` writes small random models of many families as optimum exports them; `check` reads every FOLDER/*/model.onnx
from any exporter, and prints the largest difference over the largest logit, before and after the passes, and the
numbers of query and key heads. onnxruntime runs the file as it is, but without the rounding of activations that
`accuracy_level` asks for.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np

warnings.filterwarnings("ignore")
IDS = [5, 7, 9, 3, 20, 11, 40, 60, 4, 2, 33, 17, 90]
PLAIN: dict[str, Any] = {
    "vocab_size": 160, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
GROUPED = {**PLAIN, "num_key_value_heads": 2, "tie_word_embeddings": False}
OLD = {"vocab_size": 160, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 128}
SIZED = {**GROUPED, "head_dim": 16}
WINDOW = {"sliding_window": 8}
SHORT = {"vocab_size": 160, "hidden_size": 64}
DECODERS: dict[str, dict[str, Any]] = {
    **dict.fromkeys("llama qwen2 phi3 stablelm olmo olmo2 granite smollm3 cohere nemotron arcee".split(), GROUPED),
    **dict.fromkeys("qwen3 gemma helium glm".split(), SIZED),
    **dict.fromkeys("phi gpt_neox".split(), PLAIN), **dict.fromkeys("gpt2 gpt_bigcode".split(), OLD),
    **{key: {**OLD, "rotary_dim": 8} for key in "gptj codegen".split()},
    "mistral": {**GROUPED, **WINDOW}, "gemma2": {**SIZED, **WINDOW}, "gemma3_text": {**SIZED, **WINDOW},
    "opt": {**SHORT, "ffn_dim": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "word_embed_proj_dim": 64},
    "bloom": {**SHORT, "n_layer": 2, "n_head": 4},
    "falcon": {**SHORT, "num_hidden_layers": 2, "num_attention_heads": 4, "alibi": False},
    "mpt": {"vocab_size": 160, "d_model": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": 128, "expansion_ratio": 2},
    "gpt_neo": {**SHORT, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]],
                "window_size": 8},
    "qwen3_moe": {**SIZED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
}  # fmt: skip
ENCODERS: dict[str, dict[str, Any]] = {
    **dict.fromkeys("bert mpnet".split(), PLAIN),
    **{key: {**PLAIN, "embedding_size": 32} for key in "albert electra".split()},
    **{key: {**PLAIN, "type_vocab_size": 1} for key in "roberta xlm-roberta camembert".split()},
    "distilbert": {"vocab_size": 160, "dim": 64, "hidden_dim": 96, "n_layers": 2, "n_heads": 4},
    "modernbert": {**PLAIN, "global_attn_every_n_layers": 2, "local_attention": 16, "cls_token_id": 1,
                   "sep_token_id": 2},
}  # fmt: skip


def export(folder: Path, only: list[str]) -> None:
    """Write the models; runs in the environment of optimum."""
    import torch
    from optimum.exporters.onnx import main_export  # type: ignore[import-not-found]
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    jobs = [(kind, sizes, AutoModelForCausalLM, "text-generation-with-past") for kind, sizes in DECODERS.items()]
    jobs += [(kind, DECODERS[kind], AutoModelForCausalLM, "text-generation") for kind in ("llama", "gpt2", "bloom")]
    jobs += [(kind, sizes, AutoModel, "feature-extraction") for kind, sizes in ENCODERS.items()]
    for kind, sizes, auto, task in jobs:
        if only and kind not in only:
            continue
        torch.manual_seed(0)
        model = auto.from_config(AutoConfig.for_model(kind, **sizes)).eval()
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2 or "bias" in name:
                torch.nn.init.normal_(parameter, 0.0, 0.08)
        with tempfile.TemporaryDirectory() as checkpoint:
            model.save_pretrained(checkpoint)
            main_export(checkpoint, output=folder / f"{kind}-{task}", task=task, do_validation=False)
        print("wrote", kind, task, flush=True)


def oracle(path: Path) -> np.ndarray:
    """The logits, or hidden states, [T, N] of the file in onnxruntime."""
    import onnx
    import onnxruntime

    model = onnx.load(path)
    for node in model.graph.node:
        for attribute in [a for a in node.attribute if a.name == "accuracy_level"]:
            node.attribute.remove(attribute)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = options.intra_op_num_threads = 3
    with tempfile.TemporaryDirectory() as place:
        onnx.save(model, Path(place) / "m.onnx")
        session = onnxruntime.InferenceSession(str(Path(place) / "m.onnx"), options)
    count = len(IDS)
    known = {
        "input_ids": np.array([IDS]), "position_ids": np.arange(count)[None],
        "attention_mask": np.ones((1, count), np.int64), "token_type_ids": np.zeros((1, count), np.int64),
    }  # fmt: skip
    genai = path.with_name("genai_config.json")
    head = json.loads(genai.read_text())["model"]["decoder"]["head_size"] if genai.is_file() else 0
    feeds = {i.name: known[i.name] if i.name in known else _empty(i.shape, i.type, head) for i in session.get_inputs()}
    return np.asarray(session.run([session.get_outputs()[0].name], feeds)[0]).reshape(count, -1)


def _empty(shape: list[Any], kind: str, head: int) -> np.ndarray:
    """A KV cache input with 0 tokens, of the given shape with named axes."""
    sizes = [1 if axis == 0 else head if size == "kv_cache_dim" else 0 if isinstance(size, str) else size
             for axis, size in enumerate(shape)]  # fmt: skip
    return np.zeros(sizes, np.float16 if "float16" in kind else np.float32)


def check(path: Path) -> str:
    """Compare a file's graph with `oracle`; a line with the verdict, both differences and the heads."""
    from icc.compiler.frontend.load import load_graph
    from icc.compiler.graph.interpret import interpret
    from icc.compiler.graph.tensor_types import type_of
    from icc.passes.base import PassContext
    from icc.passes.manager import run_passes
    from icc.passes.registry import parse_passes

    graph = load_graph(path, 64, task="embed" if "feature-extraction" in path.parent.name else "generate")
    wanted = oracle(path)
    largest = float(np.abs(wanted).max())
    before = float(np.abs(interpret(graph, IDS).numpy() - wanted).max()) / largest
    heads = [tuple(type_of(node.args[i]).shape[0] for i in (0, 1)) for node in graph.attention_nodes]  # type: ignore[arg-type]
    run_passes(graph, parse_passes("canonicalize,attention"), PassContext())
    after = float(np.abs(interpret(graph, IDS).numpy() - wanted).max()) / largest
    return f"{'equal' if max(before, after) < 2e-5 else 'DIFFERS'} {before:.1e} {after:.1e} heads {heads}"


def main() -> None:
    """Export or check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("export", "check"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("only", nargs="*")
    a = parser.parse_args()
    if a.action == "export":
        export(a.folder, a.only)
        return
    for path in sorted(a.folder.glob("*/model.onnx")):
        if a.only and not any(path.parent.name.startswith(kind) for kind in a.only):
            continue
        start = time.perf_counter()
        try:
            found = check(path)
        except Exception as error:  # becomes a row; the other files are still checked
            found = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        print(f"{path.parent.name}: {found} ({time.perf_counter() - start:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
