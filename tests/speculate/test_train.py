"""train-heads: its output, that it learns, that a seed determines the result, and that an interrupted run continues."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import icc
import pytest
import torch
from draft_graphs import graph_with_layer, guesses
from icc.compiler.driver import compile_engine
from icc.compiler.errors import CheckpointError, TensorError, UsageError
from icc.compiler.options import CompileOptions
from icc.compiler.progress import LoggingReporter, Reporter
from icc.compiler.speculate import trainer
from icc.compiler.speculate.head_files import FILE, read_heads, write_heads
from icc.compiler.speculate.train import TrainedHeads, TrainHeadsOptions, train_heads
from icc.compiler.speculate.train_eagle import train_eagle
from icc.compiler.speculate.train_uno import train_uno
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers

LETTERS = "abcdefghijklmnopqrstuvwxyz "


@pytest.fixture(scope="module")
def options(tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> TrainHeadsOptions:
    """Options for a tiny llama with one token per letter, and a text that repeats the alphabet."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("model")
    tiny.save_tiny(tiny.tiny_configs()["llama"], folder)
    tokenizer = Tokenizer(models.WordLevel({letter: 3 + i for i, letter in enumerate(LETTERS)}, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.save(str(folder / "tokenizer.json"))
    text = folder / "text.txt"
    text.write_text(LETTERS * 160)
    return TrainHeadsOptions(folder, text, folder / "out", heads=2, sequences=130, length=24, epochs=4, rate=0.02)


class CutOff(Reporter):
    """Interrupts training after `steps` steps."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self._steps = steps

    def progress(self, text: str, done: int, total: int) -> None:
        if text.startswith("loss") and done >= self._steps:
            raise KeyboardInterrupt


def test_heads_learn_the_text_and_a_cut_makes_no_difference(
    options: TrainHeadsOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer, "SAVE_STEPS", 7)
    whole = replace(options, output=tmp_path / "whole")
    accuracy = train_heads(whole, LoggingReporter())
    assert all(head[0] > 0.9 for head in accuracy), accuracy
    assert all(head == sorted(head) and len(head) == 5 for head in accuracy)
    assert sorted(p.name for p in whole.output.iterdir()) == ["config.json", FILE]

    cut = replace(options, output=tmp_path / "cut")
    with pytest.raises(KeyboardInterrupt):
        train_heads(cut, CutOff(17))
    assert (cut.output / "training.pt").is_file()
    assert train_heads(cut, LoggingReporter()) == accuracy
    first, second = load_file(whole.output / FILE), load_file(cut.output / FILE)
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)

    other = replace(options, output=tmp_path / "other", seed=1, epochs=1)
    train_heads(other, LoggingReporter())
    assert not torch.equal(
        load_file(other.output / FILE)["medusa_head.0.0.linear.weight"], first["medusa_head.0.0.linear.weight"]
    )


def test_the_published_layout_with_heads_of_their_own_on_own_text(options: TrainHeadsOptions, tmp_path: Path) -> None:
    chosen = replace(
        options, output=tmp_path, own_lm_head=True, generate=True, layers=2, sequences=70, epochs=1, temperature=0.5
    )
    train_heads(chosen, LoggingReporter())
    shapes = {name: tuple(value.shape) for name, value in load_file(tmp_path / FILE).items()}
    assert shapes == {
        f"medusa_head.{head}.{name}": shape
        for head in range(2)
        for name, shape in {
            "0.linear.weight": (64, 64), "0.linear.bias": (64,), "1.linear.weight": (64, 64), "1.linear.bias": (64,),
            "2.weight": (120, 64),
        }.items()
    }  # fmt: skip
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["medusa_num_heads"], config["medusa_num_layers"]) == (2, 2)
    heads = read_heads(tmp_path)
    assert len(heads) == 2 and len(heads[0].blocks) == 2 and heads[0].lm_head is not None


def test_an_eagle_drafter_learns_the_text_and_compiles(
    options: TrainHeadsOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drafter also learns to chain guesses: each pass of training reads the outputs of the previous pass."""
    monkeypatch.setattr(trainer, "SAVE_STEPS", 7)
    chosen = replace(options, kind="eagle3", heads=3, rate=0.005, output=tmp_path / "drafter")
    with pytest.raises(KeyboardInterrupt):
        train_eagle(chosen, CutOff(17))
    accuracy = train_eagle(chosen, LoggingReporter())
    assert len(accuracy) == 3 and all(ranks[0] > 0.9 and ranks == sorted(ranks) for ranks in accuracy), accuracy
    assert sorted(path.name for path in chosen.output.iterdir()) == ["config.json", "model.safetensors"]
    graph = graph_with_layer(options.model, f"eagle:{chosen.output}")
    letters = [3 + i for i in range(26)]
    first, chain = guesses(graph, letters[2:14], 4)
    assert chain == letters[14:18]
    assert first[3:] == letters[7:15][: len(first) - 3]


def test_an_adapter_learns_to_guess_in_noise(
    options: TrainHeadsOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One token in 27 would be right by chance. A cut makes no difference, and the engine takes the adapter."""
    monkeypatch.setattr(trainer, "SAVE_STEPS", 7)
    chosen = replace(options, kind="uno", heads=3, rate=0.01, epochs=10, rank=8, output=tmp_path / "adapter")
    accuracy = train_uno(chosen, LoggingReporter())
    assert len(accuracy) == 3 and all(ranks[4] > 0.6 and ranks == sorted(ranks) for ranks in accuracy), accuracy
    assert sorted(path.name for path in chosen.output.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    cut = replace(chosen, output=tmp_path / "cut", epochs=2)
    with pytest.raises(KeyboardInterrupt):
        train_uno(cut, CutOff(9))
    assert train_uno(cut, LoggingReporter()) == train_uno(replace(cut, output=tmp_path / "uncut"), LoggingReporter())
    asked = {"target": "native", "max_seq_len": 64, "adapters": "1x8"}
    compile_engine(CompileOptions(model=options.model, output=tmp_path / "engine", **asked), Reporter())
    with icc.load(tmp_path / "engine", spec=f"uno:{chosen.output}") as llm:
        assert llm.loop.speculator is not None
        llm.loop.speculator.adaptive = False
        llm.generate([[1, *range(3, 18)]], icc.SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True))
        assert llm.loop.speculator.counts.accepted >= llm.loop.speculator.counts.drafts > 2


@pytest.mark.parametrize("has_bf16", [True, False])
def test_a_cpu_trains_in_bf16_only_if_it_has_such_instructions(
    options: TrainHeadsOptions, monkeypatch: pytest.MonkeyPatch, has_bf16: bool
) -> None:
    """Without them, products of bf16 are many times slower than those of float32."""
    monkeypatch.setattr(trainer, "CPU_HAS_BF16", has_bf16)
    with trainer.precision("cpu"):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is (torch.bfloat16 if has_bf16 else torch.float32)
    heads = TrainedHeads(options, torch.eye(30, 8))
    loss = heads.backward(torch.zeros(1, 9, dtype=torch.int64), torch.ones(1, 9, 8, dtype=torch.bfloat16))
    assert 0 < loss < 10 and all(value.grad is not None for value in heads.parameters())


def test_mistakes_are_refused_in_words(options: TrainHeadsOptions, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is too short"):
        train_heads(replace(options, length=5000, output=tmp_path), LoggingReporter())
    with pytest.raises(UsageError, match="--heads must be from 1 to 16, not 0"):
        replace(options, heads=0)
    with pytest.raises(UsageError, match="--kind 'eagle2' is unknown"):
        replace(options, kind="eagle2")
    with pytest.raises(UsageError, match="--layers and --own-lm-head are of --kind medusa"):
        replace(options, kind="eagle3", layers=2)
    with pytest.raises(UsageError, match="no such file"):
        train_heads(replace(options, text=tmp_path / "none", output=tmp_path), LoggingReporter())


def heads_on_disk(folder: Path, config: Any, **tensors: torch.Tensor) -> Path:
    write_heads(folder, {name.replace("_", "."): value for name, value in tensors.items()}, config)
    return folder


def test_damaged_heads_are_refused_in_words(tmp_path: Path) -> None:
    weight, bias = torch.zeros(8, 8), torch.zeros(8)
    good = {"medusa_num_heads": 1, "medusa_num_layers": 1}
    folder = heads_on_disk(tmp_path / "a", good, **{"0_0_linear_weight": weight, "0_0_linear_bias": bias})
    assert read_heads(folder)[0].lm_head is None
    (folder / "config.json").write_text('{"medusa_num_heads": 2, "medusa_num_layers": 1}')
    with pytest.raises(TensorError, match=r"medusa_head.1.0.linear.weight.* is missing"):
        read_heads(folder)
    (folder / "config.json").write_text('{"medusa_num_heads": 99, "medusa_num_layers": 1}')
    with pytest.raises(CheckpointError, match="99 heads of 1 layers"):
        read_heads(folder)
    (folder / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="does not say medusa_num_heads"):
        read_heads(folder)
    folder = heads_on_disk(tmp_path / "b", good, **{"0_0_linear_weight": weight, "0_0_linear_bias": bias[:3]})
    with pytest.raises(TensorError, match=r"has shape \[3\], not \[8\]"):
        read_heads(folder)
    with pytest.raises(CheckpointError, match=r"no config.json"):
        read_heads(tmp_path)
