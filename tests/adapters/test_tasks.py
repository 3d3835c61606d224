"""Adapters of engines that score texts, and with grammars."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import icc
import pytest
import tokenizers
import torch
from icc import SamplingParams
from icc.runtime.errors import RequestError
from icc.runtime.llm import LLM
from icc.runtime.tokenizer import Tokenizer
from peft_models import save_adapter
from safetensors.torch import load_file, save_file
from tokenizers import decoders, models, pre_tokenizers, processors

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"which word is here the first one last never said a b c d".split()]
SIZES = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48, "vocab_size": 60,
    "max_position_embeddings": 70, "pad_token_id": 0,
}  # fmt: skip


def scorer(folder: Path) -> Path:
    """A random model that scores pairs of texts, with a tokenizer of words."""
    from transformers import AutoModelForSequenceClassification, LlamaConfig

    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(LlamaConfig(**SIZES, num_labels=1))
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    made = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    made.add_special_tokens(WORDS[:4])
    made.save(str(folder / "tokenizer.json"))
    return folder


def adapted(model: Path, folder: Path) -> Any:
    """The model with a random adapter that replaces its head; the adapter is written to `folder`."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForSequenceClassification

    base = AutoModelForSequenceClassification.from_pretrained(model, dtype=torch.float32)
    config = LoraConfig(task_type="SEQ_CLS", r=4, target_modules=["q_proj", "v_proj", "down_proj"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found, random = get_peft_model(base, config), torch.Generator().manual_seed(3)
        for value in found.parameters():
            if value.requires_grad:
                value.data = torch.randn(value.shape, generator=random) * 0.2
        found.save_pretrained(folder)
    return found.eval()


def test_scores_of_pairs(tmp_path: Path) -> None:
    """PEFT trains the scoring head as a whole matrix, with one row per label."""
    model = scorer(tmp_path / "model")
    with_adapter = adapted(model, tmp_path / "adapter")
    options = {"target": "native", "max_batch_size": 4, "adapters": "2x16"}
    engine = icc.compile(model, tmp_path / "x.engine", task="rerank", **options)  # type: ignore[arg-type]
    query, documents = "which word is first", ["the first word", "a b c d", "never said", "one"]
    rows: list[float] = []
    for document in documents:
        first, second = ([WORDS.index(word) for word in text.split()] for text in (query, document))
        with torch.no_grad():
            rows.append(float(with_adapter(input_ids=torch.tensor([[2, *first, 3, *second, 3]])).logits[0, 0]))
    with icc.load(engine, threads=1) as llm:
        before = {one.index: one.score for one in llm.rerank(query, documents)}
        llm.load_adapter("own", tmp_path / "adapter")
        found = {one.index: one.score for one in llm.rerank(query, documents, adapter="own")}
        assert [found[i] for i in range(4)] == pytest.approx(torch.tensor(rows).sigmoid().tolist(), abs=2e-5)
        assert max(abs(found[i] - before[i]) for i in range(4)) > 1e-2
        assert {one.index: one.score for one in llm.rerank(query, documents)} == before


def test_what_mean_pooling_never_reads(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """PEFT's all-linear includes an encoder's pooler, which training with mean pooling never changes: its B stays
    zeros. It is left out with a warning; a pooler whose B is not zeros is refused."""
    from peft import LoraConfig, get_peft_model
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    model, adapter = tmp_path / "model", tmp_path / "adapter"
    BertModel(BertConfig(**SIZES, initializer_range=0.3)).save_pretrained(model)
    found = get_peft_model(BertModel.from_pretrained(model), LoraConfig(r=4, target_modules="all-linear")).eval()
    for name, value in found.named_parameters():
        if "lora_B" in name and "pooler" not in name:
            value.data.normal_(std=0.2)
    found.save_pretrained(adapter)
    ids = [2, 5, 9, 33, 7, 3]
    with torch.no_grad():
        wanted = found(input_ids=torch.tensor([ids])).last_hidden_state[0].mean(0)
    wanted = (wanted / wanted.norm()).tolist()
    options: Any = {"target": "native", "task": "embed", "pooling": "mean", "max_batch_size": 4}
    merged = icc.compile(model, tmp_path / "merged.engine", lora=adapter, **options)
    with icc.load(merged, threads=1) as llm:
        assert llm.embed([ids])[0].tolist() == pytest.approx(wanted, abs=2e-5)
    with icc.load(icc.compile(model, tmp_path / "x.engine", adapters="2x16", **options), threads=1) as llm:
        llm.load_adapter("own", adapter)
        assert llm.embed([ids], adapter=["own"])[0].tolist() == pytest.approx(wanted, abs=2e-5)
        assert llm.embed([ids])[0].tolist() != pytest.approx(wanted, abs=1e-2)
        [told] = [one.getMessage() for one in caplog.records if one.name == "icc.adapters"]
        assert (
            told
            == f"adapter own: {adapter}: pooler.dense.weight left out: nothing here reads it, and its B is all zeros"
        )
        tensors = load_file(adapter / "adapter_model.safetensors")
        [pooler] = [name for name in tensors if "pooler.dense.lora_B" in name]
        save_file({**tensors, pooler: torch.ones_like(tensors[pooler])}, adapter / "adapter_model.safetensors")
        with pytest.raises(RequestError, match=r"pooler\.dense\.weight: the engine has no room"):
            llm.load_adapter("other", adapter)
        save_file({name: tensors[name] for name in tensors if "pooler" in name}, adapter / "adapter_model.safetensors")
        with pytest.raises(RequestError, match=r"pooler\.dense\.weight: the engine has no room"):
            llm.load_adapter("other", adapter)  # no change is left


def byte_tokenizer() -> Tokenizer:
    """A token per printable byte of the first 120."""
    vocabulary = {chr(code) if code > 32 else f"<{code}>": code for code in range(120)}
    made = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return Tokenizer(made.to_str().encode())


def test_a_grammar_is_followed_with_an_adapter(
    engine: Callable[..., Path], model: Callable[[str], Path], tmp_path: Path
) -> None:
    """The base's request is in the same batch; its answer is a different one."""
    path = save_adapter(model("llama"), tmp_path / "one", 3, 0.3, r=4, target_modules=["q_proj", "v_proj", "down_proj"])
    bare = icc.load(engine("llama", adapters="2x16"))
    with LLM(bare.manifest, bare.executor, byte_tokenizer(), bare.engine) as llm:
        llm.load_adapter("one", path)
        params = SamplingParams(max_tokens=12, temperature=0.0, regex="[a-f]{3}-[0-9]{6}!")
        prompts = ["abc", "hello", "abc", "hello"]
        found = llm.generate(prompts, params, adapter=["one", "one", None, None])
        texts = [one.text for one in found]
        assert all(re.fullmatch("[a-f]{3}-[0-9]{6}!", text) for text in texts), texts
        assert texts[:2] != texts[2:]
        for prompt, name, text in zip(prompts, ["one", "one", None, None], texts, strict=True):
            assert llm.generate([prompt], params, adapter=name)[0].text == text
