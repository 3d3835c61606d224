"""`icc plan`: its figures for an engine are those of the compiled engine, byte for byte, and config.json is enough."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import icc
import msgspec
import pytest
from click.testing import CliRunner
from icc.compiler.cli import main
from icc.compiler.frontend.source.unread import ConfigOnly
from icc.compiler.links import divided_seconds, half_ring_seconds, ring_seconds, sum_seconds
from icc.compiler.options import CompileOptions
from icc.compiler.planning.devices import arrangements
from icc.compiler.planning.plan import Plan, make_plan
from icc.compiler.planning.program import plan_graph, plan_program
from icc.compiler.planning.show import as_text
from icc.compiler.targets import find_target
from icc.runtime.commands.inspect import describe_engine
from icc.runtime.format.load import open_engine
from sizes import soak

SAMPLE = Path(__file__).parents[2] / "samples" / "pystd"
ENGINES = [("llama", {"quant": "rtn4"}), ("gemma3-odd_untied", {"max_step_tokens": 16})]
ENGINES += soak(("gemma2", {"max_step_tokens": 16}), ("mixtral", {"max_step_tokens": 16}))
MORE = ["gpt2", "opt", "qwen3_moe", "gpt_oss", "deepseek_v3-latent_grouped_routing", "falcon-written_out_mqa"]


def config_of(checkpoint: Path, folder: Path) -> Path:
    """A directory with nothing but the config.json of a checkpoint."""
    folder.mkdir()
    shutil.copy(checkpoint / "config.json", folder)
    return folder


def planned(model: Path, target: str = "native", **options: Any) -> Any:
    found = make_plan(CompileOptions(model=model, output=Path(), target=target, **options), [target])
    return found.targets[0]


def equal(plan: Any, engine: Path) -> None:
    """Checks every weight, the arena, the KV layout, and the figures that `icc inspect` shows."""
    opened = open_engine(engine)
    program = plan.planned.program
    assert program.weights == opened.program.weights
    assert msgspec.to_builtins(program.kv) == msgspec.to_builtins(opened.program.kv)
    assert plan.planned.limits == opened.manifest.limits
    opened.close()
    facts: Any = describe_engine(engine)
    said = plan.as_json()["bytes"]
    assert said["weights_by_format"] == facts["weights_bytes"]
    assert said["kv_per_token"] == facts["kv_cache"]["bytes_per_token"]
    assert said["kv_full_batch"] == facts["kv_cache"]["bytes_full_batch"]
    assert said["arena"] == facts["arena_bytes"]
    assert plan.planned.kept == tuple(facts["kept"])


@pytest.mark.parametrize(("name", "options"), ENGINES)
def test_bytes_are_those_of_the_engine(
    name: str, options: dict[str, Any], compiled: Callable[..., Any], tmp_path: Path
) -> None:
    found = compiled(name, **options)
    plan = planned(config_of(found.checkpoint, tmp_path / "config"), **options)
    equal(plan, found.engine)
    shown = as_text(Plan(CompileOptions(model=found.checkpoint, output=Path()), [plan, plan]))
    for words in ("native", "decode x16 after 128, at most", "fits", "yes", "KV cache, per token", "compile, about"):
        assert words in shown
    with icc.load(found.engine, threads=1) as llm:
        device = llm.executor.device
        assert plan.planned.memory.logits == device.logits.nbytes
        assert plan.planned.memory.kv_batch == device.cache.nbytes


@pytest.mark.parametrize("name", ["phi3", *soak(*MORE)])
def test_config_json_says_as_much_as_the_weights(name: str, tiny: Any, tmp_path: Path) -> None:
    checkpoint = tmp_path / "model"
    tiny.save_tiny(tiny.tiny_configs()[name], checkpoint, dtype="bfloat16")
    options = CompileOptions(model=checkpoint, output=Path(), quant="awq4", max_seq_len=48)
    graph = plan_graph(ConfigOnly(config_of(checkpoint, tmp_path / "config")), options)
    alone = plan_program(graph, options, find_target("cpu"))
    read = planned(checkpoint, "cpu", quant="awq4", max_seq_len=48).planned
    assert alone.program == read.program and alone.memory == read.memory


def test_the_command(tmp_path: Path) -> None:
    """Two targets; the output says what does not fit."""
    model = config_of(SAMPLE, tmp_path / "config")
    ask = ["plan", str(model), "--target", "cpu,h100", "--quant", "awq4", "--sequences", "8", "--length", "100"]
    said = json.loads(CliRunner().invoke(main, [*ask, "--json", "--memory", "0.005"]).stdout)
    assert said["limits"] == {"max_seq_len": 100, "max_batch_size": 8, "max_step_tokens": 100}
    cpu, gpu = said["targets"]
    assert not cpu["fits"] and cpu["sequences_that_fit"] < 8 and gpu["bandwidth_gb_s"] == 3350
    for found in (cpu, gpu):
        one, batch, prefill = found["limits_of_speed"]
        assert one["sequences"] == 1 and batch["sequences"] == 8 and prefill["kind"] == "prefill"
        assert 0 < one["tokens_per_s"] <= batch["tokens_per_s"]
        assert one["tokens_per_s"] <= found["bandwidth_gb_s"] * 1e9 / found["bytes"]["weights"] * 2
        assert found["compile"]["seconds"] > 0 and found["compile"]["memory"] > 1 << 28


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [(("--target", "h1000"), 2, "h1000"), (("--length", "1025"), 14, "1024"), (("--quant", "q5"), 2, "q5")],
)
def test_refusals(arguments: tuple[str, ...], code: int, words: str) -> None:
    result = CliRunner().invoke(main, ["plan", str(SAMPLE), *arguments])
    assert result.exit_code == code and words in result.output


def test_devices_are_compared(compiled: Callable[..., Any], tmp_path: Path) -> None:
    model = config_of(compiled("mixtral", max_step_tokens=16).checkpoint, tmp_path / "model")
    options = CompileOptions(model=model, output=Path(), target="h200", max_batch_size=8, max_seq_len=64)
    found = make_plan(options, ["h200"], devices=4).targets[0]
    assert found.devices is not None
    arranged = {plan.arrangement.name: plan for plan in found.devices.arranged}
    assert list(arranged) == [
        "replicas 4", "tensors by 2, replicas 2", "experts by 2, replicas 2", "tensors by 2, experts by 2, replicas 2",
        "tensors by 2, prompts by rows, replicas 2", "tensors by 4", "experts by 4", "tensors by 4, experts by 4",
        "tensors by 4, prompts by rows",
    ]  # fmt: skip
    whole = arranged["replicas 4"]
    assert whole.link_seconds == whole.link_bytes == 0 and whole.weights == found.planned.memory.weights
    assert whole.decode_seconds == found.rates[0].seconds and whole.sequences == 4 * found.sequences
    divided = arranged["tensors by 2, replicas 2"]
    # two sums per layer, after attention and after the experts; the parts of the logits; the sum of looked-up words
    hidden, layers, words = 64, 2, found.planned.program.vocab_size
    assert divided.link_bytes == 4 * (hidden * (2 * layers + 1) + words // 2)
    assert divided.link_seconds > 0 and divided.weights < whole.weights < 2 * divided.weights
    rows = arranged["tensors by 2, prompts by rows, replicas 2"]
    assert rows.arrangement.options == "--tensor-parallel 2 --replicas 2 --sequence-parallel"
    assert (rows.link_bytes, rows.weights) == (divided.link_bytes, divided.weights)  # a token's sums are whole
    assert rows.prefill_seconds != divided.prefill_seconds and rows.sequences > 0
    best = found.devices.best
    assert best is not None and best.tokens_per_s == max(plan.tokens_per_s for plan in found.devices.arranged)
    on_cpus = make_plan(replace(options, target="native", max_step_tokens=16), ["native"], devices=2).targets[0].devices
    assert on_cpus is not None
    staged = {plan.arrangement.name: plan for plan in on_cpus.arranged}["layers by 2"]
    alone = on_cpus.arranged[0]
    assert alone.weights / 2 < staged.weights < alone.weights and staged.link_bytes == 4 * hidden
    assert staged.decode_seconds == pytest.approx(alone.decode_seconds + staged.link_seconds, rel=0.01)
    shown = as_text(make_plan(options, ["h200"], devices=2))
    assert "2 x h200, 8 sequences at once, in all:" in shown and f"Take {best.arrangement.options[:2]}" in shown


def test_no_more_ranks_than_an_engine_may_have() -> None:
    """64 GPUs are replicas of at most 8 GPUs that access each other's memory."""
    for name, most in (("h200", 8), ("native", 64)):
        found = list(arrangements(64, find_target(name)))
        assert max(one.ranks for one in found) == most, name
        assert all(one.ranks * one.replicas == 64 for one in found)


def test_links_without_shared_memory_go_through_a_ring() -> None:
    """GPUs over PCI Express have no kernels that read each other's memory: an exchange costs as much as a
    communicator's, in steps through the host: 41 us for a few bytes on eight RTX 4090 (NVIDIA/nccl #1530)."""
    l4, h100 = (find_target(name) for name in ("l4", "h100"))
    for ranks, nbytes in itertools.product((2, 4, 8), (8, 4 * 8192, 4 << 20)):
        assert sum_seconds(nbytes, ranks, l4) == ring_seconds(nbytes, ranks, l4) > sum_seconds(nbytes, ranks, h100)
        assert divided_seconds(nbytes, ranks, l4) == half_ring_seconds(nbytes, ranks, l4)
        assert divided_seconds(nbytes, ranks, l4) > divided_seconds(nbytes, ranks, h100)
    assert 35e-6 < sum_seconds(8, 8, find_target("rtx4090")) < 50e-6
    assert 64 * sum_seconds(8192, 8, l4) > 3 * sum_seconds(64 * 8192, 8, l4)  # each sum has its latency


def test_devices_over_pci_express_are_slower_than_over_nvlink(compiled: Callable[..., Any], tmp_path: Path) -> None:
    """In a small model each sum costs its latency: on L4s a token takes longer with ranks than without. The table shows
    figures in full, however long the names beside them are."""
    model = config_of(compiled("llama").checkpoint, tmp_path / "model")
    options = CompileOptions(model=model, output=Path(), target="l4", max_batch_size=8, max_seq_len=64)
    plan = make_plan(options, ["l4", "h100"], devices=4)
    l4, h100 = ({a.arrangement.name: a for a in found.devices.arranged} for found in plan.targets if found.devices)
    assert l4.keys() == h100.keys() and len(l4) == 5
    for name in l4.keys() - {"replicas 4"}:
        sums = 2 * 2 + 1  # two per layer, and one of the looked-up words
        assert l4[name].link_seconds > sums * 12e-6 and l4[name].link_seconds > 2 * h100[name].link_seconds
        assert l4[name].decode_seconds > l4["replicas 4"].decode_seconds
    shown = as_text(plan)
    assert "\u2026" not in shown and "tensors by 2, prompts by rows, replicas 2" in shown and "tok/s in all" in shown


def test_devices_without_room(compiled: Callable[..., Any], tmp_path: Path) -> None:
    model = config_of(compiled("llama", quant="rtn4").checkpoint, tmp_path / "model")
    options = CompileOptions(model=model, output=Path(), target="h100", max_batch_size=8, max_seq_len=64)
    plan = make_plan(options, ["h100"], memory=1000, devices=2)
    assert plan.targets[0].devices is not None and plan.targets[0].devices.best is None
    assert "None fits: take more devices" in as_text(plan)
    assert json.loads(json.dumps(plan.as_json()))["targets"][0]["devices"]["most_tokens_per_s"] is None
