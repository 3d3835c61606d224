"""`icc export --onnx`: onnxruntime agrees with the reference interpreter, op by op and after every phase."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import numpy as np
import onnx
import pytest
import torch
from click.testing import CliRunner, Result
from graph_tracing import OPS
from icc.compiler.cli import main
from icc.compiler.errors import ExportError
from icc.compiler.frontend.load import load_graph
from icc.compiler.graph.graph import Graph
from icc.compiler.graph.interpret import interpret
from icc.compiler.graph.parser import parse_graph
from icc.compiler.onnx.export import export_graph
from icc.compiler.onnx.write import write_model
from icc.compiler.ops.pointwise import OPCODES
from icc.compiler.weights.formats.base import Parts, StorageFormat
from icc.compiler.weights.formats.blocks import BlockFormat
from icc.compiler.weights.formats.channel import ChannelInt8
from icc.compiler.weights.formats.float8 import Float8
from icc.compiler.weights.formats.ggml import GGML_FORMATS
from icc.compiler.weights.formats.reduced import ReducedInt8
from icc.compiler.weights.formats.registry import find_format
from icc.compiler.weights.handles import PackedWeight
from icc.passes.base import PassContext
from icc.passes.manager import run_passes
from icc.passes.registry import parse_passes
from onnx_running import feeds, run_exported, session
from sample_graph import TOKENS, SampleGraph, samples_of
from sizes import soak
from tiny_models import tiny_configs
from transformers import BertConfig, BertForSequenceClassification

IDS = [5, 7, 9, 3, 20, 11, 40, 60, 1, 2, 33, 17, 90]
PHASES = ("canonicalize", "quantize-rtn{group=32}", "attention", "fuse")
# windows and soft caps; experts and sinks; a layer norm with biases and learned positions
FEW = ("gemma2", "gpt_oss")


def close(found: np.ndarray, graph: Graph, ids: list[int], bound: float = 2e-5) -> None:
    wanted = interpret(graph, ids).numpy()
    assert found.shape == wanted.shape
    assert np.abs(found - wanted).max() <= bound * np.abs(wanted).max()


@pytest.mark.parametrize("family", [*FEW, *soak(*(name for name in tiny_configs() if name not in FEW))])
def test_after_every_phase(family: str, tiny: ModuleType, tmp_path: Path) -> None:
    tiny.save_tiny(tiny_configs()[family], tmp_path)
    graph = load_graph(tmp_path, 64)
    close(run_exported(graph, tmp_path / "m.onnx", IDS), graph, IDS)
    for phase in PHASES:
        run_passes(graph, parse_passes(phase), PassContext())
        close(run_exported(graph, tmp_path / "m.onnx", IDS), graph, IDS)


def test_every_op(tmp_path: Path) -> None:
    left_out = ("acme.", "outside.")  # ops of other tests
    known = [op for op in OPS.values() if not op.name.startswith(left_out) and not op.traits.collective]
    samples = samples_of(*known)
    made = SampleGraph(samples)
    found = torch.from_numpy(run_exported(made.graph, tmp_path / "m.onnx", list(range(TOKENS))))
    wanted = interpret(made.graph, range(TOKENS))
    for sample, slots in made.slots.items():
        for slot in slots:
            part = slice(slot.start, slot.start + slot.expected.shape[1])
            torch.testing.assert_close(found[:, part], wanted[:, part], rtol=1e-4, atol=1e-5, msg=sample)


def test_every_opcode(tmp_path: Path) -> None:
    """On floats, and on integers for opcodes that treat them differently."""
    pairs = {"add", "sub", "mul", "div", "floordiv", "remainder", "pow", "maximum", "minimum"}
    pairs |= {"eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or"}
    lines, results = [], []

    def add(op: str, shape: str = "8", kind: str = "f32") -> None:
        lines.append(f"  %{len(lines)}: {kind}[T, {shape}] = {op}")

    add("icc.embedding(%token_ids, @x: f32[128, 8])")
    add("icc.embedding(%token_ids, @y: f32[128, 8])")
    add("aten.abs(%0)")
    add('icc.pointwise([%1], "t0 = mul a0 3.0; t1 = to_i32 t0; t2 = mul t1 2; t3 = sub t2 1")', kind="i32")
    whole = {"floordiv", "remainder", "maximum", "mul", "lt"}
    for opcode in OPCODES:
        roots = opcode in ("log", "log1p", "sqrt", "rsqrt", "pow")
        inputs = "%2, %1" if roots else "%0, %1"
        call = f"{opcode} a0 a1" if opcode in pairs else "where t0 a0 a1" if opcode == "where" else f"{opcode} a0"
        before, number = ("t0 = gt a0 a1; ", 1) if opcode == "where" else ("", 0)
        add(f'icc.pointwise([{inputs}], "{before}t{number} = {call}; t{number + 1} = to_f32 t{number}")')
        results.append(len(lines) - 1)
        if opcode in whole:
            add(f'icc.pointwise([%3], "t0 = {opcode} a0 -3; t1 = to_f32 t0")')
            results.append(len(lines) - 1)
    add(f"aten.cat([{', '.join(f'%{n}' for n in results)}], 1)", shape=str(8 * len(results)))
    text = "graph(%token_ids: i64[T]):\n" + "\n".join(lines) + f"\n  return %{len(lines) - 1}\n"
    graph = parse_graph(text)
    found = torch.from_numpy(run_exported(graph, tmp_path / "m.onnx", IDS))
    torch.testing.assert_close(found, interpret(graph, IDS), rtol=1e-4, atol=1e-5, equal_nan=True)


FORMATS = ["q4g32", "q8g64", "zq4g32", "zq8_bf16g32", "bf16", "f16", "nf4g64", "nvfp4_xg256", *GGML_FORMATS]
FORMATS += ["i8g256", "i7g32", "e4m3", "e4m3_kg96", "oq4_bf16g32", "oq8g64", "t2_f32g64"]
K = 256


def random_parts(storage: StorageFormat, shape: Sequence[int]) -> Parts:
    """Random parts, each within its range."""
    found = {}
    for part, array in storage.arrays(shape).items():
        if part == "exponents":
            found[part] = torch.randint(120, 130, array.shape).to(array.dtype)
        elif array.dtype.is_floating_point:
            found[part] = torch.rand(array.shape).to(array.dtype).to(array.working)
        else:
            if part == "zeros" and isinstance(storage, ChannelInt8 | ReducedInt8):
                found[part] = torch.full(array.shape, 128, dtype=array.dtype)
                continue
            levels = len(storage.table) if isinstance(storage, BlockFormat) and storage.table else 2**array.bits
            found[part] = torch.randint(0, levels if part == "codes" else 2 ** min(4, array.bits), array.shape)
            if isinstance(storage, Float8):
                found[part][found[part] % 128 == 127] = 0  # no number
            found[part] = found[part].to(array.dtype)
    return found


def test_every_way_to_store_a_weight(tmp_path: Path) -> None:
    """Stored as the matrix of a product, the table of an embedding, and the matrices of experts."""
    lines = ["  %r: f32[T, 2] = icc.embedding(%token_ids, @routes: f32[128, 2])"]
    lines.append("  %e: i64[T, 2] = prims.convert_element_type(%r, torch.int64)")
    parts = []
    for i in range(len(FORMATS)):
        lines.append(f"  %{i}: f32[T, {K}] = icc.embedding(%token_ids, @e{i}: f32[128, {K}])")
        lines.append(f"  %l{i}: f32[T, 17] = icc.linear(%{i}, @w{i}: f32[17, {K}], @b: f32[17])")
        lines.append(f"  %x{i}: f32[T, 2, 9] = icc.expert_linear(%{i}, @m{i}: f32[3, 9, {K}], None, %e)")
        lines.append(f"  %v{i}: f32[T, 18] = aten.view(%x{i}, [-1, 18])")
        parts += [f"%{i}", f"%l{i}", f"%v{i}"]
    width = (K + 35) * len(FORMATS)
    lines.append(f"  %all: f32[T, {width}] = aten.cat([{', '.join(parts)}], 1)")
    graph = parse_graph("graph(%token_ids: i64[T]):\n" + "\n".join(lines) + "\n  return %all\n")
    for name, weight in graph.weights.items():
        if name[0] in "ewm":
            stored = find_format(FORMATS[int(name[1:])])
            graph.weights[name] = PackedWeight.pack(random_parts(stored, weight.shape), stored, weight.shape)
    path = tmp_path / "m.onnx"
    found, wanted = run_exported(graph, path, IDS), interpret(graph, IDS).numpy()
    for i, stored in enumerate(FORMATS):
        part = slice((K + 35) * i, (K + 35) * (i + 1))
        assert np.abs(found[:, part] - wanted[:, part]).max() <= 2e-5 * np.abs(wanted[:, part]).max(), stored
    model = onnx.load(path)
    products = [n for n in model.graph.node if n.op_type == "MatMulNBits"]
    bits = [next(a.i for a in n.attribute if a.name == "bits") for n in products]
    affine = ["q4g32", "q8g64", "zq4g32", "zq8_bf16g32", "q4_0", "q8_0", "i7g32"]
    assert [n.input[1] for n in products] == [f"w{FORMATS.index(name)}.codes" for name in affine]
    assert bits == [4, 8, 4, 8, 4, 8, 8]
    [codes] = [i for i in model.graph.initializer if i.name == "w0.codes"]
    assert list(codes.dims) == [17, K // 32, 16] and codes.data_type == onnx.TensorProto.UINT8


@pytest.fixture(scope="module")
def checkpoint(tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    tiny.save_tiny(tiny_configs()["llama-mqa_tied_biases_llama3"], path, dtype="bfloat16")
    return path


def export(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["export", *map(str, arguments)])


def test_the_command(checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    done = export(checkpoint, "--onnx", path, "-p", "canonicalize,quantize-rtn{group=32}", "--max-seq-len", 64)
    assert done.exit_code == 0, done.output
    assert re.fullmatch(rf"{path} \(0\.\d MiB\): \d+ nodes, input_ids, position_ids -> logits\n", done.stdout)
    model = onnx.load(path)
    assert [list(d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim) for v in model.graph.output] == [
        ["batch", "sequence", 120]
    ]
    assert "/model/layers.1/mlp/down_proj/MatMulNBits" in {n.name for n in model.graph.node}
    # the head and the embedding are one matrix, stored once
    assert sum(120 in i.dims for i in model.graph.initializer) == 3
    again = export(checkpoint, "--onnx", path)
    assert again.exit_code == 15 and "--force" in again.stderr
    done = export(checkpoint, "--onnx", path, "--force", "--external-data", "--max-seq-len", 64)
    assert done.exit_code == 0 and sorted(p.name for p in tmp_path.iterdir()) == ["m.onnx", "m.onnx.data"]
    outside = onnx.load(path, load_external_data=False).graph.initializer
    assert all(i.data_location == i.EXTERNAL for i in outside if i.name.endswith("proj.weight"))
    graph = load_graph(checkpoint, 64)
    found = session(path)
    [logits] = found.run(["logits"], feeds(found, IDS, batch=2))
    assert logits.shape == (2, len(IDS), 120)  # sequences of a batch are independent
    close(logits[0], graph, IDS)
    close(logits[1], graph, IDS)


def test_scores_of_pairs(tmp_path: Path) -> None:
    """Token types are a separate input, and a text has one row of logits."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 48, "num_hidden_layers": 1}
    config = BertConfig(vocab_size=64, max_position_embeddings=32, num_labels=1, pad_token_id=0, **sizes)
    model = BertForSequenceClassification(config).eval()
    model.save_pretrained(tmp_path / "model")
    refused = export(tmp_path / "model", "--onnx", tmp_path / "m.onnx")
    assert refused.exit_code == 12 and "--task rerank for scores" in refused.stderr
    done = export(tmp_path / "model", "--onnx", tmp_path / "m.onnx", "--task", "rerank", "-p", "canonicalize")
    assert done.exit_code == 0, done.output
    given = {"input_ids": torch.randint(1, 64, (2, 9)), "token_type_ids": torch.tensor([[0] * 4 + [1] * 5] * 2)}
    positions = np.tile(np.arange(9), (2, 1))
    fed = {name: value.numpy() for name, value in given.items()} | {"position_ids": positions}
    [found] = session(tmp_path / "m.onnx").run(["logits"], fed)
    with torch.no_grad():
        np.testing.assert_allclose(found, model(**given).logits.numpy(), atol=1e-6)


def test_refusals(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert export(tmp_path / "none", "--onnx", tmp_path / "m.onnx").exit_code == 10
    assert export(checkpoint, "--onnx", tmp_path / "no" / "m.onnx").exit_code == 16
    assert export(checkpoint, "--onnx", tmp_path / "m.onnx", "-p", "fusion").exit_code == 2
    monkeypatch.setattr("icc.compiler.request.find_spec", lambda name: None)
    missing = export(checkpoint, "--onnx", tmp_path / "m.onnx")
    assert missing.exit_code == 3 and "pip install 'icc-llm[onnx]'" in missing.stderr
    assert not list(tmp_path.iterdir())


def test_an_op_that_onnx_has_no_words_for(tmp_path: Path) -> None:
    from icc.compiler.ops import op

    @op(namespace="outside")
    def untold(x: torch.Tensor) -> torch.Tensor:
        """x."""
        return x.clone()

    graph = parse_graph(
        "graph(%token_ids: i64[T]):\n"
        "  %0: f32[T, 8] = icc.embedding(%token_ids, @x: f32[128, 8])\n"
        "  %1: f32[T, 8] = outside.untold(%0)  # model.layers.0.mlp\n  return %1\n"
    )
    with pytest.raises(ExportError, match=r"outside\.untold in module 'model\.layers\.0\.mlp' cannot be written"):
        export_graph(graph)


def test_nothing_is_left_of_a_failed_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = parse_graph(
        "graph(%token_ids: i64[T]):\n  %0: f32[T, 64] = icc.embedding(%token_ids, @x: f32[128, 64])\n  return %0\n"
    )
    (tmp_path / "m.onnx").write_bytes(b"old")
    exported = export_graph(graph)
    monkeypatch.setattr(type(next(iter(graph.weights.values()))), "load", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        write_model(exported, tmp_path / "m.onnx", external=True)
    assert [p.read_bytes() for p in tmp_path.iterdir()] == [b"old"]
