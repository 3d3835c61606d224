"""Writes tests/runtime/golden/engines.vN.tar.xz: small engines of this tree's format version, and their answers.

`python tests/runtime/golden/write_engines.py`, once per format version, before the next one begins; later versions of
icc must open them and give the same answers. One library each, for AVX2, so that every machine has the same tokens.
"""

from __future__ import annotations

import json
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(TESTS), str(TESTS / "engine")]
SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
PROMPTS = [[1, 5, 9, 5, 9, 5], [1, 7], [1, *range(10, 40)]]
PAIR = "which word is first", ["the first word", "a b c d e f g", "never said", "one"]


def write(target: Path) -> None:
    """Compile the engines, ask them, and pack them with the answers."""
    import icc
    import torch
    from icc.compiler.backends.cpu import backend
    from icc.compiler.backends.cpu.isa import AVX2
    from icc.compiler.engine import directory
    from icc.compiler.speculate.head_files import write_heads
    from test_encoders import saved, write_tokenizer
    from tiny_models import save_tiny
    from transformers import Gemma2Config, LlamaConfig

    backend.LEVELS = {"x86-64": (AVX2,)}  # type: ignore[misc]
    directory.copy_runtime = lambda stage: None  # the largest part of each engine, which is never read
    with tempfile.TemporaryDirectory() as name:
        folder, answers = Path(name), {}
        source = torch.Generator().manual_seed(0)
        heads = {f"{i}.0.linear.weight": torch.randn(32, 32, generator=source) * 0.1 for i in range(2)}
        heads |= {f"{i}.0.linear.bias": torch.randn(32, generator=source) * 0.1 for i in range(2)}
        write_heads(folder / "heads", heads, {"medusa_num_heads": 2, "medusa_num_layers": 1})
        configs = LlamaConfig(**SIZES), Gemma2Config(**SIZES, head_dim=16, sliding_window=8)
        for config, spec in zip(configs, (f"medusa:{folder / 'heads'}", "layer-skip:1"), strict=True):
            model = config.model_type
            save_tiny(config, folder / model, dtype="bfloat16")
            options: Any = {"target": "cpu", "quant": "rtn4", "group_size": 16, "spec": spec, "max_step_tokens": 48}
            engine = icc.compile(folder / model, folder / f"{model}.engine", **options)
            answers[engine.name] = _ask(engine, None)
            assert answers[engine.name] == _ask(engine, "none")
            if model == "llama":  # its kernels need a GPU, but it can be opened anywhere
                icc.compile(folder / model, folder / "h100.engine", **options | {"target": "h100"})
        saved("bert", folder / "bert", "rerank", num_hidden_layers=1, num_labels=2)
        write_tokenizer(folder / "bert")
        engine = icc.compile(folder / "bert", folder / "bert.engine", target="cpu", task="rerank", quant="rtn4")
        with icc.load(engine, threads=1) as llm:
            answers[engine.name] = [[one.index, one.score] for one in llm.rerank(*PAIR)]
        asked = {"prompts": PROMPTS, "pair": PAIR, "answers": answers}
        (folder / "answers.json").write_text(json.dumps(asked, indent=1))
        with tarfile.open(target, "w:xz", preset=9) as archive:
            for path in (folder / "answers.json", *sorted(folder.glob("*.engine"))):
                archive.add(path, path.name, filter=_anonymous)


def _ask(engine: Path, spec: str | None) -> tuple[list[list[int]], list[float]]:
    """The sampled tokens after each prompt, and the logits after the last token of the last prompt."""
    import icc

    with icc.load(engine, threads=1, spec=spec) as llm:
        if llm.loop.speculator is not None:
            llm.loop.speculator.adaptive = False
        found = llm.generate(PROMPTS, icc.SamplingParams(max_tokens=20, ignore_eos=True, temperature=2.0, seed=1))
        assert llm.loop.speculator is None or llm.loop.speculator.counts.guesses
        return [list(one.token_ids) for one in found], llm.logits(PROMPTS[-1])[-1].tolist()


def _anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = entry.mtime = 0
    entry.uname = entry.gname = ""
    return entry


if __name__ == "__main__":
    from icc.runtime.format.manifest import FORMAT_VERSION

    write(Path(__file__).with_name(f"engines.v{FORMAT_VERSION}.tar.xz"))
