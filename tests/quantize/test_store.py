"""An interrupted calibration continues to the same result; files in its folder may have any other content."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from icc.compiler.calibrations import calibrations_root, kept_between_targets, open_calibrations, prune
from icc.compiler.graph.graph import Graph
from icc.compiler.options import CompileOptions
from icc.compiler.weights.handles import QuantizedWeight
from icc.passes.base import PassContext
from icc.passes.manager import run_passes
from icc.passes.quantize import store as stores
from icc.passes.quantize import stream as streams
from icc.passes.quantize.auto import QuantizeAuto
from icc.passes.quantize.awq import QuantizeAwq
from icc.passes.quantize.gptq import QuantizeGptq
from icc.passes.quantize.store import PassStore

TEXT = [torch.randint(0, 48, (24,), generator=torch.Generator().manual_seed(i)).tolist() for i in range(6)]


def layers(b) -> Graph:
    x = b.op("rms_norm", b.embed(64), b.weight("norm", 64, scale=1.0), 1e-6)
    for i in range(3):
        gate = b.aten("silu", b.linear(x, f"gate{i}", 96, 64))
        h = b.aten("mul.Tensor", gate, b.linear(x, f"up{i}", 96, 64))
        x = b.aten("add.Tensor", x, b.linear(h, f"down{i}", 64, 96))
    return b.finish(b.linear(b.aten("tanh", x), "head", 48, 64))


def codes(graph: Graph) -> dict[str, torch.Tensor]:
    return {n: w.parts()["codes"] for n, w in graph.weights.items() if isinstance(w, QuantizedWeight)}


class Killed(Exception):
    pass


@pytest.mark.parametrize(
    ("method", "at"),
    [
        (QuantizeGptq, "gate2"),
        (QuantizeAwq, "gate2"),
        (partial(QuantizeAuto, budget=30_000), "gate2"),
    ],
)
def test_resumes_behind_the_last_finished_layer(method, at, new_builder, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(stores, "SAVE_EVERY_S", 0.0)
    graph = layers(new_builder())
    run_passes(graph, [method(sequences=TEXT)], PassContext())
    expected = codes(graph)

    def dies(text: str, done: int, total: int) -> None:
        if text == at:
            raise Killed

    with pytest.raises(Killed):
        run_passes(layers(new_builder()), [method(sequences=TEXT)], PassContext(progress=dies, calibrations=tmp_path))
    seen: list[tuple[str, int]] = []
    ctx = PassContext(progress=lambda text, done, total: seen.append((text, done)), calibrations=tmp_path)
    run: list[str] = []
    call = streams._call
    monkeypatch.setattr(streams, "_call", lambda node, *rest: (run.append(node.name), call(node, *rest))[1])
    graph = layers(new_builder())
    run_passes(graph, [method(sequences=TEXT)], ctx)
    started = [text for text, _ in seen[1:]]  # the manager first reports the pass itself
    assert started[0] == at and seen[1][1] > 0
    assert len(set(run)) < 8  # only the last layer's
    assert expected.keys() == codes(graph).keys()
    assert all(torch.equal(value, codes(graph)[name]) for name, value in expected.items())
    assert len(ctx.quant_records) == len(expected)


def test_what_was_measured_is_not_measured_again(new_builder, tmp_path: Path) -> None:
    """The backward pass, which begins with the head, runs again, but its stored results for weights are reused."""
    method = QuantizeAuto(budget=30_000, sequences=TEXT)
    graph = layers(new_builder())
    run_passes(graph, [method], PassContext())
    expected = codes(graph)

    def dies(text: str, done: int, total: int) -> None:
        if text == "measuring down1":
            raise Killed

    with pytest.raises(Killed):
        run_passes(layers(new_builder()), [method], PassContext(progress=dies, calibrations=tmp_path))
    seen: list[str] = []
    graph = layers(new_builder())
    ctx = PassContext(progress=lambda text, done, total: seen.append(text), calibrations=tmp_path)
    run_passes(graph, [method], ctx)
    measured = [text.removeprefix("measuring ") for text in seen if text.startswith("measuring ")]
    assert {"down1", "gate0", "embed"} < set(measured) and not {"head", "down2", "gate2"} & set(measured)
    assert all(torch.equal(value, codes(graph)[name]) for name, value in expected.items())


def test_what_does_not_fit_is_not_used(tmp_path: Path) -> None:
    store = PassStore(tmp_path)
    store.put(3, {"a": torch.arange(3)}, name="x", shape=[1, 2])
    found = store.get(3, name="x", shape=[1, 2])
    assert found is not None and torch.equal(found[0]["a"], torch.arange(3))
    assert store.get(3, name="y") is None and store.get(4) is None
    (tmp_path / "00003.safetensors").write_bytes(b"half")
    assert store.get(3) is None and store.values() is None


def test_folders_by_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")

    def options(**more) -> CompileOptions:
        return CompileOptions(model, tmp_path / "x.engine", quant="gptq4", **more)

    first = open_calibrations(options(), TEXT)
    assert first.folder is not None and open_calibrations(options(), TEXT).folder is None  # it is in use
    other = open_calibrations(options(group_size=32), TEXT)
    assert other.folder not in (None, first.folder)
    assert first.lock is not None and other.lock is not None
    first.lock.close()  # killed
    again = open_calibrations(options(target="h100"), TEXT)
    assert again.folder == first.folder
    again.done()
    assert list(calibrations_root().iterdir()) == [other.folder]
    other.lock.close()
    assert prune() == 1 and not list(calibrations_root().iterdir())
    (model / "config.json").write_text("{ }")
    assert open_calibrations(options(), TEXT).folder != first.folder


def test_the_next_target_goes_on_with_what_the_last_one_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "config.json").write_text("{}")

    def compiled(target: str) -> Path:
        found = open_calibrations(CompileOptions(tmp_path, tmp_path / "e", quant="gptq4", target=target), TEXT)
        assert found.folder is not None
        found.done()
        return found.folder

    with kept_between_targets():
        first = compiled("cpu")
        (first / "found").touch()
        assert compiled("h100") == first and (first / "found").exists()
    assert not first.exists()
    with pytest.raises(KeyboardInterrupt), kept_between_targets():
        first = compiled("cpu")
        raise KeyboardInterrupt
    assert first.exists()  # the same compile continues
