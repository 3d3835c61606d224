"""ONNX files that are damaged or violate their ops' definitions: a one-line error and nothing else, whatever is
changed."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from contributed import write_decoder
from icc.compiler.errors import CheckpointError, IccError, UnsupportedModel
from icc.compiler.frontend.load import load_graph
from onnx import ModelProto, TensorProto
from sizes import size_of

sys.path.insert(0, str(Path(__file__).parents[1] / "fuzz"))
from changing_onnx import CHANGES


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("decoder") / "m.onnx"
    write_decoder(path, window=5)
    return path.read_bytes()


@pytest.mark.parametrize("change", CHANGES)
def test_any_change_is_read_or_told_in_a_line(
    change: Callable[[ModelProto, random.Random], None],
    whole: bytes,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    for seed in range(size_of("damaged_onnx")):
        model = ModelProto.FromString(whole)
        change(model, random.Random(seed))
        (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
        with contextlib.suppress(IccError):  # no other error
            try:
                load_graph(tmp_path / "m.onnx", 64)
            except IccError as error:
                assert "\n" not in error.message and len(error.message) < 500, seed
                raise
    assert "Traceback" not in "".join(capfd.readouterr())  # in torch's log


def test_damaged_bytes(whole: bytes, tmp_path: Path) -> None:
    rng = random.Random(0)
    for _ in range(size_of("damaged_onnx")):
        data = bytearray(whole)
        for _ in range(rng.randint(1, 6)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        (tmp_path / "m.onnx").write_bytes(data[: rng.choice([len(data), rng.randrange(len(data))])])
        with contextlib.suppress(IccError):
            load_graph(tmp_path / "m.onnx", 64)


def refused(path: Path, model: ModelProto, kind: type[IccError], words: str) -> None:
    path.write_bytes(model.SerializeToString())
    with pytest.raises(kind, match=words):
        load_graph(path, 64)


def test_what_is_wrong_is_said(whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"

    def fresh() -> ModelProto:
        return ModelProto.FromString(whole)

    twice, absent, opset, none, short, null = (fresh() for _ in range(6))
    twice.graph.node[-1].output[0] = twice.graph.node[0].output[0]
    refused(path, twice, CheckpointError, "two nodes make the value|nothing makes its output")
    absent.graph.output[0].name = "other"
    refused(path, absent, CheckpointError, "nothing makes its output 'other'")
    for o in opset.opset_import:
        o.version = 9999
    refused(path, opset, UnsupportedModel, "is of opset 9999: icc reads 7 to")
    del none.opset_import[:]
    refused(path, none, UnsupportedModel, "is of no opset")
    product = next(n for n in short.graph.node if n.op_type in ("MatMul", "MatMulNBits"))
    del product.input[1:]
    refused(path, short, CheckpointError, "has a node that is none of its op: IndexError")
    tensor = null.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="a\0b")
    refused(path, null, CheckpointError, "is damaged: ValueError: embedded null")
