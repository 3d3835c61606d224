"""ONNX files as models: the files of torch, onnxruntime's builder and icc itself, against onnxruntime."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import ModuleType

import icc
import numpy as np
import onnx
import pytest
import torch
from click.testing import CliRunner
from contributed import write_decoder
from icc.compiler.cli import main
from icc.compiler.errors import CheckpointError, TensorError, UnsupportedModel
from icc.compiler.frontend.load import load_graph
from icc.compiler.frontend.source.onnx.container import open_container
from icc.compiler.frontend.source.source import open_source
from icc.compiler.graph.graph import Graph, attention_spec
from icc.compiler.graph.interpret import interpret
from icc.compiler.graph.tensor_types import type_of
from icc.passes.base import PassContext
from icc.passes.manager import run_passes
from icc.passes.registry import parse_passes
from onnx import TensorProto, helper, numpy_helper
from onnx_running import feeds, run_exported, session
from sizes import soak
from tiny_models import tiny_configs
from torch_exports import export, export_encoder

IDS = [5, 7, 9, 3, 20, 11, 40, 60, 1, 2, 33, 17, 90]


def reference(path: Path) -> np.ndarray:
    found = session(path)
    [logits] = found.run(["logits"], feeds(found, IDS))
    return logits.reshape(len(IDS), -1)


def close(found: np.ndarray, wanted: np.ndarray, bound: float = 2e-5) -> None:
    assert found.shape == wanted.shape and np.abs(found - wanted).max() <= bound * np.abs(wanted).max()


def ops_of(graph: Graph) -> set[str]:
    return {str(node.target) for node in graph.nodes if node.op == "call_function"}


# grouped queries, a cache and rotary embedding; other families and torch's newer exporter: the older one of torch 2.13
# cannot export transformers' gpt2 and opt ("len() of a 0-d tensor", in its own `size`)
CASES = [("llama", True, False), *soak(("gemma2", True, False), *((f, False, True) for f in ("llama", "gpt2", "opt")))]
CASES += soak(*((f, False, False) for f in ("gemma3", "qwen3", "phi3-mha_partial_tied", "mistral", "gpt_neox")))


@pytest.mark.parametrize(("family", "cached", "dynamo"), CASES)
def test_what_torch_exports(family: str, cached: bool, dynamo: bool, tiny: ModuleType, tmp_path: Path) -> None:
    model = tiny.save_tiny(tiny_configs()[family], tmp_path / "checkpoint")
    path = tmp_path / "model.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        export(model, path, cached, dynamo)
    graph = load_graph(path, 64)
    close(interpret(graph, IDS).numpy(), reference(path))
    config = model.config.get_text_config()
    assert graph.info.num_layers == config.num_hidden_layers and graph.info.vocab_size == config.vocab_size
    shared = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    assert [type_of(node.args[1]).shape[0] for node in graph.attention_nodes] == [shared] * config.num_hidden_layers  # type: ignore[arg-type]
    run_passes(graph, parse_passes("canonicalize,attention"), PassContext())
    assert not any("aten.cos" in op or "rsqrt" in op for op in ops_of(graph))  # rotary tables and norms are recognised
    close(interpret(graph, IDS).numpy(), reference(path))


# TorchScript and torch's newer exporter; RoBERTa counts positions over tokens that are not padding
ENCODERS = [("XLMRobertaConfig", False), *soak(("BertConfig", False), ("BertConfig", True), ("XLMRobertaConfig", True))]
ENCODERS += soak(("DistilBertConfig", False), ("MPNetConfig", False))


@pytest.mark.parametrize(("kind", "dynamo"), ENCODERS)
def test_encoders(kind: str, dynamo: bool, tmp_path: Path) -> None:
    import transformers

    sizes = {"vocab_size": 120, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    distilled = {"vocab_size": 120, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48}
    sizes = distilled if kind.startswith("Distil") else {**sizes, "intermediate_size": 48}
    torch.manual_seed(0)
    config = getattr(transformers, kind)(**sizes, max_position_embeddings=66, pad_token_id=0)
    path = tmp_path / "model.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        export_encoder(transformers.AutoModel.from_config(config).eval(), path, kind == "BertConfig", dynamo)
    graph = load_graph(path, 64, task="embed")
    found = session(path)
    ids = [token for token in IDS if token > 1]  # no padding, which is always 1 in MPNet
    [wanted] = found.run(["last_hidden_state"], feeds(found, ids))
    assert graph.looks_ahead and len(list(graph.attention_nodes)) == 2
    close(interpret(graph, ids).numpy(), wanted[0])
    with pytest.raises(UnsupportedModel, match="no logits") as refused:  # it generates no text
        load_graph(path, 64)
    assert "--task embed" in refused.value.hint


@pytest.mark.soak
def test_scores_of_pairs(tmp_path: Path) -> None:
    """A classifier with --task rerank: token types tell which text a token belongs to."""
    import transformers

    sizes = {"vocab_size": 120, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.BertConfig(**sizes, intermediate_size=48, max_position_embeddings=66, num_labels=1)
    torch.manual_seed(0)
    path = tmp_path / "model.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        export_encoder(transformers.AutoModelForSequenceClassification.from_config(config).eval(), path, types=True)
    config.save_pretrained(tmp_path)
    graph = load_graph(path, 64, task="rerank")
    assert graph.picked == "first" and [array.name for array in graph.declared] == ["token_type_ids"]
    found, types = session(path), [0] * 6 + [1] * 7
    given = {**feeds(found, IDS), "token_type_ids": np.array([types])}
    [wanted] = found.run(["logits"], given)
    close(interpret(graph, IDS, extras={"token_type_ids": torch.tensor(types)}).numpy()[:1], wanted)
    with pytest.raises(UnsupportedModel, match="no hidden states"):
        load_graph(path, 64, task="embed")


@pytest.mark.soak
def test_an_engine_of_an_encoder(tmp_path: Path) -> None:
    import transformers

    config = transformers.BertConfig(
        vocab_size=120, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=48
    )
    path, engine = tmp_path / "model.onnx", tmp_path / "engine"
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        export_encoder(transformers.AutoModel.from_config(config).eval(), path, types=True)
    options = ["-o", str(engine), "--target", "native", "--task", "embed", "--max-seq-len", "64"]
    done = CliRunner().invoke(main, ["compile", str(path), *options])
    assert done.exit_code == 0, done.output
    found = session(path)
    [wanted] = found.run(["last_hidden_state"], feeds(found, IDS))
    mean = wanted[0].mean(0)
    with icc.load(engine, threads=1) as llm:
        close(np.asarray(llm.embed([IDS]))[0], mean / np.linalg.norm(mean))


def test_a_snapshot_of_the_hub_is_links(tmp_path: Path) -> None:
    """The file, its data and its configuration are links into one folder of blobs, and are found by their names."""
    blobs, names = tmp_path / "blobs", tmp_path / "snapshots" / "1" / "onnx"
    blobs.mkdir()
    names.mkdir(parents=True)
    small(blobs / "a", external={"location": "model.onnx_data"})
    (blobs / "b").write_bytes(bytes(8 * 16 * 4))
    (names.parent / "config.json").write_text('{"model_type": "llama"}')
    (names / "model.onnx").symlink_to("../../../blobs/a")
    (names / "model.onnx_data").symlink_to("../../../blobs/b")
    source = open_source(names.parent)
    assert source.files == names.parent and source.config.model_type == "llama"
    (names / "model.onnx_data").unlink()
    (tmp_path / "elsewhere").write_bytes(bytes(8 * 16 * 4))
    (names / "model.onnx_data").symlink_to("../../../elsewhere")
    with pytest.raises(CheckpointError, match="outside its folder"):
        open_source(names.parent)


def test_a_packed_matrix_that_is_head_and_embedding(tiny: ModuleType, tmp_path: Path) -> None:
    """As icc and onnxruntime's builder write it: GatherBlockQuantized of the codes of a MatMulNBits."""
    tiny.save_tiny(tiny_configs()["llama-mqa_tied_biases_llama3"], tmp_path / "checkpoint")
    graph = load_graph(tmp_path / "checkpoint", 64)
    run_passes(graph, parse_passes("canonicalize,quantize-rtn{group=32}"), PassContext())
    path = tmp_path / "model.onnx"
    wanted = run_exported(graph, path, IDS)
    close(interpret(graph, IDS).numpy(), wanted)
    assert "GatherBlockQuantized" in {node.op_type for node in onnx.load(path).graph.node}
    again = load_graph(path, 64)
    close(interpret(again, IDS).numpy(), wanted)
    assert [w.storage.name for w in again.weights.values() if w.shape[0] == graph.info.vocab_size] == ["zq8_f32g32"]


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("decoder") / "model.onnx"
    write_decoder(path, window=5)
    return path


def test_an_engine_of_a_file_alone(decoder: Path) -> None:
    """No config.json, no tokenizer; 4 and 8-bit weights as the file has them."""
    engine = decoder.with_name("engine")
    done = CliRunner().invoke(
        main, ["compile", str(decoder.parent), "-o", str(engine), "--target", "native", "--max-seq-len", "64"]
    )
    assert done.exit_code == 0, done.output
    wanted = reference(decoder)
    with icc.load(engine, threads=1) as llm:
        close(np.asarray(llm.logits(IDS)), wanted, 2e-2)
        assert (np.asarray(llm.logits(IDS)).argmax(-1) == wanted.argmax(-1)).mean() > 0.9


def test_names_are_those_of_the_model(decoder: Path) -> None:
    graph = load_graph(decoder, 64)
    close(interpret(graph, IDS).numpy(), reference(decoder))
    stored = {name: weight.storage.name for name, weight in graph.weights.items()}
    assert stored["model.embed_tokens.weight"] == "f32"
    assert stored["model.layers.1.mlp.up_proj.MatMul.weight_Q"] == "zq8_f32g16"
    assert "model.layers.0.attn.q_proj" in {node.meta.get("module") for node in graph.nodes}
    assert [attention_spec(node).mask.window for node in graph.attention_nodes] == [5, 5]


@pytest.mark.soak
def test_there_and_back(decoder: Path, tmp_path: Path) -> None:
    """A graph read from a file, written after its passes and read again: the same logits and 4-bit weights."""
    graph = load_graph(decoder, 64)
    run_passes(graph, parse_passes("canonicalize,attention,fuse"), PassContext())
    path = tmp_path / "again.onnx"
    wanted = run_exported(graph, path, IDS)
    again = load_graph(path, 64)
    close(interpret(again, IDS).numpy(), wanted)
    assert (
        sorted(w.storage.name for w in again.weights.values() if "zq" in w.storage.name)
        == ["zq4_f32g16"] * 2 + ["zq8_f32g16"] * 2
    )


def small(path: Path, **changes: object) -> Path:
    """Write a model of an embedding and a product, with fields of the matrix's tensor replaced."""
    tensor = numpy_helper.from_array(np.ones((8, 16), np.float32), "w")
    for name, value in changes.items():
        if name == "dims":
            del tensor.dims[:]
            tensor.dims.extend(value)  # type: ignore[arg-type]
        elif name == "external":
            tensor.ClearField("raw_data")
            tensor.data_location = TensorProto.EXTERNAL
            for key, entry in value.items():  # type: ignore[attr-defined]
                tensor.external_data.add(key=key, value=str(entry))
        else:
            setattr(tensor, name, value)
    table = numpy_helper.from_array(np.ones((128, 8), np.float32), "table")
    nodes = [
        helper.make_node("Gather", ["table", "input_ids"], ["x"]),
        helper.make_node("MatMul", ["x", "w"], ["logits"]),
    ]
    info = helper.make_tensor_value_info
    inputs = [info("input_ids", TensorProto.INT64, ["batch", "sequence"])]
    outputs = [info("logits", TensorProto.FLOAT, ["batch", "sequence", 16])]
    model = helper.make_model(helper.make_graph(nodes, "g", inputs, outputs, [table, tensor]), ir_version=9)
    path.write_bytes(model.SerializeToString())
    return path


def test_damaged_files_are_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "inside").write_bytes(bytes(600))
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "short").write_bytes(bytes(100))
    wrong = {
        "more than there is": {"dims": [1 << 40, 16]},
        "less than nothing": {"dims": [-8, 16]},
        "another type": {"data_type": TensorProto.STRING},
        "no type": {"data_type": 4711},
        "outside": {"external": {"location": "../inside"}},
        "absolute": {"external": {"location": str(tmp_path / "inside")}},
        "absent": {"external": {"location": "none"}},
        "short": {"external": {"location": "short"}},
        "beyond": {"external": {"location": "short", "offset": 2**62}},
        "another length": {"external": {"location": "short", "length": 99}},
        "no number": {"external": {"location": "short", "offset": "x"}},
    }
    for what, changes in wrong.items():
        with pytest.raises((CheckpointError, TensorError)) as caught:
            open_container(small(folder / "m.onnx", **changes))
        assert "\n" not in caught.value.message and len(caught.value.message) < 300, what
    whole = small(folder / "m.onnx").read_bytes()
    for length in (1, 40, len(whole) // 2, len(whole) - 1):
        (folder / "m.onnx").write_bytes(whole[:length])
        with pytest.raises((CheckpointError, TensorError)):
            open_container(folder / "m.onnx")


def refusal(path: Path, nodes: list[onnx.NodeProto], *inputs: onnx.ValueInfoProto) -> str:
    info = helper.make_tensor_value_info
    given = inputs or (info("input_ids", TensorProto.INT64, ["batch", "sequence"]),)
    outputs = [info("logits", TensorProto.FLOAT, ["batch", "sequence", 8])]
    table = numpy_helper.from_array(np.ones((128, 8), np.float32), "table")
    graph = helper.make_graph(nodes, "g", list(given), outputs, [table])
    path.write_bytes(helper.make_model(graph, ir_version=9).SerializeToString())
    with pytest.raises(UnsupportedModel) as caught:
        load_graph(path, 64)
    return caught.value.message


def test_what_cannot_be_compiled_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    embed = helper.make_node("Gather", ["table", "input_ids"], ["x"], name="/model/embed/Gather")
    unknown = helper.make_node("Det", ["x"], ["logits"], name="/model/layers.0/Det")
    assert "Det (node '/model/layers.0/Det' of m.onnx) cannot be compiled" in refusal(path, [embed, unknown])
    mixing = helper.make_node("CumSum", ["x", "one"], ["logits"], name="/sum")
    one = helper.make_node("Constant", [], ["one"], value_int=1)
    assert "a running sum over the tokens" in refusal(path, [embed, one, mixing])
    info = helper.make_tensor_value_info
    pixels = info("pixel_values", TensorProto.FLOAT, ["batch", 3, 224, 224])
    assert "no input_ids" in refusal(path, [helper.make_node("Identity", ["pixel_values"], ["logits"])], pixels)
    ids = info("input_ids", TensorProto.INT64, ["batch", "sequence"])
    plain = helper.make_node("Identity", ["x"], ["logits"])
    assert "has the input 'pixel_values'" in refusal(path, [embed, plain], ids, pixels)
    mask = info("attention_mask", TensorProto.FLOAT, ["batch", 1, "sequence", "sequence"])
    assert "which icc has no value for" in refusal(path, [embed, plain], ids, mask)
