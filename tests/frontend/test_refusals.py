"""Everything the frontend refuses: one clear line, its own error class and exit code, and the culprit's name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import icc
import pytest
import torch
from icc.compiler.backends.errors import CodegenError
from icc.compiler.backends.triton.kernels.norm import NormKernel
from icc.compiler.errors import (
    CheckpointError,
    IccError,
    SequenceLengthError,
    TensorError,
    TraceError,
    UnsupportedModel,
)
from icc.compiler.frontend.load import load_graph, trace_model
from icc.compiler.graph.interpret import interpret
from icc.compiler.weights.handles import Constant, Weight
from safetensors.torch import load_file, save_file
from torch import nn

INDEX = "model.safetensors.index.json"
SAMPLE = Path(__file__).parents[2] / "samples" / "pystd"
NORM = "model.layers.1.input_layernorm.weight"


@pytest.fixture(scope="module")
def saved(tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A good llama checkpoint in one file."""
    path = tmp_path_factory.mktemp("saved")
    tiny.save_tiny(tiny.tiny_configs()["llama"], path)
    return path


@pytest.fixture(scope="module")
def sharded(tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The good llama checkpoint in shards."""
    path = tmp_path_factory.mktemp("sharded")
    tiny.save_tiny(tiny.tiny_configs()["llama"], path, max_shard_size="60KB")
    return path


def refuse(path: Path, kind: type[IccError], *words: str, max_seq_len: int | None = None) -> IccError:
    """The error of loading `path`; asserts that it is one line, is of class `kind`, and contains the words."""
    with pytest.raises(kind) as caught:
        load_graph(path, max_seq_len)
    assert type(caught.value) is kind or issubclass(type(caught.value), kind)
    assert caught.value.exit_code == kind.exit_code
    assert "\n" not in caught.value.message
    for word in words:
        assert word in caught.value.message
    return caught.value


def edit_config(path: Path, **changes: object) -> None:
    config = json.loads((path / "config.json").read_text())
    config.update(changes)
    (path / "config.json").write_text(json.dumps(config))


def edit_tensors(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture
def model(saved: Path, tmp_path: Path) -> Path:
    """A copy of the good checkpoint, to damage."""
    return Path(shutil.copytree(saved, tmp_path / "model"))


@pytest.fixture
def shards(sharded: Path, tmp_path: Path) -> Path:
    """A copy of the sharded checkpoint, to damage."""
    return Path(shutil.copytree(sharded, tmp_path / "shards"))


def test_no_such_directory(tmp_path: Path) -> None:
    refuse(tmp_path / "absent", CheckpointError, "config.json")


def test_no_config(model: Path) -> None:
    (model / "config.json").unlink()
    refuse(model, CheckpointError, "no config.json")


def test_a_tokenizer_that_is_none(saved: Path, tmp_path: Path) -> None:
    """Refused before the model is traced; the library raises a bare Exception."""
    model = shutil.copytree(saved, tmp_path / "model")
    (model / "tokenizer.json").write_text("{bad")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is not a tokenizer") as refused:
        icc.compile(model, tmp_path / "out.engine", target="native")
    assert refused.value.exit_code == 10 and not (tmp_path / "out.engine").exists()


@pytest.mark.parametrize("text", ["{", "[]", "", "\x00\x01"])
def test_malformed_config(model: Path, text: str) -> None:
    (model / "config.json").write_text(text)
    refuse(model, CheckpointError, "config.json")


def test_config_without_a_type(model: Path) -> None:
    (model / "config.json").write_text('{"hidden_size": 64}')
    refuse(model, UnsupportedModel, "model_type")


def test_unknown_model_type(model: Path) -> None:
    edit_config(model, model_type="no_such_family")
    refuse(model, UnsupportedModel, "no_such_family")


def test_remote_code_is_never_run(model: Path) -> None:
    (model / "evil.py").write_text("raise SystemExit('ran')")
    edit_config(model, model_type="evil", auto_map={"AutoConfig": "evil.Config"})
    refuse(model, UnsupportedModel, "config.json")


def test_config_with_impossible_sizes(model: Path) -> None:
    edit_config(model, num_attention_heads=7, head_dim=None)
    refuse(model, UnsupportedModel, "config.json", "heads")


def test_encoder_that_has_a_causal_class(tiny: ModuleType, tmp_path: Path) -> None:
    import transformers

    base = {k: v for k, v in tiny.BASE.items() if "token" not in k}
    tiny.save_tiny(transformers.BertConfig(**base, is_decoder=True), tmp_path)
    edit_config(tmp_path, is_decoder=False)
    refuse(tmp_path, UnsupportedModel, "bidirectional", "encoder")


def test_encoder_without_a_causal_class(model: Path) -> None:
    edit_config(model, model_type="distilbert", architectures=["DistilBertForMaskedLM"])
    refuse(model, UnsupportedModel, "distilbert", "not a causal language model")


def test_encoder_decoder(model: Path) -> None:
    edit_config(model, model_type="t5", architectures=["T5ForConditionalGeneration"])
    refuse(model, UnsupportedModel, "t5")


def test_encoder_decoder_with_a_causal_class(model: Path) -> None:
    edit_config(model, model_type="bart", is_encoder_decoder=True)
    refuse(model, UnsupportedModel, "encoder-decoder")


def test_missing_shard(shards: Path) -> None:
    victim = sorted(shards.glob("*.safetensors"))[1]
    victim.unlink()
    refuse(shards, CheckpointError, victim.name)


@pytest.mark.parametrize("keep", [0, 5, 200, 4000])
def test_truncated_shard(shards: Path, keep: int) -> None:
    victim = sorted(shards.glob("*.safetensors"))[1]
    victim.write_bytes(victim.read_bytes()[:keep])
    refuse(shards, CheckpointError, victim.name, "truncated")


def test_header_that_is_not_json(model: Path) -> None:
    path = model / "model.safetensors"
    raw = bytearray(path.read_bytes())
    raw[8:12] = b"\xff\xfe{{"
    path.write_bytes(raw)
    refuse(model, CheckpointError, "model.safetensors")


def test_index_names_a_tensor_that_is_in_no_shard(shards: Path) -> None:
    index = json.loads((shards / INDEX).read_text())
    index["weight_map"]["model.layers.9.ghost"] = sorted(set(index["weight_map"].values()))[0]
    (shards / INDEX).write_text(json.dumps(index))
    assert "ghost" in getattr(refuse(shards, TensorError, "model.layers.9.ghost"), "tensor", "")


@pytest.mark.parametrize("text", ["{", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 1}}', "[1]"])
def test_malformed_index(shards: Path, text: str) -> None:
    (shards / INDEX).write_text(text)
    refuse(shards, CheckpointError, INDEX)


def test_index_that_points_outside(shards: Path) -> None:
    index = json.loads((shards / INDEX).read_text())
    index["weight_map"]["x"] = "../elsewhere.safetensors"
    (shards / INDEX).write_text(json.dumps(index))
    refuse(shards, CheckpointError, "outside")


def test_missing_tensor(model: Path) -> None:
    edit_tensors(model, lambda t: t.pop(NORM))
    refuse(model, TensorError, NORM, "missing")


def test_misshapen_tensor(model: Path) -> None:
    edit_tensors(model, lambda t: t.update({NORM: torch.ones(63)}))
    refuse(model, TensorError, NORM, "[63]", "[64]")


def test_integers_that_nothing_explains(model: Path) -> None:
    weight = NORM.replace("input_layernorm", "mlp.up_proj")
    edit_tensors(
        model, lambda t: t.update({weight: t[weight].mul(10).to(torch.int8), f"{weight}_scale": torch.ones(96, 1)})
    )
    refuse(model, TensorError, weight, "int8", "config.json")


@pytest.mark.parametrize(("value", "kind"), [(float("nan"), "NaN"), (float("inf"), "Inf"), (-float("inf"), "Inf")])
def test_not_finite(model: Path, value: float, kind: str) -> None:
    edit_tensors(model, lambda t: t[NORM].__setitem__(3, value))
    graph = load_graph(model)  # values are read when they are needed
    with pytest.raises(TensorError, match=f"{NORM}.*{kind}"):
        interpret(graph, [1, 2, 3])


def test_pickle_only(model: Path) -> None:
    (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").write_bytes(b"never read")
    refuse(model, CheckpointError, "pickle", "pytorch_model.bin")


def test_no_weights(model: Path) -> None:
    (model / "model.safetensors").unlink()
    refuse(model, CheckpointError, "no model.safetensors")


def test_already_quantized(model: Path) -> None:
    edit_config(model, quantization_config={"quant_method": "gptq", "bits": 5})
    refuse(model, UnsupportedModel, "already quantized", "gptq")


def test_max_seq_len_above_the_positions(model: Path) -> None:
    refuse(model, SequenceLengthError, "129", "128", max_seq_len=129)
    assert load_graph(model, 128).max_seq_len == 128


class Smoothing(nn.Module):
    """A language model that looks one token ahead."""

    mixes = True

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        if self.mixes:
            self.mix = nn.Conv1d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, 16)

    def forward(self, input_ids: torch.Tensor, **_: object) -> SimpleNamespace:
        return SimpleNamespace(logits=self.head(self.mix(self.embed(input_ids).transpose(1, 2)).transpose(1, 2)))


def test_a_rotation_that_asks_for_the_largest_position_hears_of_the_longest(tiny: ModuleType, tmp_path: Path) -> None:
    """PhiMoE scales its rotation by another factor for long texts."""
    import transformers

    factors = {"short_factor": [1.0] * 8, "long_factor": [1.5] * 8, "short_mscale": 1.1, "long_mscale": 1.7}
    rope = {"rope_type": "longrope", "rope_theta": 100.0, "original_max_position_embeddings": 32, **factors}
    config = transformers.PhimoeConfig(**{**tiny.GQA, "num_local_experts": 4, "rope_parameters": rope})
    model = tiny.save_tiny(config, tmp_path)
    ids = torch.arange(3, 43)
    for count, longest in ((40, 64), (20, 32)):
        with torch.no_grad():
            expected = model(ids[None, :count]).logits[0]
        torch.testing.assert_close(interpret(load_graph(tmp_path, longest), ids[:count].tolist()), expected)


class Branching(Smoothing):
    """A model whose code branches on values, or on the number of tokens."""

    mixes = False
    asks_values = True

    def forward(self, input_ids: torch.Tensor, **_: object) -> SimpleNamespace:
        x = self.embed(input_ids)
        if self.asks_values:
            x = x if input_ids.max() > 3 else -x
        else:
            x = x * len(range(input_ids.shape[1]))
        return SimpleNamespace(logits=self.head(x))


def trace_of(cls: type[nn.Module]) -> None:
    import transformers

    config = transformers.LlamaConfig(vocab_size=16, hidden_size=8, num_attention_heads=1, num_hidden_layers=1)
    with torch.device("meta"):
        model = cls().eval()
    weights: dict[str, Weight] = {name: Constant(torch.zeros(x.shape)) for name, x in model.state_dict().items()}
    trace_model(model, config, weights, 64, every_layer=True)


@pytest.mark.parametrize(
    ("asks", "said"), [(True, "branches by a value that it computes"), (False, "known beforehand")]
)
def test_code_that_asks_what_is_not_known_is_told(asks: bool, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Branching, "asks_values", asks)
    with pytest.raises(TraceError, match=said):
        trace_of(Branching)


def test_layers_that_mix_neighbours_are_named() -> None:
    with pytest.raises(UnsupportedModel, match="module 'mix'") as refused:
        trace_of(Smoothing)
    assert refused.value.op and "conv" in refused.value.op and refused.value.module == "mix"


def test_what_a_target_has_no_kernel_for_is_told_before_quantizing(
    tiny: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, engine = tmp_path / "model", tmp_path / "engine"
    tiny.save_tiny(tiny.tiny_configs()["llama"], model)
    monkeypatch.setattr(NormKernel, "refusal", classmethod(lambda cls, step: "a planted reason"))
    with pytest.raises(CodegenError, match="a planted reason"):
        icc.compile(model, engine, target="h100", quant="gptq4")
    assert not engine.exists()


@pytest.mark.parametrize("layers", [0, -1])
def test_a_model_without_layers(tmp_path: Path, layers: int) -> None:
    """Only the embeddings of its checkpoint would be read, which nobody intends."""
    for file in SAMPLE.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "config.json").unlink()
    facts = json.loads((SAMPLE / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(facts | {"num_hidden_layers": layers}))
    with pytest.raises(UnsupportedModel, match=rf"config\.json: {layers} layers"):
        load_graph(tmp_path)
