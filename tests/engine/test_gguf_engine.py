"""From a GGUF file to an engine: `icc compile FILE.gguf`, with its tokenizer, chat template and special tokens."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import gguf
import icc
import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "formats"))
from gguf_models import write_model
from icc.compiler.console import given_formats
from icc.compiler.targets import TARGETS

LETTERS = "abcdefghijklmnopqrstuvwxyz"
TOKENS = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", *LETTERS, "Ġ", "Ċ", "th", "the", "Ġthe"]
MERGES = ["t h", "th e", "Ġ the"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"


def metadata(writer: Any) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list(TOKENS + [f"[PAD{i}]" for i in range(64 - len(TOKENS))])
    writer.add_token_types([3] * 3 + [1] * (len(TOKENS) - 3) + [5] * (64 - len(TOKENS)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A file of mixed types, like K_M files, and transformers' model with its values."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=64, max_position_embeddings=64, tie_word_embeddings=True, attn_implementation="eager",
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.06) if parameter.dim() > 1 else parameter.data.add_(0.1)
    kinds = {"token_embd.weight": "Q6_K", "blk.0.attn_v.weight": "IQ3_S", "blk.1.ffn_down.weight": "F16"}
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    return path, write_model(model, "llama", path, lambda name: kinds.get(name, "Q4_K"), metadata)


@pytest.fixture(scope="module")
def engine(made: tuple[Path, Any]) -> Path:
    return icc.compile(made[0], made[0].with_suffix(".engine"), target="native", max_seq_len=64)


def test_logits_are_those_of_the_files_values(made: tuple[Path, Any], engine: Path) -> None:
    ids = np.random.default_rng(0).integers(0, 64, 40).tolist()
    with torch.no_grad():
        expected = made[1](input_ids=torch.tensor([ids])).logits[0].double().log_softmax(-1)
    with icc.load(engine, threads=1) as llm:
        found = torch.tensor(llm.logits(ids)).double().log_softmax(-1)
    assert float((expected.exp() * (expected - found)).sum(-1).mean()) < 1e-3


def test_blocks_are_cut_between_ranks(made: tuple[Path, Any], engine: Path, tmp_path: Path) -> None:
    """Each rank has whole blocks of the file; the logits are those of one rank."""
    two = icc.compile(made[0], tmp_path / "two.engine", target="native", max_seq_len=64, tensor_parallel=2)
    ids = list(range(3, 40))
    with icc.load(engine, threads=1) as llm, icc.load(two, threads=2) as both:
        wanted, found = llm.logits(ids), both.logits(ids)
    assert np.abs(found - wanted).max() < 1e-5 * np.abs(wanted).max()
    sizes = [(path / "weights.safetensors").stat().st_size for path in (engine, two)]
    assert sizes[1] < 0.7 * sizes[0]


def test_text_goes_in_and_out(engine: Path) -> None:
    manifest = json.loads((engine / "engine.json").read_text())
    assert manifest["model"]["eos_token_ids"] == [2, 1] and manifest["model"]["bos_token_id"] == 0
    assert (engine / "tokenizer" / "chat_template.jinja").read_text() == TEMPLATE
    with icc.load(engine, threads=1) as llm:
        (answer,) = llm.generate(["<|im_start|>at the end"], icc.SamplingParams(max_tokens=4, temperature=0))
    tokenizer = json.loads((engine / "tokenizer" / "tokenizer.json").read_text())
    assert tokenizer["model"]["vocab"]["Ġthe"] == TOKENS.index("Ġthe")
    assert 1 <= len(answer.token_ids) <= 4


def test_the_report_names_what_was_kept(engine: Path) -> None:
    given = json.loads((engine / "report.json").read_text())["given"]
    assert given == {"iq3_s": 1, "q4_k": 12, "q6_k": 1}
    words = given_formats(given, TARGETS["cpu"])
    assert "iq3_s 1 (re-encoded without loss: 4.31 bits per weight instead of 3.44)" in words and "q4_k 12," in words


def test_values_decoded_from_the_engine_are_those_of_gguf(made: tuple[Path, Any], engine: Path) -> None:
    """Checks the head: its bytes in weights.safetensors are unpacked by its layout."""
    from icc.compiler.backends.cpu.layouts.registry import LAYOUTS
    from icc.compiler.weights.formats.registry import find_format

    header_size = int.from_bytes((engine / "weights.safetensors").read_bytes()[:8], "little")
    raw = (engine / "weights.safetensors").read_bytes()
    header = json.loads(raw[8 : 8 + header_size])
    program = json.loads((engine / "program.json").read_text())
    name = next(n for n, w in program["weights"].items() if w["format"] == "q6_k")
    start, end = (8 + header_size + offset for offset in header[name]["data_offsets"])
    form = find_format("q6_k")
    parts = LAYOUTS.find(form, "product").unpack(np.frombuffer(raw[start:end], np.uint8), (64, 256))
    found = form.decode({n: torch.from_numpy(v) for n, v in parts.items()}).numpy()
    tensor = next(t for t in gguf.GGUFReader(made[0]).tensors if t.name == "token_embd.weight")
    assert found.tobytes() == gguf.quants.dequantize(tensor.data, tensor.tensor_type).tobytes()
