"""Metadata and tensors of a GGUF file that nothing reads are refused by name: they may change the model."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from icc.compiler.errors import CheckpointError, IccError, TensorError, UnsupportedModel
from icc.compiler.frontend.source.gguf.architectures import ARCHITECTURES, Architecture
from icc.compiler.frontend.source.gguf.config import read_config
from icc.compiler.frontend.source.gguf.fields import ANYTHING, COMMON, REFUSED, Field
from icc.compiler.frontend.source.gguf.tensors import weights_of
from icc.compiler.frontend.source.model import build_meta_model
from icc.runtime.format.gguf import GgufContainer, GgufTensor
from sizes import soak
from test_gguf_architectures import FIRST, RECORDED, as_file

# keys without effect on logits, or implied by tensor shapes; rope keys mean nothing if no positions are rotated
FREE = {field.key for field in COMMON if field.expect is ANYTHING} | {"rope.freq_base", "rope.dimension_count"}
# keys of other architectures, of newer llama.cpp, and of none
FOREIGN: dict[str, Any] = {
    "attention.scale": 0.3, "residual_scale": 0.6, "router_logit_softcapping": 5.0, "attention.max_alibi_bias": 8.0,
    "attention.temperature_length": 8, "attention.causal": False, "rope.scaling.attn_factor": 1.4,
    "rope.scaling.yarn_ext_factor": 0.5, "rope.scaling.alpha": 1000.0, "moe_every_n_layers": 2,
    "swiglu_clamp_exp": np.array([7.0, 7.0]), "attention.value_scale": 0.5, "num_loops": 2, "florp.kind": "swirl",
    "hyper_connection.count": 2, "attention.sliding_window": 6,
}  # fmt: skip


def known(config: Any) -> dict[str, Any]:
    """The fields that the configuration's class defines: an instance keeps any field that it is given."""
    return {name: value for name, value in config.to_dict().items() if name in type(config)().to_dict()}


def other(value: Any) -> Any:
    """A different value of the same type."""
    if isinstance(value, np.ndarray):
        return np.concatenate([[other(value[0].item())], value[1:]])
    if isinstance(value, bool):
        return not value
    return f"{value}x" if isinstance(value, str) else value + 1 if isinstance(value, int) else value * 1.5 + 0.01


@pytest.mark.parametrize("arch", ["dbrx", "mpt", "llama4"])  # as in docs/models.md
def test_an_architecture_that_is_refused_is_in_no_table(arch: str, tmp_path: Path) -> None:
    container = GgufContainer(tmp_path / "m.gguf", {"general.architecture": arch}, {})
    with pytest.raises(UnsupportedModel, match=f"architecture '{arch}', which icc has no table for") as error:
        read_config(container)
    assert f" {arch}," not in str(error.value.hint)


@pytest.mark.parametrize("name", [*FIRST, *soak(*(name for name in RECORDED if name not in FIRST))])
def test_every_key_changes_the_model_or_is_known_not_to(name: str, tmp_path: Path) -> None:
    container = as_file(name, tmp_path)
    before = known(read_config(container))
    for key, value in container.metadata.items():
        own = key.partition(".")[2]
        if key.startswith(("general.", "xielu.")) or own in (*FREE, "rope.scaling.original_context_length"):
            continue
        changed = GgufContainer(container.path, container.metadata | {key: other(value)}, container.tensors)
        try:
            assert known(read_config(changed)) != before or own == "full_attention_interval", key
        except IccError as error:
            assert "\n" not in str(error)


def test_keys_of_others_are_refused(tmp_path: Path) -> None:
    container = as_file("llama", tmp_path)
    read_config(container)
    for name, value in FOREIGN.items():
        metadata = container.metadata | {f"llama.{name}": value}
        with pytest.raises(UnsupportedModel, match=rf"metadata 'llama\.{name}' is ") as caught:
            read_config(GgufContainer(container.path, metadata, container.tensors))
        assert "\n" not in str(caught.value)
    for name, value in {"residual_scale": 1.0, "expert_count": 0, "use_parallel_residual": False}.items():
        read_config(GgufContainer(container.path, container.metadata | {f"llama.{name}": value}, container.tensors))


def test_a_new_key_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line of the table reads a new key into the configuration, or judges a key that nothing reads."""
    container = as_file("llama", tmp_path)
    container.metadata["llama.florp.rate"] = 0.5

    def read(line: Field) -> Any:
        monkeypatch.setitem(ARCHITECTURES, "llama", Architecture("llama", (line,)))
        return read_config(container)

    placed = Field("florp.rate", "attention_dropout"), Field("florp.rate", ("florp", "attention_dropout"), default=0.25)
    for line in placed:
        assert read(line).attention_dropout == 0.5
    assert read(Field("florp.rate", "rope_parameters.florp")).rope_parameters["florp"] == 0.5
    for expect in (0.5, ANYTHING, lambda config: 0.5 + config["attention_dropout"]):
        assert read(Field("florp.rate", expect=expect)).attention_dropout == 0.0
    for line in (Field("florp.rate"), Field("florp.rate", expect=0.4), Field("florp.rate", expect=REFUSED)):
        with pytest.raises(UnsupportedModel, match=r"'llama\.florp\.rate'"):
            read(line)
    del container.metadata["llama.florp.rate"]
    assert [read(line).attention_dropout for line in placed] == [0.0, 0.25]


def test_scores_of_experts_are_those_of_the_architecture(tmp_path: Path) -> None:
    """The scores are a sigmoid or a softmax by the architecture's line in the table, not by transformers' model
    type."""
    for name, gating in (("afmoe", 2), ("qwen3moe", 1)):
        container = as_file(name, tmp_path)
        arch = container.metadata["general.architecture"]
        for said in (1, 2):
            container.metadata[f"{arch}.expert_gating_func"] = said
            with contextlib.nullcontext() if said == gating else pytest.raises(UnsupportedModel, match="gating_func"):
                read_config(GgufContainer(container.path, container.metadata, container.tensors))


def test_tensors_that_no_model_has_are_refused(tmp_path: Path) -> None:
    container = as_file("llama", tmp_path)
    config = read_config(container)
    model = build_meta_model(config, False, "generate")
    for name in ("blk.0.florp.weight", "blk.2.attn_q.weight", "rope_factors_long.weight", "v.blk.0.attn_q.weight"):
        tensors = container.tensors | {name: GgufTensor(name, container.path, 0, 0, (16,), "f32")}
        with pytest.raises(TensorError, match=rf"'{name}'.*no place for it"):
            weights_of(GgufContainer(container.path, container.metadata, tensors), model, config)


def test_layers_that_guess_are_left_out(tmp_path: Path) -> None:
    container = as_file("llama", tmp_path)
    said = {"llama.block_count": 3, "llama.nextn_predict_layers": 1}
    tensors = {
        name: GgufTensor(name, container.path, 0, 0, (16,), "f32")
        for name in ("blk.2.nextn.eh_proj.weight", "blk.2.attn_q.weight", "blk.2.florp.weight")
    }
    found = GgufContainer(container.path, container.metadata | said, container.tensors | tensors)
    config = read_config(found)
    assert config.num_hidden_layers == 2
    model = build_meta_model(config, False, "generate")
    assert weights_of(found, model, config).keys() == weights_of(container, model, config).keys()
    for ahead in (-1, 4):
        wrong = found.metadata | {"llama.nextn_predict_layers": ahead}
        with pytest.raises(CheckpointError, match=f"its metadata say that {ahead} of 3 layers guess"):
            read_config(GgufContainer(container.path, wrong, found.tensors))


def test_what_rules_ask_for_is_missed_in_words(tmp_path: Path) -> None:
    container = as_file("qwen3next", tmp_path)
    container.metadata.pop("qwen3next.ssm.inner_size")
    with pytest.raises(CheckpointError, match="metadata of the architecture lack or are wrong"):
        read_config(container)
    container = as_file("llama", tmp_path)
    container.metadata["llama.embedding_length"] = 2**27
    with pytest.raises(CheckpointError, match="embeddings have 64 values, its metadata say 134217728"):
        read_config(container)


@pytest.mark.parametrize("value", ["none", 0.0, -1.0, float("nan")])
def test_epsilons_are_numbers(value: Any, tmp_path: Path) -> None:
    container = as_file("llama", tmp_path)
    metadata = container.metadata | {"llama.attention.layer_norm_rms_epsilon": value}
    if value == 0.0:
        assert read_config(GgufContainer(container.path, metadata, container.tensors)).rms_norm_eps == 0
    else:
        with pytest.raises(CheckpointError, match="layer_norm_rms_epsilon' is"):
            read_config(GgufContainer(container.path, metadata, container.tensors))


def test_windows_where_a_file_says_them_otherwise(tmp_path: Path) -> None:
    container = as_file("exaone4", tmp_path)
    for key in ("sliding_window", "sliding_window_pattern"):
        container.metadata.pop(f"exaone4.attention.{key}")
    found = read_config(container)
    assert found.sliding_window is None and set(found.layer_types) == {"full_attention"}
    container = as_file("exaone4", tmp_path)
    container.metadata["exaone4.attention.sliding_window_pattern"] = 2
    assert read_config(container).layer_types == ["sliding_attention", "full_attention"] * 2
    container.metadata["exaone4.attention.sliding_window_pattern"] = np.array([True])
    with pytest.raises(CheckpointError, match="sliding_window_pattern is not of 4 layers"):
        read_config(container)


def test_scaling_without_a_kind_is_linear(tmp_path: Path) -> None:
    container = as_file("llama", tmp_path)
    container.metadata["llama.rope.scaling.factor"] = 2.0
    assert read_config(container).rope_parameters["rope_type"] == "linear"
