"""icc compile --lora with an adapter that changed the size of the vocabulary."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import icc
import pytest
import torch
from icc.compiler.driver import compile_engine
from icc.compiler.frontend.load import load_graph
from icc.compiler.graph.interpret import interpret
from icc.compiler.merging import merge_adapter
from icc.compiler.options import CompileOptions
from icc.compiler.progress import Reporter
from icc.runtime.adapters.reader import read_adapter
from icc.runtime.errors import AdapterError
from peft_models import adapted_logits, difference, save_adapter
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

IDS = [5, 9, 33, 70, 2, 8, 14, 55, 101, 7, 3, 90]
TABLES = ["embed_tokens", "lm_head"]
RESIZED: dict[str, tuple[str, dict[str, Any]]] = {
    "beside it": ("llama", {"target_modules": ["q_proj"]}),
    "trained whole": ("llama", {"target_modules": ["q_proj"], "modules_to_save": TABLES}),
    "with changes of low rank": ("llama", {"target_modules": ["q_proj", *TABLES]}),
    "with trained tokens": ("llama", {"target_modules": ["q_proj"], "trainable_token_indices": [5, 122]}),
    "tied, beside it": ("gemma2", {"target_modules": ["q_proj"]}),
    "tied, trained whole": ("gemma2", {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}),
    "tied, with changes of low rank": ("gemma2", {"target_modules": ["q_proj", "embed_tokens"]}),
    "tied, with trained tokens": ("gemma2", {"target_modules": ["q_proj"], "trainable_token_indices": [5, 122]}),
}
SMALLER = ("beside it", "tied, with changes of low rank")


@pytest.mark.parametrize(("case", "size"), [*((case, 125) for case in RESIZED), *((case, 117) for case in SMALLER)])
def test_a_vocabulary_of_another_size(case: str, size: int, model: Callable[[str], Path], tmp_path: Path) -> None:
    family, options = RESIZED[case]
    path = save_adapter(model(family), tmp_path / "adapter", r=4, vocabulary=size, **options)
    graph = load_graph(model(family))
    parameters = graph.info.num_parameters
    merge_adapter(graph, read_adapter(path))
    expected = adapted_logits(model(family), path, IDS, size)
    found = interpret(graph, [*IDS, min(size, 123) - 1])[: len(IDS)]
    assert found.shape == expected.shape == (len(IDS), size) and graph.info.vocab_size == size
    assert difference(expected, found) < 2e-5
    assert graph.info.num_parameters != parameters


class Told(Reporter):
    """Keeps the warnings."""

    def __init__(self) -> None:
        super().__init__()
        self.warnings: list[str] = []

    def warn(self, message: str) -> None:
        self.warnings.append(message)


@pytest.fixture(scope="module")
def larger(model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of a model whose 120 tokens have become 123."""
    folder = tmp_path_factory.mktemp("larger") / "adapter"
    return save_adapter(model("llama"), folder, r=4, vocabulary=123, target_modules=["q_proj"])


def test_an_engine_of_it_has_the_new_tokens(larger: Path, model: Callable[[str], Path], tmp_path: Path) -> None:
    """Its tokenizer is the adapter's, if the adapter has one."""
    base, adapter, told = tmp_path / "base", tmp_path / "adapter", Told()
    shutil.copytree(model("llama"), base)
    shutil.copytree(larger, adapter)
    for folder, size in ((base, 120), (adapter, 123)):
        Tokenizer(WordLevel({f"w{number}": number for number in range(size)}, "w0")).save(
            str(folder / "tokenizer.json")
        )
    options = CompileOptions(base, tmp_path / "engine", "native", lora=adapter, max_seq_len=64)
    compile_engine(options, told)
    assert told.warnings[-1] == "the adapter makes 123 tokens of the model's 120; the tokenizer is the adapter's"
    with icc.load(tmp_path / "engine") as llm:
        found = torch.from_numpy(llm.logits([*IDS, 122]))
    expected = adapted_logits(base, adapter, [*IDS, 122], 123)
    assert difference(expected, found) < 2e-5
    words = json.loads((tmp_path / "engine" / "tokenizer" / "tokenizer.json").read_text())["model"]["vocab"]
    assert len(words) == 123


def test_a_head_that_is_not_in_the_adapter(larger: Path, model: Callable[[str], Path], tmp_path: Path) -> None:
    adapter = shutil.copytree(larger, tmp_path / "adapter")
    tensors = load_file(adapter / "adapter_model.safetensors")
    del tensors["base_model.model.lm_head.weight"]
    save_file(tensors, adapter / "adapter_model.safetensors")
    with pytest.raises(AdapterError, match=r"has 123 rows, lm_head\.weight has 120") as error:
        merge_adapter(load_graph(model("llama")), read_adapter(adapter))
    assert "save_embedding_layers" in (error.value.hint or "")


def test_only_a_vocabulary_may_be_another(model: Callable[[str], Path], tmp_path: Path) -> None:
    adapter = save_adapter(
        model("llama"), tmp_path / "adapter", r=4, target_modules=["q_proj"], modules_to_save=["norm"]
    )
    tensors = load_file(adapter / "adapter_model.safetensors")
    tensors["base_model.model.model.norm.weight"] = torch.ones(80)
    save_file(tensors, adapter / "adapter_model.safetensors")
    with pytest.raises(AdapterError, match=r"model.norm.weight: the model's is \[64\], the adapter's \[80\]"):
        merge_adapter(load_graph(model("llama")), read_adapter(adapter))


def test_two_values_of_one_weight(model: Callable[[str], Path], tmp_path: Path) -> None:
    options = {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"], "vocabulary": 123}
    adapter = save_adapter(model("llama"), tmp_path / "adapter", r=4, **options)
    tensors = load_file(adapter / "adapter_model.safetensors")
    tensors["base_model.model.lm_head.modules_to_save.weight"] += 1
    save_file(tensors, adapter / "adapter_model.safetensors")
    with pytest.raises(AdapterError, match=r"lm_head\.modules_to_save\.weight' is not used: lm_head has two values"):
        read_adapter(adapter)
