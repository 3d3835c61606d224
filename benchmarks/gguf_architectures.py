"""GGUF files of many architectures, written by llama.cpp's own converter: does icc's graph give transformers' logits?

    python benchmarks/gguf_architectures.py LLAMA_CPP [NAME ...] [--out benchmarks/results/gguf_architectures.md]
                                            [--record tests/formats/data/gguf_architectures.json]

LLAMA_CPP is a checkout of llama.cpp, or `vendor/llama.cpp` of llama-cpp-python's source on PyPI. Each model has random
weights and tiny sizes, is converted without a vocabulary as float32, and is read back. `--record` writes the metadata,
tensor names and expected configuration, which a test compares offline.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf_hybrid_shapes import MODELS as HYBRIDS
from gguf_other_shapes import ENCODERS
from gguf_other_shapes import MODELS as OTHERS
from gguf_shapes import MODELS as DECODERS

MODELS = DECODERS | HYBRIDS | OTHERS | ENCODERS
IDS = [5, 17, 33, 8, 99, 101, 3, 44, 71, 12, 13, 65, 110, 7]


def convert(name: str, folder: Path) -> tuple[Any, Path]:
    """Write a model and its GGUF file; transformers' model, and the file's path."""
    import gguf
    import transformers
    from conversion import ModelBase, ModelType, TextModel, get_model_architecture, get_model_class  # type: ignore

    kind, facts, more = MODELS[name]
    torch.manual_seed(0)
    ModelBase.no_mtp = True  # without draft (multi-token prediction) layers
    config = getattr(transformers, kind)(**facts)
    builder = transformers.AutoModel if name in ENCODERS else transformers.AutoModelForCausalLM
    model = builder.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    for parameter in model.parameters():
        noise = torch.randn_like(parameter)
        parameter.data.copy_(0.08 * noise if parameter.dim() > 1 else parameter.data + 0.1 * noise)
    where = folder / name
    model.save_pretrained(where)
    written = json.loads((where / "config.json").read_text())
    (where / "config.json").write_text(json.dumps(written | more))
    if name.startswith("gemma"):  # the converter asks for the number of tokens
        vocabulary = {"model": {"vocab": {str(i): i for i in range(120)}}, "added_tokens": []}
        (where / "tokenizer.json").write_text(json.dumps(vocabulary))
    writer = get_model_class(get_model_architecture(ModelBase.load_hparams(where, False), ModelType.TEXT))
    writer.set_vocab = TextModel._set_vocab_none
    hparams = {k: v for k, v in {**ModelBase.load_hparams(where, False), **more}.items() if v != "none"}
    to = folder / f"{name}.gguf"
    if hasattr(instance := writer(where, gguf.LlamaFileType.ALL_F32, to, eager=True, hparams=hparams), "impl"):
        type(instance.impl).set_vocab = TextModel._set_vocab_none
    instance.write()
    return model, folder / f"{name}.gguf"


def difference(model: Any, path: Path) -> float:
    """The largest difference of logits, or of an encoder's hidden states, relative to the largest of them."""
    from icc.compiler.frontend.load import load_graph
    from icc.compiler.graph.interpret import interpret

    with torch.no_grad():
        if path.stem in ENCODERS:
            expected = model(input_ids=torch.tensor([IDS])).last_hidden_state[0]
        else:
            expected = model(input_ids=torch.tensor([IDS]), use_cache=False).logits[0]
    found = interpret(load_graph(path, 32, task="embed" if path.stem in ENCODERS else "generate"), IDS)
    return float((found - expected).abs().max() / expected.abs().max())


def record(model: Any, path: Path) -> dict[str, Any]:
    """The file's metadata, its tensors once per kind of layer with shapes but without values (except rope factors), and
    the model's configuration where it differs from its type's defaults."""
    from icc.runtime.format.gguf import read_container

    container = read_container(path)
    metadata = {k: v for k, v in container.metadata.items() if not k.startswith(("general.", "tokenizer."))}
    metadata["general.architecture"] = container.metadata["general.architecture"]
    plain = {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in metadata.items()}
    small: dict[str, list[Any]] = {}
    seen: set[tuple[Any, ...]] = set()
    for name, entry in container.tensors.items():
        key = name.split(".", 2)[-1] if name.startswith("blk.") else name, entry.shape
        if key not in seen:
            seen.add(key)
            values = path.read_bytes()[entry.start : entry.end].hex() if "rope_f" in name else ""
            small[name] = [list(entry.shape), values]
    return {"metadata": plain, "tensors": small, "config": model.config.to_diff_dict()}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("llama_cpp", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--record", type=Path)
    a = parser.parse_args()
    sys.path[:0] = [str(a.llama_cpp / "gguf-py"), str(a.llama_cpp)]
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    lines, kept = ["| model | difference of logits, or hidden states |", "|---|---|"], {}
    for name in a.names or MODELS:
        with tempfile.TemporaryDirectory() as folder:
            try:
                model, path = convert(name, Path(folder))
                lines.append(f"| {name} | {difference(model, path):.1e} |")
                kept[name] = record(model, path)
            except Exception as error:
                lines.append(f"| {name} | {type(error).__name__}: {' '.join(str(error).split())[:160]} |")
        print(lines[-1], flush=True)
    if a.out is not None:
        a.out.write_text("\n".join(lines) + "\n")
    if a.record is not None:
        a.record.write_text(json.dumps(kept, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
