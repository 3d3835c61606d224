"""Checkpoints: tensors are lazy views, conversions run when their result is asked for, ties share one handle."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest
import torch
from icc.compiler.frontend.source import checkpoint
from icc.compiler.frontend.source.checkpoint import CheckpointTensor, open_checkpoint
from icc.compiler.frontend.source.conversion import Converted, model_weights
from icc.compiler.frontend.source.model import build_meta_model, computed_buffers, load_config
from icc.compiler.weights.handles import Weight
from safetensors.torch import save_file


def weights_of(path: Path) -> dict[str, Weight]:
    model = build_meta_model(load_config(path))
    return model_weights(model, open_checkpoint(path), computed_buffers(model))


@pytest.mark.parametrize("shard_size", ["5GB", "40KB"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_values_are_those_of_transformers(tiny: ModuleType, tmp_path: Path, dtype: str, shard_size: str) -> None:
    model = tiny.save_tiny(tiny.tiny_configs()["qwen2"], tmp_path, dtype=dtype, max_shard_size=shard_size)
    found = weights_of(tmp_path)
    for name, expected in model.state_dict().items():
        assert found[name].dtype == getattr(torch, dtype)
        assert torch.equal(found[name].load().float(), expected), name


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
def test_a_dtype_of_auto_is_that_of_the_files(name: str, tiny: ModuleType, tmp_path: Path) -> None:
    tiny.save_tiny(tiny.tiny_configs()["llama"], tmp_path, dtype="float16")
    config = json.loads((tmp_path / "config.json").read_text())
    del config["dtype"]
    (tmp_path / "config.json").write_text(json.dumps({**config, name: "auto"}))
    assert weights_of(tmp_path)["lm_head.weight"].dtype == torch.float16


def test_nothing_is_read_until_asked(tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.save_tiny(tiny.tiny_configs()["mixtral"], tmp_path)
    monkeypatch.setattr(checkpoint, "mapped", lambda path: pytest.fail(f"{path.name} was read"))
    assert weights_of(tmp_path)


def test_merged_experts_are_converted_on_load(tiny: ModuleType, tmp_path: Path) -> None:
    model = tiny.save_tiny(tiny.tiny_configs()["mixtral"], tmp_path)
    found = weights_of(tmp_path)
    merged = [n for n, w in found.items() if isinstance(w, Converted)]
    assert merged
    for name in merged:
        assert torch.equal(found[name].load(), model.state_dict()[name]), name


@pytest.mark.parametrize("name", ["llama-mqa_tied_biases_llama3", "gpt2", "gemma2"])
def test_tied_weights_are_one_handle(tiny: ModuleType, tmp_path: Path, name: str) -> None:
    model = tiny.save_tiny(tiny.tiny_configs()[name], tmp_path)
    found = weights_of(tmp_path)
    ties = dict(model.all_tied_weights_keys)
    assert ties
    for target, source in ties.items():
        assert found[target] is found[source]


def test_tied_weights_that_are_stored_apart(tiny: ModuleType, tmp_path: Path) -> None:
    """Two equal copies are one weight; with different values they are two, as in transformers."""
    head, table = "lm_head.weight", "model.embed_tokens.weight"
    saved = tiny.save_tiny(tiny.tiny_configs()["gemma2-odd"], tmp_path)
    tensors = {name: value.clone() for name, value in saved.state_dict().items()}
    for factor in (1.0, 0.5):
        save_file(tensors | {head: tensors[table] * factor}, tmp_path / "model.safetensors", metadata={"format": "pt"})
        model = build_meta_model(load_config(tmp_path))
        found = model_weights(model, open_checkpoint(tmp_path), computed_buffers(model))
        own, tied = model.get_parameter(head), model.get_parameter(table)
        assert (found[head] is found[table]) == (own is tied) == (factor == 1.0)
        assert torch.equal(found[head].load(), tensors[table] * factor)


def test_one_file_beside_old_shards_and_tensors_of_rare_types(tiny: ModuleType, tmp_path: Path) -> None:
    config = tiny.tiny_configs()["llama"]
    tiny.save_tiny(config, tmp_path, max_shard_size="60KB", seed=1)
    values = tiny.save_tiny(config, tmp_path / "new").state_dict()
    rare = {str(kind): torch.ones(3, dtype=kind) for kind in (torch.int16, torch.uint16, torch.uint32, torch.complex64)}
    save_file({**values, **rare}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    found = weights_of(tmp_path)
    assert all(torch.equal(found[name].load(), value) for name, value in values.items())


def test_computed_buffers_are_finite(tiny: ModuleType, tmp_path: Path) -> None:
    for name in ("llama-yarn", "phi3-longrope", "gemma3", "gpt_oss"):
        path = tmp_path / name
        tiny.save_tiny(tiny.tiny_configs()[name], path)
        values = computed_buffers(build_meta_model(load_config(path)))
        assert any("inv_freq" in n for n in values)
        assert all(bool(torch.isfinite(v).all()) for v in values.values() if v.is_floating_point())


def test_a_view_is_not_a_copy(tiny: ModuleType, tmp_path: Path) -> None:
    tiny.save_tiny(tiny.tiny_configs()["llama"], tmp_path)
    tensors = open_checkpoint(tmp_path)
    tensor = tensors["model.embed_tokens.weight"]
    assert isinstance(tensor, CheckpointTensor)
    assert tensor.load().data_ptr() == tensor.load().data_ptr()
